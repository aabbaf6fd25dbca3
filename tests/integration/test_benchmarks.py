"""Benchmarks run and keep their promise of form. Their figures are not tested: the machine is noisy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.long_forms import BENCHMARKS
from tests.helpers.stack import ROOT

KEYS = {
    "pipeline": {
        "throughput_ratio_to_equal_chain",
        "rollouts_per_s",
        "equal_chain_per_s",
        "cpu_ratio_to_equal_chain",
        "cpu_ms_per_rollout",
        "equal_chain_cpu_ms",
        "submit_per_s",
        "equal_chain_submit_per_s",
    },
    "resume": {
        *("turn_cost_ratio", "turn_ms", "turn_ms_without_log", "redis_bytes_per_token"),
        *("takeover_s_over_lease", "wasted_tokens_share", "wasted_tokens_share_0_2_0"),
    },
    "capture": {
        *("call_ratio_to_own_loop", "p99_ratio_to_own_loop", "streams_held", "held_mb", "calls_per_s"),
        *("attach_ratio_200_to_20_turns", "drift"),
    },
    "page": {
        *("first_paint_ms_overview", "open_128k_tokens_ms", "live_lag_ms_p95", "viewers_100_cpu_cores"),
        "page_kb_gzip",
    },
    "durability": {
        "always_throughput_ratio",
        "always_submit_ratio",
        "always_submit_ms",
        "everysec_submit_ms",
        "fdatasync_ms",
    },
    "control_plane": {
        "recovery_worst_s_over_lease_with_spare",
        "recovery_worst_s_over_lease_without_spare",
        "cpu_ratio_to_equal_chain",
        "cpu_ms_over_equal_chain",
        "gateway_pss_mb_with_1000_waiters",
        "other_request_p99_ratio_to_no_waiters",
        "other_request_p99_ms",
    },
    "shell_latency": {
        *(
            f"{key}{pause}"
            for pause in ("", "_after_50ms", "_after_1s")
            for key in (
                *("p50_ms", "floor_p50_ms", "ratio_to_floor"),
                *("mean_speedup_vs_tmux_polled", "speedup_vs_swe_rex"),
            )
        ),
        *("speedup_vs_tmux_wait_for", "speedup_vs_pexpect", "speedup_vs_apptainer_exec", "p95_ms"),
        "ratio_to_floor_after_pause",
        *("workload_mean_sleep_s", "workload_mean_s", "workload_mean_tmux_polled_s"),
    },
    "ipython_latency": {"ratio_to_bare_client", "speedup_vs_gateway_acking_at_once", "p50_ms"},
    "sandbox_start": {
        *(f"{start}_ratio_to_exec{end}" for start in ("cold", "cloned", "warm") for end in ("", "_output")),
        *("starts_ratio_to_exec", "starts_per_s", "execs_per_s", "held_100_mb", "leftovers"),
        *(f"{name}_p50_ms" for name in ("cold", "cloned", "warm", "exec", "exec_output", "end")),
    },
    "fairness": {"share_error_max", "small_wait_p99_ratio", "placements_ratio"},
    "routing": {
        "makespan_ratio_to_admitted_round_robin",
        "makespan_ratio_to_admitted_inflight_heap",
        "makespan_ratio_to_admitted_hashing",
        "makespan_ratio_to_admitted_cumulative",
        "makespan_ratio_to_bound",
        "hit_rate_ratio_to_best_peer",
        "acquire_release_per_s_one_a_round_trip",
        "acquire_p50_ms_one_a_round_trip",
        "acquire_release_per_s_four_a_round_trip",
        "acquire_p50_ms_four_a_round_trip",
        "acquire_p50_ratio_to_ping",
    },
    "dynamic_sampling": {
        "speedup_vs_synchronous_one_update_old",
        "speedup_vs_restart_one_update_old",
        "slots_busy_share_filling_up_included",
    },
    "swe_eval": {
        "resolved_agreement",
        "eval_ratio_to_tests_by_hand",
        "eval_overhead_s",
        "patch_20k_files_s",
    },
    "fork": {
        *("fork_ratio_to_start", "snapshot_ratio_to_tar", "move_ratio_to_tar", "tree_tokens_ratio"),
        *("fork_p50_ms", "cold_p50_ms", "snapshot_p50_ms", "move_p50_ms", "still_ms"),
    },
    "gateways": {
        key
        for name in ("paged", "single")
        for key in (
            *(f"{name}_per_s_1_gateway", f"{name}_per_s_N_gateways", f"{name}_ratio"),
            *(f"gateway_cpu_ms_{name}", f"redis_cpu_ms_{name}"),
        )
    },
    "harbor": {"overhead_s", "build_cached_ms", "build_first_s", "check_tasks_per_min"},
    "transfer": {
        "mb_per_s",
        "ratio_to_json",
        *(
            "served_mb_per_s_1_gateway",
            "served_mb_per_s_N_gateways",
            "gateways_ratio",
            "gateway_cpu_s_per_gb",
        ),
        "bytes_ratio_to_reference_json",
        "bytes_ratio_to_json_without_input_ids",
    },
    "scaling": {
        "weak_efficiency_8",
        "strong_efficiency_8",
        "overlap_ratio_to_bound",
        "dispatch_p99_s_with_wave",
        "dispatch_p99_s_after_wave",
        "wave_10000_init_ratio",
        "head_cpu_cores",
        "head_rss_mb",
    },
    "token_drift": {
        "ours_changed_share",
        *(f"{way}_through_text_changed_share" for way in ("turns", "messages", "whole")),
    },
}
FORM = BENCHMARKS(
    "rounds, counts and workers of each benchmark", short=("--rounds", "1", "--count", "5"), long=()
)
MORE = {
    "routing": BENCHMARKS("two vLLM servers of `routing`", short=("--simulated-only",), long=()),
    # Processor time comes in hundredths of a second.
    **dict.fromkeys(
        ("pipeline", "control_plane"), BENCHMARKS("rollouts of the races", short=("--count", "16"), long=())
    ),
    "dynamic_sampling": BENCHMARKS(
        "groups, sleeps and slots of `dynamic_sampling`",
        short=("--count", "8", "--n", "4", "--mean-s", "0.1", "--slots", "8"),
        long=(),
    ),
    "token_drift": BENCHMARKS("episodes of `token_drift`", short=("--count", "8"), long=()),
    "gateways": BENCHMARKS(
        "gateways, workers and rollouts of `gateways`",
        short=("--gateways", "2", "--workers", "1", "--live", "40", "--tokens", "256"),
        long=(),
    ),
    "fairness": BENCHMARKS("simulated seconds of `fairness`", short=("--count", "5"), long=()),
}
if BENCHMARKS:
    KEYS["routing"] |= {"hit_rate_gap"}
    KEYS["routing"] |= {f"turn_p95_ratio_to_{peer}" for peer in ("round_robin", "pinned_round_robin")}
ZERO = {"leftovers", "ours_changed_share", "drift"}
MAY_BE_ZERO = ZERO | {
    "hit_rate_gap",
    "recovery_worst_s_over_lease_with_spare",
    "recovery_worst_s_over_lease_without_spare",
    "cpu_ms_over_equal_chain",
    "eval_overhead_s",
    "overhead_s",
    "viewers_100_cpu_cores",
    "gateway_cpu_s_per_gb",  # of what the kernel counts in hundredths of a second
    *("takeover_s_over_lease", "wasted_tokens_share", "wasted_tokens_share_0_2_0"),
}
"""Or less, but for ZERO: differences."""
TIMEOUT_S = 500
"""The longest takes a minute and a half on an idle machine."""


def test_every_benchmark_is_known_here():
    assert {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")} == {*KEYS, "harness"}


@pytest.mark.timeout(TIMEOUT_S + 100)
@pytest.mark.parametrize("name", KEYS)
def test_the_last_line_is_one_json_object_with_the_keys_of_its_issue(name):
    argv = [sys.executable, "-m", f"benchmarks.{name}", *FORM, *MORE.get(name, ())]
    out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert out.returncode == 0, out.stderr[-3000:]
    results = json.loads(out.stdout.splitlines()[-1])["results"]
    assert set(results) == KEYS[name]
    # A figure by temperature is a dict; at least one of it must be there.
    # What the short form does not measure is null.
    flat = {
        name: max(v.values()) if isinstance(v, dict) else v for name, v in results.items() if v is not None
    }
    assert all(value > 0 for name, value in flat.items() if name not in MAY_BE_ZERO)
    assert all(results[name] == 0 for name in ZERO & set(results))
