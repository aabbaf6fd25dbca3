"""Benchmarks run and keep their promise of form. Their figures are not tested: the machine is noisy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.stack import ROOT

KEYS = {
    "pipeline": {"throughput_ratio_to_bare_chain", "submit_per_s", "cpu_ms_per_rollout"},
    "shell_latency": {
        "p50_ms",
        "p95_ms",
        "speedup_vs_tmux",
        "speedup_vs_swe_rex",
        "ratio_to_floor",
        "workload_mean_s",
        "workload_mean_tmux_s",
    },
    "ipython_latency": {"p50_ms", "speedup_vs_gateway"},
    "sandbox_start": {
        "warm_p50_ms",
        "cold_p50_ms",
        "starts_per_s",
        "end_p50_ms",
        "held_100_mb",
        "leftovers",
    },
}
MAY_BE_ZERO = {"leftovers"}


def test_every_benchmark_is_known_here():
    assert {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")} == set(KEYS)


@pytest.mark.parametrize("name", KEYS)
def test_the_last_line_is_one_json_object_with_the_keys_of_its_issue(name):
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--rounds", "1", "--count", "50"]
    out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert out.returncode == 0, out.stderr[-3000:]
    results = json.loads(out.stdout.splitlines()[-1])["results"]
    assert set(results) == KEYS[name]
    assert all(value > 0 for name, value in results.items() if name not in MAY_BE_ZERO)
    assert all(results[name] == 0 for name in MAY_BE_ZERO & set(results))
