"""What the rollouts of one worker ask of the heap shares round trips, and who waits is woken in order."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import weakref
from functools import partial

import pytest
import redis

from rollout.trajectory import Chain, Segment, Trajectory
from services.engines.base import SampleRequest
from services.state import keys
from services.state import redis as state_redis
from services.state.backends.store import BackendStore
from services.state.redis import LoopConnection, connect
from tests.helpers.heap import backend, home
from tests.helpers.llm_servers import free_port
from workers import patience
from workers.agent import room
from workers.agent.llm import session
from workers.agent.placement import MAX_BATCH, Placements, PromptSizes
from workers.agent.router import BackendRouter
from workers.errors import InfrastructureError, StageTimeout
from workers.patience import time_limit


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
        placed = await asyncio.gather(*(placements.acquire(f"r{n}", tokens=n + 1) for n in range(many)))
        assert {placement.word for placement in placed} == {"ok"}
        again = await asyncio.gather(*(placements.extend(f"r{n}", n + 1) for n in range(many)))
        assert [placement.backend.id for placement in again] == [placement.backend.id for placement in placed]
        trips = store.trips
        assert all(await asyncio.gather(*(placements.release(f"r{n}") for n in range(many))))
        return trips

    many = MAX_BATCH + 40
    trips = asyncio.run(asyncio.wait_for(main(), 60))
    assert trips <= 6, "the first alone, then as many as one trip may carry"
    assert [(backend.load, backend.live_rollouts) for backend in store.list()] == [(0.0, 0)] * 2


def test_on_a_connection_of_the_loop_no_thread_is_asked_but_where_something_is_wrong(store, server):
    async def main():
        connection = LoopConnection(server.url)
        placements = Placements(store, connection)
        trips = []
        client = connect(server.url)
        drops = partial(client.client_kill_filter, _type="normal", skipme=True)
        for disturb in (client.script_flush, lambda: None, drops, lambda: None, client.script_flush):
            disturb()
            store.trips = 0
            both = await asyncio.gather(placements.acquire("r"), placements.acquire("s"))
            assert [placement.word for placement in both] == ["ok", "ok"]
            trips.append(store.trips)
        await connection.close()
        return trips

    assert asyncio.run(main()) == [1, 0, 1, 0, 1]
    assert sum(backend.live_rollouts for backend in store.list()) == 2


def test_a_redis_that_is_frozen_holds_up_a_connection_of_the_loop_for_a_while(store, server, monkeypatch):
    monkeypatch.setattr(state_redis, "SHORT_ANSWER_S", 0.3)

    async def main():
        placements = Placements(store, LoopConnection(server.url))
        assert (await placements.acquire("r")).word == "ok"
        store.trips = 0
        os.kill(server.pid, signal.SIGSTOP)
        assert (await placements.acquire("r")).word == "ok"
        return store.trips

    def thawed(calls):
        """Not before a thread is asked, however late that is."""
        os.kill(server.pid, signal.SIGCONT)
        return Counting.many(store, calls)

    monkeypatch.setattr(store, "many", thawed)
    try:
        assert asyncio.run(main()) == 1
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_redis_that_is_away_is_waited_for_and_the_stage_s_clock_stands_still(store, monkeypatch):
    monkeypatch.setattr(patience, "RETRY_S", 0.05)

    async def mend(trips):
        """From when it was first found to be away."""
        while store.trips == trips:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)
        store.broken = False

    async def main():
        placements = Placements(store)
        store.broken, mending = True, asyncio.create_task(mend(store.trips))
        async with time_limit(1.0, StageTimeout, "run_timeout_s"):
            placed = await asyncio.gather(*(placements.acquire(f"r{n}") for n in range(3)))
        assert placements.clock() < time.monotonic() - 1.0, "nor does waiting for a backend count"
        with pytest.raises(StageTimeout):
            async with time_limit(0.1, StageTimeout, "run_timeout_s"):
                await asyncio.sleep(10)
        await mending
        return placed

    assert {placement.word for placement in asyncio.run(main())} == {"ok"}


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
    assert [(type(error), error.blame) for error in failed] == [(patience.RedisAway, "infrastructure")] * 3
    assert later.word == "ok"


def test_a_caller_that_gives_up_does_not_disturb_the_others(store):
    async def main():
        placements = Placements(store)
        task = asyncio.create_task(placements.acquire("gone"))
        stays = asyncio.create_task(placements.acquire("stays"))
        await asyncio.sleep(0)
        task.cancel()
        return (await stays).word

    assert asyncio.run(main()) == "ok"


def test_a_rollout_cancelled_while_it_asks_gives_back_what_was_reserved_for_it(store):
    async def main():
        placements = Placements(store)
        router = BackendRouter("r", placements, None)
        asking = asyncio.create_task(router.acquire(50))
        while not placements._queue:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not await placements.release("nobody")  # answered behind what was asked before
        assert sum(backend.live_rollouts for backend in store.list()) == 1, "else this would prove nothing"
        await router.release()

    asyncio.run(main())
    assert [(backend.load, backend.live_rollouts) for backend in store.list()] == [(0.0, 0)] * 2


def test_a_rollout_that_has_a_backend_does_not_ask_again(store):
    async def main():
        router = BackendRouter("r", Placements(store), None)
        first, trips = await router.acquire(50), store.trips
        assert await router.acquire() is first and store.trips == trips

    asyncio.run(main())


CALL = SampleRequest("c", [1, 2], max_tokens=1)


def test_a_router_whose_rollout_is_another_worker_s_gets_no_backend(store):
    async def main():
        router = BackendRouter("r", Placements(store), None, fence=3)
        for asking in (router.acquire(), router.generate(CALL, 5)):
            with pytest.raises(InfrastructureError, match="not this worker's any more"):
                await asking

    asyncio.run(main())


def failing_turn(store, accepts=None):
    """One turn against backends at which nobody listens; the router after it has given up."""

    async def main():
        async with session() as http:
            router = BackendRouter("r", Placements(store), http, wait_s=0.0)
            await router.acquire()
            router.accepts = accepts and partial(accepts, router)
            with pytest.raises(InfrastructureError, match="calls failed; the last: backend"):
                await router.generate(CALL, 5)
            return router

    for name in "abc":
        store.put(backend(name).model_copy(update={"url": f"http://127.0.0.1:{free_port()}"}))
    return asyncio.run(asyncio.wait_for(main(), 20))


def test_each_backend_is_tried_once_before_one_is_tried_again(store):
    router = failing_turn(store)
    assert store.take_suspects() == {"a": 1, "b": 1, "c": 1}
    assert router.metrics["failed_calls"] == 3


def test_a_backend_that_cannot_take_the_rollout_over_is_asked_once_and_never_called(store):
    refused = []

    async def accepts(router, backend):
        if refused and backend.id not in refused:
            return None
        refused.append(backend.id)
        return "it has another tokenizer"

    router = failing_turn(store, accepts)
    (refuser,) = refused
    assert set(store.take_suspects()) == set("abc") - {refuser} and router.backend.id != refuser


def test_tokens_of_an_exchange_count_only_from_a_healthy_backend_and_known_weights(store):
    store.put(backend("a", policy_version="v2"))

    def trusted(version):
        return asyncio.run(Placements(store).trusted("a", version))

    assert trusted("v2") and not trusted("v1") and not trusted(None)
    store._redis.zadd(keys.policy_sequence(""), {"v1": 1})
    assert trusted("v1"), "a long call may see several updates"
    store.fail("a", "the canary did not pass")
    assert not trusted("v1")
    store.remove("a")
    assert not trusted("v2")


def test_those_who_wait_for_room_get_it_in_order_of_arrival_whatever_they_need(store):
    """Small rollouts that would fit at once do not overtake a large one until it starves."""
    store.put(backend("a", max_rollouts=1, capacity_tokens=1000))
    store.remove("b")

    async def main():
        placements = Placements(store)
        started = []

        async def rollout(name, tokens):
            router = BackendRouter(name, placements, None)
            try:
                await router.acquire(tokens)
                started.append(name)
            finally:
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
    assert [(backend.load, backend.live_rollouts) for backend in store.list()] == [(0.0, 0)]


def test_a_lost_message_does_not_leave_a_rollout_waiting(store):
    async def main():
        async with asyncio.timeout(30):
            placements = Placements(store)
            await placements.change(placements.changed)

    asyncio.run(main())


def test_who_waits_for_weights_that_no_backend_has_asks_once_for_each_change(store, monkeypatch):
    # By itself it asks no more than that, however slow the machine is.
    monkeypatch.setattr(room, "LOOK_AGAIN_S", 120)

    async def main():
        placements = Placements(store)
        routers = [
            BackendRouter(name, placements, None, wait_s=60, policy_version="step-9") for name in ("r", "s")
        ]
        waiting = [asyncio.create_task(router.acquire()) for router in routers]
        for wakes in (True, True, True, True, False):
            async with asyncio.timeout(50):
                while len(placements.changed._waiters) < len(routers):
                    await asyncio.sleep(0.01)
            if wakes:
                placements.wake()
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        return store.trips

    # The first time and after four changes, both in one trip or in two.
    assert 5 <= asyncio.run(main()) <= 2 * 5


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


def test_a_call_that_has_ended_is_not_kept(store):
    async def main():
        placements = Placements(store)
        call = asyncio.create_task(asyncio.sleep(0))
        placements.watch("a", call)
        await call
        await asyncio.sleep(0)
        kept = weakref.ref(call)
        del call
        gc.collect()
        return kept()

    assert asyncio.run(main()) is None


def test_the_first_reservation_is_what_prompts_of_that_handler_were_before():
    sizes = PromptSizes()
    assert 20 < sizes.expected("math", {"question": "x" * 100}) < 40, "guessed from the task"
    sizes.seen("math", Trajectory())
    for tokens in (1000, 1200):
        chain = Chain(segments=[Segment(role="user", token_ids=[1] * tokens)])
        sizes.seen("math", Trajectory(chains=[chain]))
    assert sizes.expected("math", {}) == 1021
    assert sizes.expected("code", {}) < 5, "each handler has its own"


def test_who_holds_a_place_waits_for_no_other_beside_those_who_wait_for_his(heap):
    heap.put(backend("b", max_rollouts=2))
    assert [home(heap.acquire(name)) for name in ("r1", "r2")] == ["b", "b"]
    assert heap.acquire("r3").word == "full"
    # Both players of a game are of one policy: were they to wait for each other, no game would go on.
    assert [home(heap.acquire(name, slot="opponent1")) for name in ("r1", "r2")] == ["b", "b"]
    assert heap.acquire("r4", slot="judge1").word == "full", "who holds nothing waits"
    heap.put(backend("j", policies={"judge": "m"}, capacity_tokens=10))
    assert home(heap.acquire("e1", slot="judge1", policy="judge", tokens=9)) == "j"
    assert heap.acquire("e2", slot="judge1", policy="judge", tokens=9).word == "full"
    assert home(heap.acquire("r1", slot="judge1", policy="judge", tokens=9)) == "j"
