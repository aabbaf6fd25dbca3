"""Whether the newest releases of trainers still take what the adapters make: `make trainers-test`."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from tests.helpers.long_forms import TRAINERS
from tests.helpers.stack import ROOT

SCRIPT = ROOT / "deploy" / "setup" / "trainer_sources.sh"
TESTS = ["tests/integration/test_trainer_records.py", "tests/integration/test_verl_servers.py"]


@TRAINERS.only
@pytest.mark.timeout(900)
def test_the_newest_releases_take_our_records(tmp_path):
    sources = tmp_path / "newest"
    laid = _run(SCRIPT, sources, "newest", "https://raw.githubusercontent.com")
    if laid.returncode:
        warnings.warn(
            f"the index is out of reach, nothing is known of newer releases:\n{laid.stderr}", stacklevel=1
        )
        pytest.skip("the index is out of reach")
    for line in laid.stdout.splitlines():
        if "notice: " in line:
            print(line)
    checked = dict(pin.split("==") for pin in _run(SCRIPT, "pinned").stdout.split()) | {"trl": version("trl")}
    laid_down = distributions(path=[str(sources)])
    newest = {package.name.lower().replace("_", "-"): package.version for package in laid_down}
    assert checked.keys() <= newest.keys()
    said = [f"{name}: checked {checked[name]}, newest {newest[name]}" for name in checked]
    print("\n".join(said))
    # What was laid is then what the other tests ran with, but for files of repositories within reach.
    fetched = any(sources.glob("prime_rl/**/*.py")) or any(sources.glob("slime/**/*.py"))
    if all(newest[name] == checked[name] for name in checked) and not fetched:
        return
    env = {**os.environ, "ROLLOUT_TRAINER_SOURCES": str(sources), "CI": "1"}
    tests = _run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, env=env)
    assert tests.returncode == 0, "\n".join(["a newer release no longer fits:", *said, tests.stdout[-6000:]])


def _run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False, **options
    )
