"""The short form of the soak; `make soak` runs it whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.long_forms import SOAK

ROOT = Path(__file__).resolve().parents[2]
SANDBOXES = SOAK("sandboxes", short=30, long=500)


@pytest.mark.apptainer
def test_nothing_is_left_or_wrong_when_workers_and_the_host_are_killed():
    argv = [sys.executable, "-m", "tests.soak.sandboxes", "--total", str(SANDBOXES)]
    argv += ["--at-once", "10", "--kills", "2"]
    environment = os.environ | {"ROLLOUT_SANDBOX_WARM": "4"}
    out = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    result = json.loads(out.stdout.splitlines()[-1])
    assert result["left"] == []
    assert result["wrong"] == []
    assert out.returncode == 0, out.stderr[-2000:]
    assert result["killed"]["host"] == 2
    assert result["adopted"] > 0
