"""Each command of README and of the guides is run as it stands there, in order, but for marked ones."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy import screenshots
from services.launch.local import Options, Stack
from services.launch.paths import home
from tests.helpers.pages import GUIDES, blocks
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import ROOT

TIMEOUT_S = 200
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.fixture(scope="module")
def own_home(tmp_path_factory):
    """As this checkout's, but that images which a page builds come to nobody else."""
    directory, real = tmp_path_factory.mktemp("home"), home()
    (directory / "images").mkdir()
    for source in (*real.iterdir(), *(real / "images").iterdir()):
        if source.name not in ("images", "run", "log"):
            (directory / source.relative_to(real)).symlink_to(source)
    with (
        pytest.MonkeyPatch.context() as patch,
        # Paths of sockets are short, so not in pytest's own directory.
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes,
    ):
        patch.setenv("ROLLOUT_HOME", str(directory))
        patch.setenv("ROLLOUT_SANDBOX_DIR", sandboxes)
        yield directory
        stop_host(Path(sandboxes))


@pytest.fixture(scope="module")
def started(own_home):
    """What `make up` starts, on free ports."""
    stack = Stack(own_home / "run", print)
    try:
        yield stack.up(Options(stack.dir, private_ports=True))
    finally:
        stack.down()


def test_a_picture_shows_what_a_command_prints_and_asks_no_other_site(started, tmp_path, monkeypatch):
    monkeypatch.setattr(screenshots, "IMAGES", tmp_path)
    screenshots.terminal("status", ["status", "--url", started.url], os.environ)
    picture = (tmp_path / "status.svg").read_text()
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    shown = html.unescape("".join(texts)).replace("\xa0", " ")
    assert "rollout status" in shown and str(started.flower_url) in shown
    assert re.findall(r"""(?:url\(|href=|src=)["']?(https?:[^)"']+)""", picture) == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_written(page, started, tmp_path):
    lines, texts = [], []
    for block in blocks(page):
        if block.mark == "file":
            lines.append(f"cat > {block.value} <<'END OF FILE'\n{block.text}END OF FILE\n")
        elif block.language == "bash" and not block.mark:
            lines.append(f"echo '== {block.where}' >&2\n{block.text}")
            texts.append(block.text)
    assert texts, "a page of which nothing is run is no guide"
    for name in ("examples", "deploy"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ROLLOUT_URL": started.url}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = "set -euo pipefail\n" + "\n".join(lines)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
