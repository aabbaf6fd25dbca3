"""What 1,000 waiting clients cost a gateway process, and how it answers others meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from benchmarks._latency import percentile, say
from rollout.schema import RolloutRequest
from services.state.fleet import FleetStore
from tests.helpers.keys import HEADERS, http
from tests.helpers.stack import Stack, wait_until
from tests.helpers.waiters import Waiters
from workers.handlers.noop import Noop

POLLS, CURSORS, STREAMS = 800, 100, 100
"""Long-polls of single rollouts, of the completions, and streams: 1,000 together."""
PAUSE_S = 0.05
"""Between two rounds of four other requests."""
PATIENCE_S = 120.0
ENV = {"ROLLOUT_HANDLERS": "", "ROLLOUT_LOG_LEVEL": "WARNING"}


class Others:
    """A client with other wishes: submits a rollout, reads it, asks for the health, cancels."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.ms: dict[str, list[float]] = {"submit": [], "get": [], "health": [], "cancel": []}

    def round(self) -> None:
        made = self._ask("submit", "POST", "/v1/rollouts", {"handler": "noop"})
        rollout_id = made["rollouts"][0]["id"]
        self._ask("get", "GET", f"/v1/rollouts/{rollout_id}")
        self._ask("health", "GET", "/health")
        # It ends at once: a completion, which none of those who wait is waiting for.
        self._ask("cancel", "POST", f"/v1/rollouts/{rollout_id}/cancel")

    def _ask(self, name: str, method: str, path: str, body: Any = None) -> Any:
        headers = HEADERS | ({"Content-Type": "application/json"} if body else {})
        began = time.perf_counter()
        self._connection.request(method, path, json.dumps(body) if body else None, headers)
        response = self._connection.getresponse()
        answer = response.read()
        self.ms[name].append((time.perf_counter() - began) * 1e3)
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:200]!r}")
        return json.loads(answer)

    def close(self) -> None:
        self._connection.close()


def pss_mb(pid: int) -> float:
    """Proportional set size in 10⁶ bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


@contextmanager
def gateway(directory: Path) -> Iterator[Stack]:
    """A gateway that knows a handler, and no worker: what is submitted stays queued."""
    with Stack(directory, directory / "sbx", ENV) as stack:
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        yield stack


def measure(directory: Path, seconds: float) -> dict[str, Any]:
    """Let the clients wait and ask other things for so many seconds; then end what is waited for."""
    with gateway(directory) as stack:
        master = psutil.Process(stack.gateway.pid)
        (worker,) = master.children()
        others = Others(stack.port)
        others.round()
        before = pss_mb(worker.pid)
        made = stack.client.submit([RolloutRequest(handler="noop", n=POLLS, tags=["waited-for"])])
        paths = [f"/v1/rollouts/{new.id}?wait=60&include=summary" for new in made]
        paths += ["/v1/completions?cursor=$&wait=60&tag=nobody-s"] * CURSORS
        paths += ["/v1/completions/stream?cursor=$&tag=nobody-s"] * STREAMS
        began = time.monotonic()
        with Waiters("127.0.0.1", stack.port, paths) as waiters:
            wait_until(lambda: _waiting(stack) == len(paths), PATIENCE_S, "all clients to wait")
            connected_s = time.monotonic() - began
            for each in others.ms.values():
                each.clear()
            until, cpu = time.monotonic() + seconds, sum(worker.cpu_times()[:2])
            while time.monotonic() < until:
                others.round()
                waiters.read()
                time.sleep(PAUSE_S)
            cpu = sum(worker.cpu_times()[:2]) - cpu
            still = _waiting(stack)
            if still != len(paths):
                raise RuntimeError(f"{still} of {len(paths)} waited to the end: measure for less than 60 s")
            held = {"worker": pss_mb(worker.pid), "worker_before": before, "master": pss_mb(master.pid)}
            threads = worker.num_threads()
            began = time.monotonic()
            stack.client.cancel_many(tag="waited-for")
            if not waiters.read_answers(PATIENCE_S, range(POLLS)):
                raise TimeoutError("not all long-polls were answered")
            woken_s = time.monotonic() - began
        wait_until(lambda: _waiting(stack) == 0, PATIENCE_S, "those who left to be forgotten")
        others.close()
    every = [value for each in others.ms.values() for value in each]
    say(f"waiting: {held['worker']:.0f} MB, others p99 {percentile(every, 0.99):.1f} ms")
    return {
        "pss_mb": {name: round(value, 1) for name, value in held.items()},
        "threads": threads,
        "cpu_share": round(cpu / seconds, 3),
        "connect_s": round(connected_s, 2),
        "woken_800_s": round(woken_s, 2),
        "others_ms": every,
        "others_p99_ms": {name: round(percentile(values, 0.99), 2) for name, values in others.ms.items()},
    }


def _waiting(stack: Stack) -> int:
    for line in http.get(f"{stack.url}/metrics", timeout=PATIENCE_S).text.splitlines():
        if line.startswith("rollout_gateway_waiters "):
            return int(float(line.split()[1]))
    raise RuntimeError("/metrics has no rollout_gateway_waiters")
