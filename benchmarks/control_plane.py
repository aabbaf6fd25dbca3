"""What losing nothing costs: clients that wait, CPU time a rollout, recovery of a killed worker's rollouts.

Waiting: 800 long-polls of a rollout each, 100 of results, 100 streams, all open at one gateway (a process
and gunicorn's master), which answers another client's requests meanwhile and did so alone before.

CPU: that of gateway, workers, Redis and client for a no-op rollout, against a bare Celery chain that has all
of Celery that ours has (`benchmarks/pipeline.py`). Rounds are interleaved.

Recovery: a worker that holds 55 rollouts gets SIGKILL; seconds until each of them has another worker, less
the lease (5 s here). With a spare, another worker of the stage has slots free at the kill; without one, a new
process is started at the kill. A kill of each kind a round, for each stage in turn; the worst counts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import (
    PATIENCE_S,
    await_worker,
    cpu_seconds,
    discard,
    launch,
    make_parser,
    memory_mb,
    percentile,
    report,
    say,
    service,
    spread_ms,
    start_fleet,
    summary,
    timed,
)
from benchmarks.pipeline import SLOTS, race
from rollout.schema import RolloutRequest, State
from services.state.fleet import FleetStore
from tests.helpers.keys import HEADERS, http
from tests.helpers.stack import NODE, Process, Stack, wait_until
from tests.helpers.waiters import Waiters
from workers.handlers.noop import Noop

POLLS, CURSORS, STREAMS = 800, 100, 100
"""Long-polls of single rollouts, of the results, and streams: 1,000 together."""
PAUSE_S = 0.05
"""Between two rounds of other requests."""
LONG_S, SHORT_S = 20.0, 1.0
"""For which clients wait while others are answered, and half of it before."""
LEASE_S, SHORT_LEASE_S = 5.0, 3.0
HELD = 55
"""Rollouts that a worker holds when it is killed."""
STATES = {"run": State.RUNNING, "init": State.INITIALIZING, "eval": State.EVALUATING}
"""Of rollouts in a stage; kills begin with RUN, where rollouts spend most of their time."""


class Others:
    """A client with other wishes: submits a rollout, reads it, asks for the health, cancels."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def requests(self, seconds: float) -> dict[str, list[float]]:
        """Ask for so long; seconds that each request of a kind took."""
        times: dict[str, list[float]] = {"submit": [], "get": [], "health": [], "cancel": []}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            answer = self._ask(times["submit"], "POST", "/v1/rollouts", b'{"handler": "noop"}')
            path = f"/v1/rollouts/{answer['rollouts'][0]['id']}"
            self._ask(times["get"], "GET", path)
            self._ask(times["health"], "GET", "/health")
            # It ends at once: a result, which none of those who wait is waiting for.
            self._ask(times["cancel"], "POST", f"{path}/cancel")
            time.sleep(PAUSE_S)
        return times

    def _ask(self, times: list[float], method: str, path: str, body: bytes | None = None) -> Any:
        began = time.perf_counter()
        self._connection.request(method, path, body, HEADERS | {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        times.append(time.perf_counter() - began)
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:200]!r}")
        return json.loads(answer)


def waiters(url: str) -> int:
    """Clients that wait, as the gateway counts them."""
    lines = http.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("rollout_gateway_waiters "))


def wait_at_gateway(
    stack: Stack, gateway: Process, url: str, seconds: float, singly: int = 0
) -> dict[str, Any]:
    """Let clients wait at a gateway and ask other things for so many seconds; then end what is waited for.

    No worker may run: what is submitted stays queued.

    Args:
        singly: So many rollouts end one after the other, before the rest.
    """
    FleetStore(stack.redis.client).put_handlers([Noop().info()])
    port, tag = urlsplit(url).port, f"waited-for-{gateway.pid}"
    others = Others(port)
    others.requests(PAUSE_S)  # what the first requests import is not counted
    alone = others.requests(seconds / 2)
    before_mb = memory_mb([gateway.pid], "pss")
    made = stack.client.submit([RolloutRequest(handler="noop", n=POLLS, tags=[tag])])
    paths = [f"/v1/rollouts/{new.id}?wait=60&include=summary" for new in made]
    paths += ["/v1/results?cursor=$&wait=60&tag=nobody-s"] * CURSORS
    paths += ["/v1/results/stream?cursor=$&tag=nobody-s"] * STREAMS
    with Waiters("127.0.0.1", port, paths) as clients:
        wait_until(lambda: waiters(url) == len(paths), PATIENCE_S, "all clients to wait", gateway)
        cpu_s = cpu_seconds([gateway.pid])
        beside = others.requests(seconds)
        cpu_s = cpu_seconds([gateway.pid]) - cpu_s
        clients.read()
        if (still := waiters(url)) != len(paths):
            raise RuntimeError(f"{still} of {len(paths)} waited to the end: measure for less than 60 s")
        pss_mb = memory_mb([gateway.pid], "pss")
        singly_ms = []
        for number in range(singly):
            began = time.monotonic()
            stack.client.cancel(made[number].id)
            clients.read_answers(PATIENCE_S, [number])
            singly_ms.append(((clients.answered_at[number] or time.monotonic()) - began) * 1e3)
            time.sleep(PAUSE_S)
        began = time.monotonic()
        stack.client.cancel_many(tag=tag)
        if not clients.read_answers(PATIENCE_S, range(POLLS)):
            raise TimeoutError("not all long-polls were answered")
        woken_s = time.monotonic() - began
    wait_until(lambda: waiters(url) == 0, PATIENCE_S, "those who left to be forgotten")
    p99_ms = {
        name: percentile([value for each in times.values() for value in each], 0.99) * 1e3
        for name, times in {"alone": alone, "beside": beside}.items()
    }
    say(f"waiting: {pss_mb:.0f} MB, others p99 {p99_ms['beside']:.1f} ms, alone {p99_ms['alone']:.1f} ms")
    return {
        "pss_mb": round(pss_mb, 1),
        "pss_mb_before": round(before_mb, 1),
        "p99_ms": {name: round(value, 2) for name, value in p99_ms.items()},
        "others": {name: spread_ms(times) for name, times in beside.items()},
        "cpu_share": round(cpu_s / seconds, 3),
        "woken_singly_ms": singly_ms,
        "woken_all_s": round(woken_s, 2),
    }


