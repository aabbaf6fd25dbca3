"""Each command of README and of the guides is run as it stands there, in order, but for marked ones."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs import screenshots
from services.launch.local import Options, Stack
from services.launch.paths import home
from tests.helpers.llm_servers import free_port
from tests.helpers.pages import GUIDES, blocks
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import ROOT

TIMEOUT_S = 800
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)
SETUP = ROOT / "deploy" / "setup"
[_setup] = re.findall(r"(?m)^EXTRAS=(.+)$", (SETUP / "python.sh").read_text())
_more = re.findall(r"(?m)^ +(\w+)\) echo (\S+) ;;", (SETUP / "extras.sh").read_text())
# The extras that each target of make installs, as its script says.
EXTRAS = {"setup": _setup} | {f"setup-{name}": extras for name, extras in _more}
# A line that each of these pages shows on standard output: commands may end with 0 and have done nothing.
PRINTS = {
    "README": [r"^(0|1)\.0 \[\d+, "],
    "your-own-loop": [r"\d"],
    "swe-qwen3-8b-verl": [r"reward +1\.0"],
}
# Has a process find nothing of these modules, as if they were not installed.
HIDE = """
import os
from importlib.machinery import PathFinder

hidden, find = os.environ.get("HIDDEN", "").split(), PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda _, name, *where: None if name in hidden else find(name, *where))
"""


def installed_by(targets: list[str]) -> set[str]:
    """The distributions that these targets of make install, and all that those need."""
    return needed_by(f"rollout-service[{','.join(EXTRAS[target] for target in targets)}]")


def needed_by(*requirements: str) -> set[str]:
    """These distributions, where they are here, and all that they need."""
    found, wanted = set(), [*map(Requirement, requirements)]
    for requirement in wanted:
        try:
            needs = [Requirement(line) for line in metadata.requires(requirement.name) or ()]
        except metadata.PackageNotFoundError:
            continue
        found.add(canonicalize_name(requirement.name))
        chosen = [{"extra": extra} for extra in ("", *requirement.extras)]
        met = [need for need in needs if not need.marker or any(map(need.marker.evaluate, chosen))]
        wanted += [need for need in met if need not in wanted]
    return found


def not_installed_by(targets: list[str]) -> str:
    """The modules that only others install, but for plug-ins: pytest imports each that is listed."""
    plugins = needed_by(*(point.dist.name for point in metadata.entry_points(group="pytest11")))
    hidden = installed_by(list(EXTRAS)) - installed_by(targets) - plugins
    modules = metadata.packages_distributions().items()
    return " ".join(module for module, names in modules if {*map(canonicalize_name, names)} <= hidden)


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
        lines = []
        stack = Stack(checkout / ".local" / "run", lambda line: lines.append(click.unstyle(line)))
        try:
            yield SimpleNamespace(record=stack.up(Options(stack.dir, port=free_port())), lines=lines)
        finally:
            stack.down()


@pytest.fixture(scope="module")
def newcomer(checkout):
    """The environment of one who has set nothing: how to import the copy is what `make setup` installs.

    What `make setup` does not install is not found until the page has told to install it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Sandboxes of `--local` are not in the directory of the account, which other tests may use.
    # Paths of sockets are short, so it is not in pytest's own directory.
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes:
        (checkout / "sitecustomize.py").write_text(HIDE)
        hidden = not_installed_by(["setup"])
        assert {"datasets", "pyarrow", "swebench", "trl"} <= {*hidden.split()}
        yield environment | {
            "PATH": path,
            "PYTHONPATH": str(checkout),
            "ROLLOUT_SANDBOX_DIR": sandboxes,
            "HIDDEN": hidden,
        }
        stop_host(Path(sandboxes))


def test_a_picture_shows_what_a_command_prints_and_asks_no_other_site(started, tmp_path, monkeypatch):
    monkeypatch.setattr(screenshots, "IMAGES", tmp_path)
    screenshots.terminal("status", ["status", "--url", started.record.url], os.environ)
    picture = (tmp_path / "status.svg").read_text()
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    shown = html.unescape("".join(texts)).replace("\xa0", " ")
    assert "rollout status" in shown and str(started.record.flower_url) in shown
    assert re.findall(r"""(?:url\(|href=|src=)["']?(https?:[^)"']+)""", picture) == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_written(page, checkout, started, newcomer):
    lines, texts, targets = [], [], ["setup"]
    for block in blocks(page):
        if block.mark == "file":
            lines.append(f"cat > {block.value} <<'END OF FILE'\n{block.text}END OF FILE\n")
        elif block.language == "bash" and not block.mark:
            lines.append(f"echo '== {block.where}' >&2\n{block.text}")
            texts.append(block.text)
        elif told := [word for word in block.text.split() if word in EXTRAS]:
            targets += told
            lines.append(f"export HIDDEN='{not_installed_by(targets)}'")
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
    for pattern in PRINTS.get(page.stem, ()):
        assert re.search(pattern, done.stdout, re.MULTILINE), (pattern, done.stdout[-4000:])


def test_readme_shows_what_up_prints(started):
    """Its steps, but for times, ports and what machines differ in; they may come in another order."""
    block = next(block for block in blocks(ROOT / "README.md") if block.text.startswith("redis "))
    shown, printed = (
        {_shape(line) for line in lines if re.match(r"\w+ +\d+\.\d s  ", line)}
        for lines in (block.text.splitlines(), started.lines)
    )
    assert shown == printed and len(shown) == 8


def _shape(line: str) -> str:
    """The first word of a step and what it says up to its first comma, without numbers and paths."""
    return " ".join(re.sub(r"\S*/\S*|\d[\d.]*", "N", line.split(",")[0]).split())
