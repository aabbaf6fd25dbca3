"""Images and contexts of builds."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox import paths
from sandbox.images import ImageStore

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Images and cache of one's own, with the base image, as the node has it unpacked, among the images."""
    tmp_path_factory.getbasetemp()  # or it would be made where everything is removed below
    directory = Path(tempfile.mkdtemp(prefix="dkrt-", dir="/tmp"))
    directory.chmod(0o755)
    store = ImageStore()
    base = store.rootfs("base", paths.sandbox_user())
    with store.hold(base), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_IMAGES", str(directory / "images"))
        patch.setenv("ROLLOUT_IMAGE_CACHE", str(directory / "cache"))
        patch.setenv("TMPDIR", str(directory / "tmp"))
        patch.setattr(tempfile, "tempdir", None)
        for name, mode in (("images", 0o755), ("tmp", 0o1777)):
            (directory / name).mkdir()
            (directory / name).chmod(mode)
        (directory / "images/base").symlink_to(base)
        yield directory
    subprocess.run(["chmod", "-R", "u+rwx", directory], check=False, capture_output=True)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def context(tmp_path: Path) -> Write:
    """Writes a Dockerfile and files beside it; returns their directory."""

    def write(dockerfile: str, **files: str) -> Path:
        directory = tmp_path / "context"
        shutil.rmtree(directory, ignore_errors=True)
        for name, text in {"Dockerfile": dockerfile, **files}.items():
            place = directory / name.replace("__", "/").replace("dot_", ".")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return directory

    return write
