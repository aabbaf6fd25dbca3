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
from tests.helpers.gateways import started_gateway
from tests.helpers.stack import free_port

WORKERS = {
    "parked": ("--threads", "64"),
    "gthread": ("--worker-class", "gthread", "--threads", "1200"),
    "gevent": ("--worker-class", "gevent"),
}
WOKEN = 50
"""Rollouts that end one after the other."""


def main(options: harness.Options) -> harness.Report:
    rounds: dict[str, list[dict[str, float]]] = {worker: [] for worker in WORKERS}
    with harness.service() as stack:
        for _, worker in harness.in_turns(WORKERS, options.rounds):
            # One connection to Redis for each request that is worked on.
            env = {} if worker == "parked" else {"ROLLOUT_GATEWAY_THREADS": "1200"}
            with started_gateway(stack, worker, free_port(), env, options=WORKERS[worker]) as gateway:
                figures = wait_at_gateway(stack, gateway, gateway.url, float(options.count), WOKEN)
            rounds[worker].append(figures)
    return {"results": {worker: harness.summaries(figures) for worker, figures in rounds.items()}}


if __name__ == "__main__":
    harness.run(main, count=10, rounds=3)
