"""Watched calls through a real placement: engines killed in mid-stream, and weights exchanged in mid-call."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import httpx
import pytest

from rollout.policy import BackendUpdateState, Canary, PolicyRequest
from rollout.schema import BackendRequest
from services.engines.base import SampleRequest
from services.engines.describe import describe
from services.state.backends.store import BackendStore
from tests.helpers.fake_engine import fake_engine
from tests.helpers.fake_language import FakeLanguage
from tests.helpers.heap import backend
from tests.helpers.long_forms import CHAOS
from workers.agent.llm import BrokenCall, session
from workers.agent.placement import Placements
from workers.agent.router import BackendRouter
from workers.exchange import Exchange

LANGUAGE = FakeLanguage(first_id=20, vocab_size=300)
IDS = {"first_id": 20, "vocab_size": 300}
TOKENS = 60
STEP_MS = 5
PATIENCE_S = 120
KILLS = CHAOS("engines killed under watched calls", short=2, long=20)


def request(number):
    return SampleRequest(f"call-{number}", [100, 101, 102 + number], TOKENS, vocab_size=300)


def truth(number):
    return LANGUAGE.answer(request(number).prompt, max_tokens=TOKENS)


@pytest.fixture
def store(server):
    server.client.flushall()
    return BackendStore(server.client)


def register(store, name, url, api="generate"):
    described = describe(BackendRequest(url=url, id=name)).model_copy(update={"api": api})
    store.put(described)


def fault(engine, kind, **options):
    httpx.post(f"{engine}/fault", json={"kind": kind, **options}, timeout=60).raise_for_status()


class Told(list):
    def __call__(self, token_ids):
        self.extend(token_ids)

    async def reach(self, count):
        while len(self) < count:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_engines_are_killed_at_random_moments_and_every_joined_answer_is_the_undisturbed_one(store, api):
    """Each round has a process that is killed under eight calls, and one that takes them over."""
    chance = random.Random(18)

    async def round_(http, number, victim):
        placements = Placements(store)
        calls = [number * 8 + call for call in range(8)]
        tolds = [Told() for _ in calls]
        routers = [BackendRouter(f"r{call}", placements, http, wait_s=60) for call in calls]
        for router in routers:
            await router.acquire()
        store.drain("rescue", drain=False)
        tasks = [
            asyncio.create_task(router.generate(request(call), PATIENCE_S, told))
            for router, call, told in zip(routers, calls, tolds, strict=True)
        ]
        await tolds[0].reach(chance.randrange(1, TOKENS - 20))
        await asyncio.sleep(chance.random() * STEP_MS / 1000)
        os.kill(victim.pid, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        for call, told, answer in zip(calls, tolds, answers, strict=True):
            expected = truth(call)
            assert told == answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs)
            assert answer.spans == [("default", 0, TOKENS)]
            assert (answer.call_id, answer.finish_reason) == (f"call-{call}", "length")
        for router in routers:
            await router.release()
        return sum(router.metrics.get("failed_calls", 0) for router in routers)

    async def main():
        async with session() as http:
            failed = []
            for number in range(KILLS):
                with fake_engine(step_ms=STEP_MS, **IDS) as victim:
                    register(store, "victim", victim.url, api)
                    # However late the kill is: no call ends before it.
                    fault(victim.url, "hang", tokens=TOKENS - 20)
                    store.drain("rescue")
                    failed.append(await round_(http, number, victim))
                    store.remove("victim")
            return failed

    with fake_engine(step_ms=STEP_MS, **IDS) as rescue:
        register(store, "rescue", rescue.url, api)
        failed = asyncio.run(main())
        sampled = sum(call["sampled"] for call in httpx.get(f"{rescue.url}/calls", timeout=60).json())
    assert failed == [8] * KILLS, "each call was in the engine that was killed"
    assert 20 * 8 * KILLS <= sampled < TOKENS * 8 * KILLS, "they went on, they did not begin anew"


def test_an_engine_that_dies_behind_so_many_ids_has_streamed_them(store):
    async def main(url):
        told = Told()
        async with session() as http:
            router = BackendRouter("r", Placements(store), http, wait_s=60)
            await router.acquire()
            store.drain("other", drain=False)
            fault(url, "die", tokens=17)
            call = asyncio.create_task(router.generate(request(1), PATIENCE_S, told))
            await asyncio.wait_for(told.reach(17), PATIENCE_S)
            return told, await asyncio.wait_for(call, PATIENCE_S)

    with fake_engine(step_ms=1, **IDS) as dying, fake_engine(step_ms=1, **IDS) as other:
        register(store, "dying", dying.url)
        register(store, "other", other.url)
        store.drain("other")
        told, answer = asyncio.run(main(dying.url))
        (call,) = httpx.get(f"{other.url}/calls", timeout=60).json()
    assert told == answer.token_ids == truth(1).token_ids
    assert (call["prompt_tokens"], call["sampled"]) == (3 + 17, TOKENS - 17)


def exchanged(store, mode, *, api="generate", canary=None, then=None):
    """A watched call in whose middle the weights of its engine are exchanged: what was told, the answer, the
    update, the ids told before the update began and after it ended, and the engine's calls."""

    async def main(url):
        told = Told()
        async with session() as http:
            placements = Placements(store)
            router = BackendRouter("r", placements, http, wait_s=60)
            await router.acquire()
            call = asyncio.create_task(router.generate(request(1), PATIENCE_S, told))
            await asyncio.wait_for(told.reach(3), PATIENCE_S)
            before = len(told)
            update = PolicyRequest(version="step-1", mode=mode, canary=canary)
            exchange = Exchange(store, store.get("engine"), update)
            progress = await asyncio.to_thread(exchange.run, lambda _: None)
            after = len(told)
            fault(url, "none")
            if progress.state is BackendUpdateState.FAILED:
                placements.down("engine")  # as the message of `BackendStore.fail` has it done
            if then is not None:
                then()
            try:
                answer = await asyncio.wait_for(call, PATIENCE_S)
            except BrokenCall as error:
                answer = error
            return told, answer, progress, before, after

    with fake_engine(step_ms=STEP_MS, **IDS) as engine:
        register(store, "engine", engine.url, api)
        # Half a minute for the call where the exchange does not wait for its end, however late that begins.
        fault(engine.url, "slow", factor=5 if mode == "wait" else 100)
        outcome = asyncio.run(main(engine.url))
        return *outcome, httpx.get(f"{engine.url}/calls", timeout=60).json()


