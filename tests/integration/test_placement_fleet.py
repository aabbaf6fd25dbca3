"""Placement on a simulated fleet under virtual time: real scripts, real Redis, hundreds of rollouts."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from benchmarks._fleet import (
    Fleet,
    Ours,
    Peer,
    bound_s,
    cumulative,
    inflight_heap,
    simulate,
    workload,
)
from tests.helpers import virtual_time

ENGINES = 3
SLOTS = 36
FAIR = SLOTS / (ENGINES + 1)
JOIN_S = 60.0


@pytest.fixture
def redis_client(server):
    return server.client


def join(policy):
    """An engine joins a fleet at work.

    Returns:
        For each rollout placed from then on whether it went there, the live rollouts on it second by second,
        and the mean duration of a rollout in seconds.
    """
    fleet = Fleet(policy, SLOTS, ENGINES)
    live = []

    async def main():
        async def later():
            await asyncio.sleep(JOIN_S)
            fleet.add_engine()
            while True:
                await asyncio.sleep(1)
                live.append(fleet.live()[ENGINES])

        watching = asyncio.create_task(later())
        outcome = await fleet.run(workload(110, seed=21))
        watching.cancel()
        return outcome

    outcome = virtual_time.run(main())
    placed = [engine == ENGINES for at, engine in outcome.placed if at >= JOIN_S]
    return placed, live, statistics.mean(outcome.latency_s)


def longest_run(values):
    """Of true values."""
    longest = run = 0
    for value in values:
        run = run + 1 if value else 0
        longest = max(longest, run)
    return longest


def test_a_backend_added_under_load_gets_its_share_in_one_rollouts_time_and_never_all(redis_client):
    placed, live, duration = join(Ours(redis_client))
    assert max(live[: int(duration)]) >= FAIR
    assert max(live) <= 1.5 * FAIR
    assert longest_run(placed) <= 2
    # What this is there to prevent: counting assignments, all new rollouts go to the newcomer.
    placed, _, _ = join(Peer(cumulative, admission=False))
    assert longest_run(placed) > 10


def test_over_committed_caches_cost_ours_less_than_a_heap_of_rollouts_in_flight_without_admission(
    redis_client,
):
    rollouts, engines, slots = workload(96, seed=23), 2, 80
    ours = simulate(lambda: Ours(redis_client), rollouts, slots, engines)
    peer = simulate(lambda: Peer(inflight_heap, admission=False), rollouts, slots, engines)
    assert ours.makespan_s < peer.makespan_s
    assert ours.p95_s < peer.p95_s
    assert ours.hit_rate > peer.hit_rate
    assert ours.makespan_s >= bound_s(rollouts, slots)
    assert len(ours.latency_s) == len(rollouts)
    assert redis_client.hlen("backends:pins") == 0
    assert [load for _, load in redis_client.zrange("backends:load", 0, -1, withscores=True)] == [0, 0]
