"""What the sandbox's server looks at of the agent's keeps it from nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sandboxes import server_modules


@pytest.fixture
def repair() -> Any:
    with server_modules("repair") as (module,):
        yield module


@pytest.mark.timeout(60, func_only=True)
def test_neither_a_pipe_nor_what_has_no_end_holds_it_up(repair, monkeypatch, tmp_path):
    path = tmp_path / "ld.so.preload"
    monkeypatch.setattr(repair, "PRELOAD", str(path))
    for first in (None, b"/usr/lib/libimage.so\n"):
        if first is not None:
            path.write_bytes(first)
        loader = repair.Loader(True)
        for trick in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
            path.unlink(missing_ok=True)
            trick(path)
            loader.restore()
            assert not path.is_symlink()
            assert (path.read_bytes() if path.exists() else None) == first
