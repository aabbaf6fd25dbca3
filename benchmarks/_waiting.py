"""What 1,000 waiting clients cost under three workers of gunicorn: why the gateway parks them.

    pip install gevent && python -m benchmarks._waiting

The same views and the same waiting room, which wakes only those whom an entry is about, run under the
gateway's own worker (`services.gateway.parking`), gunicorn's thread worker with a thread for each client, and
its gevent worker. Each holds 800 long-polls of a rollout, 100 of results and 100 streams, and answers another
client meanwhile; then single rollouts end one after the other, and the rest at once. Rounds are interleaved.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from benchmarks.control_plane import CURSORS, POLLS, STREAMS, Others, waiters
from benchmarks.harness import (
    PATIENCE_S,
    cpu_seconds,
    make_parser,
    memory_mb,
    percentile,
    report,
    say,
    service,
    summary,
)
from rollout.client import Client
from rollout.schema import RolloutRequest
from services.state.fleet import FleetStore
from tests.helpers.gateways import started_gateway
from tests.helpers.stack import Stack, free_port, wait_until
from tests.helpers.waiters import Waiters
from workers.handlers.noop import Noop

WORKERS = {
    "parked": ("--threads", "64"),
    "gthread": ("--worker-class", "gthread", "--threads", "1200"),
    "gevent": ("--worker-class", "gevent"),
}
WOKEN = 50
"""Rollouts that end one after the other."""
PAUSE_S = 0.02


def wait_under(stack: Stack, worker: str, seconds: float) -> dict[str, Any]:
    """Hold waiting clients under a worker, ask other things for so long, and end what is waited for."""
    # One connection to Redis for each request that is worked on.
    env = {} if worker == "parked" else {"ROLLOUT_GATEWAY_THREADS": "1200"}
    with started_gateway(stack, worker, free_port(), env, options=WORKERS[worker]) as process:
        port, client = urlsplit(process.url).port, Client(process.url)
        gateway = SimpleNamespace(url=process.url)
        others = Others(port)
        others.requests(0.5)  # what the first requests import is not counted
        alone = others.requests(seconds / 2)
        before_mb = memory_mb([process.pid], "pss")
        made = client.submit([RolloutRequest(handler="noop", n=POLLS, tags=[worker])])
        paths = [f"/v1/rollouts/{new.id}?wait=60&include=summary" for new in made]
        paths += ["/v1/results?cursor=$&wait=60&tag=nobody-s"] * CURSORS
        paths += ["/v1/results/stream?cursor=$&tag=nobody-s"] * STREAMS
        with Waiters("127.0.0.1", port, paths) as clients:
            wait_until(lambda: waiters(gateway) == len(paths), PATIENCE_S, "all clients to wait", process)
            cpu_s = cpu_seconds([process.pid])
            beside = others.requests(seconds)
            cpu_s = cpu_seconds([process.pid]) - cpu_s
            pss_mb = memory_mb([process.pid], "pss")
            woken_ms = []
            for number in range(WOKEN):
                began = time.monotonic()
                stack.client.cancel(made[number].id)
                clients.read_answers(PATIENCE_S, [number])
                woken_ms.append(((clients.answered_at[number] or time.monotonic()) - began) * 1e3)
                time.sleep(PAUSE_S)
            began = time.monotonic()
            stack.client.cancel_many(tag=worker)
            clients.read_answers(PATIENCE_S, range(POLLS))
            all_s = time.monotonic() - began
    p99_ms = {
        name: percentile([value for each in times.values() for value in each], 0.99) * 1e3
        for name, times in {"alone": alone, "beside": beside}.items()
    }
    figures = {
        "pss_mb": pss_mb,
        "pss_mb_before": before_mb,
        "others_p99_ms": p99_ms["beside"],
        "others_p99_ms_alone": p99_ms["alone"],
        "cpu_percent": 100 * cpu_s / seconds,
        "woken_ms_median": percentile(woken_ms, 0.5),
        "woken_ms_p99": percentile(woken_ms, 0.99),
        "all_woken_s": all_s,
    }
    say(f"{worker}: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    return figures


def main() -> None:
    options = make_parser(__doc__, count=10, rounds=3).parse_args()
    rounds: dict[str, list[dict[str, float]]] = {worker: [] for worker in WORKERS}
    with service() as stack:
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        for _ in range(options.rounds):
            for worker, figures in rounds.items():
                figures.append(wait_under(stack, worker, float(options.count)))
    report(
        "_waiting",
        {
            worker: {name: summary([each[name] for each in figures])["median"] for name in figures[0]}
            for worker, figures in rounds.items()
        },
        rounds=rounds,
        options=vars(options),
    )


if __name__ == "__main__":
    main()
