"""The short form of the million, killed as a whole in the middle; `make million` runs all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress

import psutil

from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import ROOT, wait_until

ROLLOUTS = CHAOS("rollouts of the million", short=1200, long=8000)
PATIENCE_S = 400.0
"""Each of the two runs of the short form takes some 15 s on an idle machine."""
OFTEN = ["--worker-every", "350", "--gateway-every", "350", "--redis-every", "350", "--freeze-every", "0"]
"""At least one of each after the middle."""


def test_a_run_that_was_killed_goes_on_and_has_lost_and_doubled_nothing(tmp_path):
    argv = [sys.executable, "-m", "tests.soak.million", "--rollouts", str(ROLLOUTS)]
    argv += ["--directory", str(tmp_path)]
    argv += ["--quick", "--retention", "3", "--rests", "1", "--live", "200", *OFTEN]
    first = subprocess.Popen(argv, cwd=ROOT)
    try:
        wait_until(
            lambda: _of(tmp_path, "ledger").get("answered", 0) >= ROLLOUTS // 2, PATIENCE_S, "half of them"
        )
        service = psutil.Process(first.pid).children(recursive=True)
        for process in service:  # before the trainer's end asks them to end in order
            with suppress(psutil.NoSuchProcess):
                process.kill()
    finally:
        first.kill()
        first.wait()
    assert psutil.wait_procs(service, PATIENCE_S)[1] == []
    assert _of(tmp_path, "ledger")["answered"] < ROLLOUTS and not (tmp_path / "report.json").exists()

    out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert out.returncode == 0, out.stdout + out.stderr[-3000:]
    result = json.loads(out.stdout.splitlines()[-1])
    names = ("submitted", "ended", "ended_twice", "lost", "wrong", "pieces")
    assert {name: result[name] for name in names} == {
        **{"submitted": ROLLOUTS, "ended": ROLLOUTS, "ended_twice": 0, "lost": 0, "wrong": 0},
        "pieces": 2,
    }
    assert result["finished"] and all(result["faults"][part] for part in ("worker", "gateway", "redis"))
    left = [
        kind
        for kind in _of(tmp_path, "report")["rests"][-1]["keys"]
        if kind.startswith(("rollout:", "request:", "group:"))
    ]
    assert left == [], "what is past its retention is gone"
    assert "<polyline" in (tmp_path / "million.svg").read_text()


def _of(directory, name):
    file = directory / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}
