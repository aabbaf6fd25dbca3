"""Each command of README and of the guides is run as it stands there, in order, but for marked ones."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy import screenshots
from services.launch.local import Options, Stack
from services.launch.paths import home
from tests.helpers.llm_servers import free_port
from tests.helpers.pages import GUIDES, blocks
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import ROOT

TIMEOUT_S = 400
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A newcomer's after `make setup`: what a page makes there comes to nobody else."""
    directory, real = tmp_path_factory.mktemp("checkout"), home()
    for name in ("deploy", "examples", "rollout", "sandbox", "services", "workers"):
        shutil.copytree(ROOT / name, directory / name)
    (directory / ".local" / "images").mkdir(parents=True)
    for source in (*real.iterdir(), *(real / "images").iterdir()):
        if source.name not in ("images", "run", "log"):
            (directory / ".local" / source.relative_to(real)).symlink_to(source)
    return directory


@pytest.fixture(scope="module")
def started(checkout):
    """What `make up` starts there, on a free port; clients find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_HOME", str(checkout / ".local"))
        stack = Stack(checkout / ".local" / "run", print)
        try:
            yield stack.up(Options(stack.dir, port=free_port()))
        finally:
            stack.down()


@pytest.fixture(scope="module")
def newcomer(checkout):
    """The environment of one who has set nothing: how to import the copy is what `make setup` installs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Sandboxes of `--local` are not in the directory of the account, which other tests may use.
    # Paths of sockets are short, so it is not in pytest's own directory.
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes:
        yield environment | {"PATH": path, "PYTHONPATH": str(checkout), "ROLLOUT_SANDBOX_DIR": sandboxes}
        stop_host(Path(sandboxes))


def test_a_picture_shows_what_a_command_prints_and_asks_no_other_site(started, tmp_path, monkeypatch):
    monkeypatch.setattr(screenshots, "IMAGES", tmp_path)
    screenshots.terminal("status", ["status", "--url", started.url], os.environ)
    picture = (tmp_path / "status.svg").read_text()
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    shown = html.unescape("".join(texts)).replace("\xa0", " ")
    assert "rollout status" in shown and str(started.flower_url) in shown
    assert re.findall(r"""(?:url\(|href=|src=)["']?(https?:[^)"']+)""", picture) == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_written(page, checkout, started, newcomer):
    lines, texts = [], []
    for block in blocks(page):
        if block.mark == "file":
            lines.append(f"cat > {block.value} <<'END OF FILE'\n{block.text}END OF FILE\n")
        elif block.language == "bash" and not block.mark:
            lines.append(f"echo '== {block.where}' >&2\n{block.text}")
            texts.append(block.text)
    assert texts, "a page of which nothing is run is no guide"
    script = "set -euo pipefail\n" + "\n".join(lines)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=checkout,
        env=newcomer,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
