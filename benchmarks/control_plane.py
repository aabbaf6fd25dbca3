"""What losing nothing costs: clients that wait, CPU time a rollout, recovery of a killed worker's rollouts.

Waiting: 1,000 clients at one gateway, which answers another client meanwhile and did so alone before. CPU:
of all processes, against the chain of `benchmarks.pipeline`. Recovery: a worker that holds 55 rollouts gets
SIGKILL; seconds until each of them has another worker, less the lease (5 s here). A kill with a spare
worker and one without a round, for each stage in turn; the worst counts. More in
docs/benchmarks.md#control_plane.
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
SHORT = 20
"""Of the clients, the short form has this part only."""
WAITING = "rollout_gateway_waiters"
"""Clients that wait, as the gateway counts them."""
PAUSE_S = 0.05
"""Between two rounds of other requests."""
LONG_S, SHORT_S = 20.0, 1.0
"""For which clients wait while others are answered, and half of it before."""
LEASE_S, SHORT_LEASE_S = 5.0, 3.0
HELD, SHORT_HELD = 55, 10
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
    stack: Stack, gateway: Process, url: str, seconds: float, singly: int = 0, share: int = 1
) -> dict[str, float]:
    """Let clients wait at a gateway and ask other things for so many seconds; then end what is waited for.

    No worker may run: what is submitted stays queued.

    Args:
        singly: So many rollouts end one after the other, before the rest.
        share: Of the clients, this part only.
    """
    FleetStore(stack.redis.client).put_handlers([Noop().info()])
    port, tag = urlsplit(url).port, f"waited-for-{gateway.pid}"
    other = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def wait_for(count: int) -> None:
        wait_until(lambda: metric(url, WAITING) == count, PATIENCE_S, f"{count} clients to wait", gateway)

    others(other, PAUSE_S)  # what the first requests import is not counted
    alone = others(other, seconds / 2)
    before_mb = harness.memory_mb([gateway.pid], "pss")
    made = stack.client.submit([RolloutRequest(handler="noop", n=POLLS // share, tags=[tag])])
    paths = harness.waiting_paths([new.id for new in made], CURSORS // share, STREAMS // share)
    with Waiters("127.0.0.1", port, paths) as clients:
        wait_for(len(paths))
        cpu_s = harness.cpu_seconds([gateway.pid])
        beside = others(other, seconds)
        cpu_s = harness.cpu_seconds([gateway.pid]) - cpu_s
        clients.read()
        if metric(url, WAITING) != len(paths):
            raise RuntimeError("not all clients waited to the end: measure for less than 60 s")
        figures = {
            "pss_mb": harness.memory_mb([gateway.pid], "pss"),
            "pss_mb_before": before_mb,
            "others_p99_ms": harness.percentile(beside, 0.99) * 1e3,
            "others_p99_ms_alone": harness.percentile(alone, 0.99) * 1e3,
            "cpu_percent": 100 * cpu_s / seconds,
        }
        woken_ms = []
        for number in range(singly):
            began = time.monotonic()
            stack.client.cancel(made[number].id)
            clients.read_answers(PATIENCE_S, [number])
            woken_ms.append(((clients.answered_at[number] or time.monotonic()) - began) * 1e3)
            time.sleep(PAUSE_S)
        began = time.monotonic()
        stack.client.cancel_many(tag=tag)
        if not clients.read_answers(PATIENCE_S, range(len(made))):
            raise TimeoutError("not all long-polls were answered")
        figures["all_woken_s"] = time.monotonic() - began
    wait_for(0)
    if woken_ms:
        figures["woken_ms_median"] = harness.percentile(woken_ms, 0.5)
        figures["woken_ms_p99"] = harness.percentile(woken_ms, 0.99)
    harness.say(f"waiting: {figures}")
    return figures


def kill(stack: Stack, fleet: dict[str, Process], stage: str, spare: bool, count: int) -> dict[str, float]:
    """Kill the stage's worker, and put another one into its place in `fleet`.

    Rollouts in INIT or RUN begin afresh and have to come through INIT again.

    Args:
        spare: The other worker is there before the kill; else it is started at the kill.
        count: Rollouts that it holds.

    Returns:
        Under `seconds` those until each of its rollouts has another worker; under `start_s` what starting a
        spare took, until it had announced itself.
    """
    queues = next(queues for queues in fleet if stage in queues.split(","))
    victim, figures = fleet[queues], {}
    request = RolloutRequest(handler="noop", task={f"{stage}_s": 3600.0}, n=count, tags=["held"])
    ids = [new.id for new in stack.client.submit([request])]

    def held() -> bool:
        with stack.redis.client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(f"rollout:{{{rollout_id}}}", "state", "owner")
            return pipe.execute() == [[STATES[stage], fleet[queues].name]] * count

    wait_until(held, PATIENCE_S, f"{count} leases", victim)
    if spare:
        fleet[queues] = harness.launch(stack, queues, SLOTS)
        start = partial(harness.await_worker, stack, stage, fleet[queues])
        figures["start_s"] = harness.timed(start)
    os.killpg(victim.pid, signal.SIGKILL)
    began = time.monotonic()
    if not spare:
        fleet[queues] = harness.launch(stack, queues, SLOTS)
    wait_until(held, PATIENCE_S, f"{count} new leases", fleet[queues])
    figures["seconds"] = time.monotonic() - began
    harness.discard(stack, [victim])
    stack.client.cancel_many(tag="held")
    wait_until(lambda: harness.in_state(stack, *harness.LIVE_STATES) == 0, PATIENCE_S, "the end of all")
    harness.say(f"recovery from a killed worker of {stage}, {spare=}: {figures}")
    return figures


def main(options: harness.Options) -> harness.Report:
    short = options.rounds == 1
    # A lease counts from the last heartbeat, so what is over it may be less than nothing.
    lease_s, held = (SHORT_LEASE_S, SHORT_HELD) if short else (LEASE_S, HELD)
    over_s: dict[str, list[float]] = {"with_spare": [], "without_spare": []}
    start_s = []
    with harness.service(ROLLOUT_LEASE_S=str(lease_s)) as stack:
        seconds, share = (SHORT_S, SHORT) if short else (LONG_S, 1)
        waiting = wait_at_gateway(stack, stack.gateway, stack.url, seconds, share=share)
        fleet = harness.start_fleet(stack, SLOTS, short)
        cpu_ms = race(stack, fleet, options.rounds, options.count)["cpu_ms"]
        for _, stage in zip(range(options.rounds), itertools.cycle(STATES)):
            for kind, seconds in over_s.items():
                figures = kill(stack, fleet, stage, kind == "with_spare", held)
                seconds.append(figures.pop("seconds") - lease_s)
                start_s += figures.values()
    return {
        "results": {
            **{f"recovery_worst_s_over_lease_{kind}": max(seconds) for kind, seconds in over_s.items()},
            "cpu_ratio_to_equal_chain": cpu_ms["ratio"],
            "cpu_ms_over_equal_chain": cpu_ms["ours"]["median"] - cpu_ms["equal_chain"]["median"],
            "gateway_pss_mb_with_1000_waiters": waiting["pss_mb"],
            "other_request_p99_ratio_to_no_waiters": waiting["others_p99_ms"]
            / waiting["others_p99_ms_alone"],
            "other_request_p99_ms": waiting["others_p99_ms"],
        },
        "recovery": {
            "lease_s": lease_s,
            "held": held,
            "s_over_lease_by_stage_in_turn": over_s,
            "worker_start_s": harness.summary(start_s),
        },
        "cpu_ms": cpu_ms,
        "waiting": waiting,
    }


if __name__ == "__main__":
    harness.run(main, count=1000, rounds=6)
