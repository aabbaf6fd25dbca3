"""The short form of the soak; `make chaos` runs it whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import ROOT

ROLLOUTS = CHAOS("rollouts of the soak", short=120, long=5000)
REAL = CHAOS("rollouts of the soak with sandboxes and a model", short=21, long=500)
"""With leases of 30 s."""
REAL_SEED = "44"
"""The freeze, which outlasts the short form's submissions, comes late; the one worker killed is INIT's."""
DURABLE = CHAOS("rollouts of which every part dies", short=30, long=300)


@pytest.mark.parametrize(
    "form",
    [
        ("--rollouts", str(ROLLOUTS), "--every", "1"),
        ("--rollouts", str(REAL), "--real", "--every", "2", "--seed", REAL_SEED),
    ],
)
def test_random_kills_lose_nothing_and_end_nothing_twice(form):
    argv = [sys.executable, "-m", "tests.chaos.soak", *form]
    out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert out.stdout, out.stderr[-3000:]
    counts = json.loads(out.stdout.splitlines()[-1])
    assert counts["results"] == {
        "submitted": int(form[1]),
        "ended": int(form[1]),
        "ended_twice": 0,
        "lost": 0,
        "leftovers": 0,
    }, out.stdout
    assert counts["wrong"] == 0 and sum(counts["faults"].values()) >= 6
    assert out.returncode == 0, out.stderr[-2000:]


def test_whatever_dies_each_rollout_ends_once_in_its_first_attempt_as_its_sandbox_says():
    argv = [sys.executable, "-m", "tests.chaos.durable", "--rollouts", str(DURABLE)]
    out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert out.stdout, out.stderr[-3000:]
    counts = json.loads(out.stdout.splitlines()[-1])
    assert counts["holds"] and counts["ended"] == DURABLE, out.stdout
    assert sum(counts["faults"].values()) >= 2 and out.returncode == 0, out.stderr[-2000:]
