"""What 1,000 waiting clients cost under three workers of gunicorn: why the gateway parks them.

    pip install gevent && python -m benchmarks._waiting

The same views and the same waiting room, which wakes only those whom an entry is about, run under the
gateway's own worker (`services.gateway.parking`), gunicorn's thread worker with a thread for each client, and
its gevent worker. Each holds 800 long-polls of a rollout, 100 of results and 100 streams, and answers another
client meanwhile; then single rollouts end one after the other, and the rest at once. Rounds are interleaved.
"""

from __future__ import annotations

from benchmarks import harness
from benchmarks.control_plane import wait_at_gateway
from benchmarks.harness import Stack
from tests.helpers.gateways import started_gateway
from tests.helpers.stack import free_port

WORKERS = {
    "parked": ("--threads", "64"),
    "gthread": ("--worker-class", "gthread", "--threads", "1200"),
    "gevent": ("--worker-class", "gevent"),
}
WOKEN = 50
"""Rollouts that end one after the other."""


def wait_under(stack: Stack, worker: str, seconds: float) -> dict[str, float]:
    """Hold waiting clients under a worker, and ask other things for so long."""
    # One connection to Redis for each request that is worked on.
    env = {} if worker == "parked" else {"ROLLOUT_GATEWAY_THREADS": "1200"}
    with started_gateway(stack, worker, free_port(), env, options=WORKERS[worker]) as process:
        waiting = wait_at_gateway(stack, process, process.url, seconds, WOKEN)
    return {
        "pss_mb": waiting["pss_mb"],
        "pss_mb_before": waiting["pss_mb_before"],
        "others_p99_ms": waiting["p99_ms"]["beside"],
        "others_p99_ms_alone": waiting["p99_ms"]["alone"],
        "cpu_percent": 100 * waiting["cpu_share"],
        "woken_ms_median": harness.percentile(waiting["woken_singly_ms"], 0.5),
        "woken_ms_p99": harness.percentile(waiting["woken_singly_ms"], 0.99),
        "all_woken_s": waiting["woken_all_s"],
    }


def main(options: harness.Options) -> harness.Report:
    figures: dict[str, list[dict[str, float]]] = {worker: [] for worker in WORKERS}
    with harness.service() as stack:
        for _, worker in harness.in_turns(WORKERS, options.rounds):
            figures[worker].append(wait_under(stack, worker, float(options.count)))
    spreads = {worker: harness.summaries(rounds) for worker, rounds in figures.items()}
    medians = {
        worker: {name: spread["median"] for name, spread in by_name.items()}
        for worker, by_name in spreads.items()
    }
    return {"results": medians, "rounds": figures}


if __name__ == "__main__":
    harness.run(main, count=10, rounds=3)
