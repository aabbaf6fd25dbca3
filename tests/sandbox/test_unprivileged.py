"""Everything works, and is as safe, for a plain user: the tests that matter most, run again as one."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.conftest import why_not

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
"""A user that every system has. It owns nothing that the tests could need by mistake."""
TESTS = [
    "sandbox/test_host.py",
    "sandbox/test_isolation.py",
    "sandbox/test_attacks.py",
    "sandbox/test_snapshots.py",
    "attacks/test_network.py",
]
NOT_AGAIN = (
    "not (bubblewrap and test_attacks) and not (test_snapshots and not next_one) and "
    "not control and not (test_host and ("
    "cancelling or caller or owner or stop_after or release_after or impossible or lifetime or who_asked or "
    "begun_nothing or absent_image or image_cache or unsafe or (bubblewrap and not serves)))"
)
"""What a plain user has no part in: each of these starts a host of its own, and what such a host does for one
runtime it does for the others.
"""
TIMEOUT_S = 480


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of the user's own, with all that this run writes."""
    path = Path(tempfile.mkdtemp(prefix="sbxn-", dir="/tmp"))
    os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def python_for(environment: dict[str, str]) -> str | None:
    """An interpreter that the user may run; ours may lie in somebody's home. The packages are ours anyway."""
    for python in (sys.executable, shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")):
        if python is not None:
            try:
                done = subprocess.run(
                    [python, "-c", "import pytest"], env=environment, **AS_NOBODY, check=False
                )
            except PermissionError:
                continue
            if done.returncode == 0:
                return python
    return None


AS_NOBODY: dict = {
    "user": NOBODY,
    "group": NOBODY,
    "extra_groups": [],
    "cwd": str(ROOT),
    "capture_output": True,
}


@pytest.mark.apptainer
@pytest.mark.may_skip
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a plain user already")
def test_a_plain_users_sandboxes_are_as_good(home):
    for runtime in ("apptainer", "bubblewrap"):
        if reason := why_not(runtime):
            pytest.skip(reason)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "ROLLOUT_HOME": os.environ.get("ROLLOUT_HOME", str(ROOT / ".local")),
        "ROLLOUT_IMAGE_CACHE": str(home / "cache"),
        "CI": "true",  # a skipped test is a failed one
    }
    python = python_for(environment)
    if python is None:
        pytest.skip("no Python here that another user could run")
    files = [str(Path("tests") / name) for name in TESTS]
    # Plug-ins are not looked for, so those that are wanted are named.
    argv = [python, "-m", "pytest", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*argv, f"--basetemp={home}/tmp", "-k", NOT_AGAIN, *files],
        env=environment,
        text=True,
        timeout=TIMEOUT_S,
        **AS_NOBODY,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 60