@pytest.mark.parametrize("api", ["generate", "completions"])
@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_an_exchange_of_weights_in_mid_call_is_seen_in_the_versions_alone(store, mode, api):
    told, answer, progress, before, after, calls = exchanged(store, mode, api=api)
    assert progress.state is BackendUpdateState.RESUMED
    assert told == answer.token_ids == truth(1).token_ids
    assert answer.logprobs == pytest.approx(truth(1).logprobs)
    if mode == "wait":
        assert answer.spans == [("default", 0, TOKENS)]
        return
    if mode == "keep" and api == "completions":
        return  # this route names no versions: docs/policy.md
    (old, start, middle), (new, begin, end) = answer.spans
    assert (old, start, new, begin, end) == ("default", 0, "step-1", middle, TOKENS)
    assert before <= middle <= after + 1
    if mode == "abort":
        first, second = (call for call in calls if call["sampled"] > 1)
        assert first["state"] == "aborted" and second["prompt_tokens"] == 3 + middle


def test_ids_that_were_seen_of_weights_that_fail_their_canary_fail_the_call(store):
    ids = [100, 101, 102]
    wrong = Canary(token_ids=ids, logprobs=[0.0, 0.0], tolerance=0.01)
    told, error, progress, *_ = exchanged(store, "keep", canary=wrong)
    assert progress.state is BackendUpdateState.FAILED
    assert isinstance(error, BrokenCall) and "do not count" in str(error)
    assert told == truth(1).token_ids[: len(told)]
    assert "failed" in store.get("engine").error


def test_what_became_of_the_weights_that_a_backend_had(store):
    """What a call that broke off, and has not said which weights its ids are from, is given for them."""

    async def kept(*events):
        placements, placed = Placements(store), store.get("engine")
        loop = asyncio.get_running_loop()
        for at, (does, *args) in enumerate(events):
            if at == 0:
                does(*args)
            else:
                loop.call_later(0.2 * at, does, *args)
        began = loop.time()
        return await placements.kept(placed), round(loop.time() - began, 1)

    def fares(*events):
        store.remove("engine")
        store.put(backend("engine").model_copy(update={"policy_version": "v1"}))
        return asyncio.run(asyncio.wait_for(kept(*events), PATIENCE_S))

    away = (lambda: store.fail("engine", "does not answer", by="health"),)
    pause, resume = (store.pause, "engine"), (store.resume, "engine")
    assert fares((int,))[0] is True
    assert fares(away)[0] is True, "that it died says nothing about its weights"
    assert fares((store.set_version, "engine", "v2"))[0] is None
    assert fares((store.remove, "engine"))[0] is None
    assert fares((store.fail, "engine", "canary failed"))[0] is False
    updated, waited = fares(pause, (store.set_version, "engine", "v2"), resume)
    assert updated is None and waited >= 0.4
    assert fares(pause, (int,), resume)[0] is True, "an update that failed before it began"
    assert fares(pause, away, (store.fail, "engine", "no answer"), resume)[0] is False
    assert fares(pause, away, resume)[0] is False, "it died before its canary"
