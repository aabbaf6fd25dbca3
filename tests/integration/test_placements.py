"""What the rollouts of one worker ask of the heap shares round trips, and who waits is woken in order."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis

from rollout.schema import Backend
from rollout.trajectory import Chain, Segment, Trajectory
from services.state.backends import BackendStore
from services.state.redis import connect
from workers import patience
from workers.agent.placement import Placements, PromptSizes
from workers.agent.router import BackendRouter
from workers.errors import InfrastructureError, StageTimeout, time_limit


def backend(name, **fields):
    return Backend(id=name, url=f"http://{name}", model="m", tokenizer="t", max_model_len=100, **fields)


class Counting(BackendStore):
    """Counts round trips."""

    trips = 0
    broken = False

    def many(self, calls):
        self.trips += 1
        if self.broken:
            raise redis.ConnectionError("Redis is away")
        return super().many(calls)


@pytest.fixture
def store(server):
    client = connect(server.url)
    client.flushall()
    store = Counting(client)
    for name in ("a", "b"):
        store.put(backend(name))
    return store


def test_many_rollouts_share_few_round_trips_and_each_gets_its_own_answer(store):
    async def main():
        placements = Placements(store)
        placed = await asyncio.gather(*(placements.acquire(f"r{n}", tokens=n + 1) for n in range(200)))
        assert {one.word for one in placed} == {"ok"}
        again = await asyncio.gather(*(placements.extend(f"r{n}", n + 1) for n in range(200)))
        assert [one.backend.id for one in again] == [one.backend.id for one in placed]
        trips = store.trips
        assert all(await asyncio.gather(*(placements.release(f"r{n}") for n in range(200))))
        return trips

    assert asyncio.run(main()) <= 6, "the first alone, then all that had gathered meanwhile"
    assert [(one.load, one.live_rollouts) for one in store.list()] == [(0.0, 0)] * 2


def test_a_redis_that_is_away_is_waited_for_and_the_stage_s_clock_stands_still(store, monkeypatch):
    monkeypatch.setattr(patience, "RETRY_S", 0.05)

    async def main():
        placements = Placements(store)
        store.broken = True
        asyncio.get_running_loop().call_later(1.5, setattr, store, "broken", False)
        async with time_limit(1.0, StageTimeout, "run_timeout_s"):
            placed = await asyncio.gather(*(placements.acquire(f"r{n}") for n in range(3)))
        assert placements.clock() < time.monotonic() - 1.0, "nor does waiting for a backend count"
        with pytest.raises(StageTimeout):
            async with time_limit(0.1, StageTimeout, "run_timeout_s"):
                await asyncio.sleep(10)
        return placed

    assert {one.word for one in asyncio.run(main())} == {"ok"}


def test_a_redis_that_stays_away_fails_the_calls_under_way_as_ours_and_not_the_later_ones(store, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)

    async def main():
        placements = Placements(store)
        store.broken = True
        failed = await asyncio.gather(
            *(placements.acquire(f"r{n}") for n in range(3)), return_exceptions=True
        )
        store.broken = False
        return failed, await placements.acquire("later")

    failed, later = asyncio.run(main())
    assert [(type(one), one.blame) for one in failed] == [(patience.RedisAway, "infrastructure")] * 3
    assert later.word == "ok"


def test_a_caller_that_gives_up_does_not_disturb_the_others(store):
    async def main():
        placements = Placements(store)
        gone = asyncio.create_task(placements.acquire("gone"))
        stays = asyncio.create_task(placements.acquire("stays"))
        await asyncio.sleep(0)
        gone.cancel()
        return (await stays).word

    assert asyncio.run(main()) == "ok"


def test_those_who_wait_for_room_get_it_in_order_of_arrival_whatever_they_need(store):
    """Small rollouts that would fit at once do not overtake a large one until it starves."""
    store.put(backend("a", max_rollouts=1, capacity_tokens=1000))
    store.remove("b")

    async def main():
        placements = Placements(store)
        started = []

        async def rollout(name, tokens):
            router = BackendRouter(name, placements, None)
            await router.acquire(tokens)
            started.append(name)
            await router.release()
            placements.wake()

        assert (await placements.acquire("holder", tokens=900)).word == "ok"
        tasks = []
        for name, tokens in (("large", 900), ("gives up", 5), ("small", 5), ("smaller", 1)):
            tasks.append(asyncio.create_task(rollout(name, tokens)))
            await asyncio.sleep(0.02)
        tasks[1].cancel()
        assert started == []
        await placements.release("holder")
        placements.wake()
        await asyncio.gather(tasks[0], *tasks[2:])
        return started

    assert asyncio.run(main()) == ["large", "small", "smaller"]
    assert [(one.load, one.live_rollouts) for one in store.list()] == [(0.0, 0)]


def test_a_lost_message_does_not_leave_a_rollout_waiting(store):
    async def main():
        async with asyncio.timeout(30):
            await Placements(store).change()

    asyncio.run(main())


def test_without_a_usable_backend_the_wait_is_bounded_and_the_error_says_what_is_in_the_way(store):
    for name in ("a", "b"):
        store.drain(name)

    async def main():
        await BackendRouter("r", Placements(store), None, wait_s=0.1).acquire()

    with pytest.raises(InfrastructureError, match="2 draining"):
        asyncio.run(main())


def test_calls_to_a_backend_that_is_down_are_given_up_and_others_are_not(store):
    async def main():
        placements = Placements(store)
        calls = {name: asyncio.create_task(asyncio.sleep(60)) for name in ("a", "b")}
        for name, call in calls.items():
            placements.watch(name, call)
        placements.down("a")
        placements.down("unknown")
        await asyncio.sleep(0)
        state = {name: call.cancelled() for name, call in calls.items()}
        calls["b"].cancel()
        return state

    assert asyncio.run(main()) == {"a": True, "b": False}


def test_the_first_reservation_is_what_prompts_of_that_handler_were_before():
    sizes = PromptSizes()
    assert 20 < sizes.expected("math", {"question": "x" * 100}) < 40, "guessed from the task"
    sizes.seen("math", Trajectory())
    for tokens in (1000, 1200):
        chain = Chain(segments=[Segment(role="user", token_ids=[1] * tokens)])
        sizes.seen("math", Trajectory(chains=[chain]))
    assert sizes.expected("math", {}) == 1021
    assert sizes.expected("code", {}) < 5, "each handler has its own"
