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

import itertools
import json
import os
import signal
import time
from functools import partial
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from benchmarks import harness
from benchmarks.harness import PATIENCE_S, Process, Stack, wait_until
from benchmarks.pipeline import SLOTS, race
from rollout.schema import RolloutRequest, State
from services.state.fleet import FleetStore
from tests.helpers.keys import HEADERS, metric
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


def others(connection: HTTPConnection, seconds: float) -> list[float]:
    """Seconds of each request of a client with other wishes, which asks for so long."""
    headers = HEADERS | {"Content-Type": "application/json"}
    times = []

    def ask(method: str, path: str, body: str | None = None) -> Any:
        began = time.perf_counter()
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        times.append(time.perf_counter() - began)
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:200]!r}")
        return json.loads(answer)

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        made = ask("POST", "/v1/rollouts", '{"handler": "noop"}')
        path = f"/v1/rollouts/{made['rollouts'][0]['id']}"
        ask("GET", path)
        ask("GET", "/health")
        # It ends at once: a result, which none of those who wait is waiting for.
        ask("POST", f"{path}/cancel")
        time.sleep(PAUSE_S)
    return times


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

    def all_wait() -> bool:
        return metric(url, "rollout_gateway_waiters") == len(paths)

    other = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    others(other, PAUSE_S)  # what the first requests import is not counted
    p99_ms = {"alone": harness.percentile(others(other, seconds / 2), 0.99) * 1e3}
    before_mb = harness.memory_mb([gateway.pid], "pss")
    made = stack.client.submit([RolloutRequest(handler="noop", n=POLLS, tags=[tag])])
    paths = harness.waiting_paths([new.id for new in made], CURSORS, STREAMS)
    with Waiters("127.0.0.1", port, paths) as clients:
        wait_until(all_wait, PATIENCE_S, "all clients to wait", gateway)
        cpu_s = harness.cpu_seconds([gateway.pid])
        beside = others(other, seconds)
        cpu_s = harness.cpu_seconds([gateway.pid]) - cpu_s
        p99_ms["beside"] = harness.percentile(beside, 0.99) * 1e3
        clients.read()
        if not all_wait():
            raise RuntimeError(f"not all of {len(paths)} waited to the end: measure for less than 60 s")
        pss_mb = harness.memory_mb([gateway.pid], "pss")
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
    wait_until(lambda: metric(url, "rollout_gateway_waiters") == 0, PATIENCE_S, "those who left")
    harness.say(f"waiting: {pss_mb:.0f} MB, p99 of others in ms: {p99_ms}")
    return {
        "pss_mb": pss_mb,
        "pss_mb_before": before_mb,
        "p99_ms": p99_ms,
        "others": harness.spread_ms(beside),
        "cpu_share": cpu_s / seconds,
        "woken_singly_ms": singly_ms,
        "woken_all_s": woken_s,
    }


class Kills:
    """Workers that are killed with all they hold."""

    def __init__(self, stack: Stack, fleet: dict[str, Process], lease_s: float) -> None:
        self._stack, self._fleet, self._lease_s = stack, fleet, lease_s
        self.start_s: list[float] = []
        """What starting a worker took, until it had announced itself, where a spare was started."""

    def seconds_over_lease(self, stage: str, spare: bool) -> float:
        """Kill the stage's worker; seconds until each of its rollouts has another one, less the lease.

        Rollouts in INIT or RUN begin afresh and have to come through INIT again. Below zero where heartbeats
        were a while ago: a lease counts from the last one.

        Args:
            spare: The other worker is there before the kill; else it is started at the kill.
        """
        stack, victim = self._stack, self._fleet[stage]
        request = RolloutRequest(handler="noop", task={f"{stage}_s": 3600.0}, n=HELD, tags=["held"])
        ids = [new.id for new in stack.client.submit([request])]
        wait_until(lambda: self._held(ids, stage) == HELD, PATIENCE_S, f"{HELD} leases", victim)
        if spare:
            self._fleet[stage] = harness.launch(stack, stage, SLOTS)
            start = partial(harness.await_worker, stack, stage, self._fleet[stage])
            self.start_s.append(harness.timed(start))
        os.killpg(victim.pid, signal.SIGKILL)
        began = time.monotonic()
        if not spare:
            self._fleet[stage] = harness.launch(stack, stage, SLOTS)
        wait_until(
            lambda: self._held(ids, stage) == HELD, PATIENCE_S, f"{HELD} new leases", self._fleet[stage]
        )
        over_s = time.monotonic() - began - self._lease_s
        harness.discard(stack, [victim])
        stack.client.cancel_many(tag="held")
        wait_until(lambda: harness.in_state(stack, *harness.LIVE_STATES) == 0, PATIENCE_S, "the end of all")
        harness.say(f"recovery from a killed worker of {stage}, {spare=}: lease {over_s:+.2f} s")
        return over_s

    def _held(self, ids: list[str], stage: str) -> int:
        """How many of them the stage's latest worker holds."""
        with self._stack.redis.client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(f"rollout:{{{rollout_id}}}", "state", "owner")
            return pipe.execute().count([STATES[stage], self._fleet[stage].name])


def main(options: harness.Options) -> harness.Report:
    short = options.rounds == 1
    lease_s = SHORT_LEASE_S if short else LEASE_S
    over_s: dict[str, dict[str, list[float]]] = {"with_spare": {}, "without_spare": {}}
    with harness.service(ROLLOUT_LEASE_S=str(lease_s)) as stack:
        waiting = wait_at_gateway(stack, stack.gateway, stack.url, SHORT_S if short else LONG_S)
        fleet = harness.start_fleet(stack, SLOTS)
        cpu_ms = race(stack, fleet, options.rounds, options.count)["cpu_ms"]
        kills = Kills(stack, fleet, lease_s)
        for _, stage in zip(range(options.rounds), itertools.cycle(STATES)):
            for kind, by_stage in over_s.items():
                seconds = kills.seconds_over_lease(stage, spare=kind == "with_spare")
                by_stage.setdefault(stage, []).append(seconds)
    p99_ms = waiting["p99_ms"]
    return {
        "results": {
            **{
                f"recovery_worst_s_over_lease_{kind}": max(map(max, by_stage.values()))
                for kind, by_stage in over_s.items()
            },
            "cpu_ratio_to_equal_chain": cpu_ms["ratio"],
            "cpu_ms_over_equal_chain": cpu_ms["ours"]["median"] - cpu_ms["equal_chain"]["median"],
            "gateway_pss_mb_with_1000_waiters": waiting["pss_mb"],
            "other_request_p99_ratio_to_no_waiters": p99_ms["beside"] / p99_ms["alone"],
            "other_request_p99_ms": p99_ms["beside"],
        },
        "recovery": {
            "lease_s": lease_s,
            "held": HELD,
            **over_s,
            "worker_start_s": harness.summary(kills.start_s),
        },
        "cpu_ms": cpu_ms,
        "waiting": waiting,
    }


if __name__ == "__main__":
    harness.run(main, count=1000, rounds=6)