class Kills:
    """Workers that are killed with all they hold."""

    def __init__(self, stack: Stack, fleet: dict[str, Process], lease_s: float) -> None:
        self._stack, self._fleet, self._lease_s = stack, fleet, lease_s
        self._started = 0
        self.start_s: list[float] = []
        """What starting a worker took, until it had announced itself, where a spare was started."""

    def seconds_over_lease(self, stage: str, spare: bool) -> float:
        """Kill the stage's worker; seconds until each of its rollouts has another one, less the lease.

        Rollouts in INIT or RUN begin afresh and have to come through INIT again. Below zero where heartbeats
        were a while ago: a lease counts from the last one.

        Args:
            spare: The other worker is there before the kill; else it is started at the kill.
        """
        client, victim = self._stack.client, self._fleet[stage]
        request = RolloutRequest(handler="noop", task={f"{stage}_s": 3600.0}, n=HELD, tags=["held"])
        ids = [new.id for new in client.submit([request])]
        wait_until(lambda: self._held(ids, stage, victim) == HELD, PATIENCE_S, f"{HELD} leases")
        if spare:
            self.start_s.append(timed(lambda: await_worker(self._stack, stage, self._start(stage))))
        os.killpg(victim.pid, signal.SIGKILL)
        began = time.monotonic()
        heir = self._fleet[stage] if spare else self._start(stage)
        wait_until(lambda: self._held(ids, stage, heir) == HELD, PATIENCE_S, f"{HELD} new leases", heir)
        over_s = time.monotonic() - began - self._lease_s
        discard(self._stack, victim)
        client.cancel_many(tag="held")
        wait_until(lambda: all(state is None for state in self._states(ids)), PATIENCE_S, "the end of all")
        say(f"recovery from a killed worker of {stage}, {spare=}: lease {over_s:+.2f} s")
        return over_s

    def _start(self, stage: str) -> Process:
        self._started += 1
        worker = launch(self._stack, stage, f"{stage}{self._started}@{NODE}", SLOTS)
        self._fleet[stage] = worker
        return worker

    def _held(self, ids: list[str], stage: str, worker: Process) -> int:
        return self._states(ids).count((STATES[stage], worker.name))

    def _states(self, ids: list[str]) -> list[tuple[str, str] | None]:
        """State and worker of each rollout; None for one that has ended."""
        with self._stack.redis.client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(f"rollout:{{{rollout_id}}}", "state", "owner", "finished")
            return [None if ended else (state, owner or "") for state, owner, ended in pipe.execute()]


def main() -> None:
    options = make_parser(__doc__, count=1000, rounds=6).parse_args()
    short = options.rounds == 1
    lease_s = SHORT_LEASE_S if short else LEASE_S
    with service(ROLLOUT_LEASE_S=str(lease_s)) as stack:
        waiting = wait_at_gateway(stack, stack.gateway, stack.url, SHORT_S if short else LONG_S)
        fleet = start_fleet(stack, SLOTS)
        cpu_ms = race(stack, fleet, options.rounds, options.count)["cpu_ms"]
        kills = Kills(stack, fleet, lease_s)
        over_s: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
        for number in range(options.rounds):
            stage = list(STATES)[number % len(STATES)]
            for spare, by_stage in over_s.items():
                by_stage.setdefault(stage, []).append(kills.seconds_over_lease(stage, spare))
    worst_s = {spare: max(max(values) for values in by_stage.values()) for spare, by_stage in over_s.items()}
    p99_ms = waiting["p99_ms"]
    report(
        "control_plane",
        {
            "recovery_worst_s_over_lease_with_spare": round(worst_s[True], 3),
            "recovery_worst_s_over_lease_without_spare": round(worst_s[False], 3),
            "cpu_ratio_to_equal_chain": cpu_ms["ratio"],
            "cpu_ms_over_equal_chain": round(cpu_ms["ours"]["median"] - cpu_ms["equal_chain"]["median"], 3),
            "gateway_pss_mb_with_1000_waiters": waiting["pss_mb"],
            "other_request_p99_ratio_to_no_waiters": round(p99_ms["beside"] / p99_ms["alone"], 2),
            "other_request_p99_ms": p99_ms["beside"],
        },
        recovery={
            "lease_s": lease_s,
            "held": HELD,
            "s_over_lease_with_spare": over_s[True],
            "s_over_lease_without_spare": over_s[False],
            "worker_start_s": summary(kills.start_s),
        },
        cpu_ms=cpu_ms,
        waiting=waiting,
        options=vars(options),
    )


if __name__ == "__main__":
    main()
