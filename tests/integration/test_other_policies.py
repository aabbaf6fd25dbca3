"""A judge's outage, with real Redis and engines in processes of their own: no sample is scored by it."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
import httpx
import pytest

from rollout.schema import BackendRequest, Blame, Limits, Rollout, RolloutRequest, State
from services.engines.describe import describe
from services.settings import Settings
from services.state.backends.store import BackendStore
from services.state.rollouts.store import Claim
from tests.helpers.fake_engine import fake_engine
from tests.helpers.llm_servers import LLMServer
from tests.helpers.others import said
from tests.helpers.stack import wait_until
from workers.agent.placement import Placements
from workers.agent.replay import Action
from workers.agent.router import BackendRouter, Router
from workers.handlers import AgentHandler, EvalContext, Reward
from workers.handlers.base import AnyTask
from workers.inprocess import Actions, InProcess, demo_tokenizer


class Judged(AgentHandler[AnyTask]):
    """Whatever the judge says is worth 1, and the hook would score a failure 0."""

    name = "judged"

    def prompt(self, task):
        return said("1 plus 1")

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        async with ctx.model("judge") as judge:
            await judge.ask(said("is it right?"), max_tokens=40)
        return Reward(1.0)

    async def on_eval_error(self, ctx, error):
        return Reward(0.0)


class Placed:
    """The judge's backends, placed by Redis as a worker has it; a `workers.inprocess.Model`."""

    def __init__(self, store: BackendStore) -> None:
        self.store = store

    def router(self, claim: Claim, http: aiohttp.ClientSession) -> Router:
        return BackendRouter(claim.rollout_id, Placements(self.store), http, wait_s=0.5)


@pytest.fixture(scope="module")
def engine():
    with fake_engine(step_ms=2, first_id=20, vocab_size=300) as running:
        yield running


@pytest.fixture
def store(server):
    server.client.flushall()
    return BackendStore(server.client)


def judged(store: BackendStore, **limits: float) -> Rollout:
    agent = Actions([Action(content="2")], demo_tokenizer())
    runner = InProcess(Judged(), agent, Settings(retry_delay_s=0.01), {"judge": Placed(store)})
    request = RolloutRequest(handler="judged", limits=Limits(**({"max_attempts": 2} | limits)))
    (done,) = asyncio.run(runner.run(request))
    assert all(backend.live_rollouts == 0 for backend in store.list()), "its place is given back"
    return done


def calls(engine: LLMServer) -> list[dict]:
    return httpx.get(f"{engine.url}/calls", timeout=60).json()


def dropped(done: Rollout) -> bool:
    return (done.state, done.reward, done.drop) == (State.FAILED, None, True)


def test_a_judge_that_is_well_scores(store, engine):
    store.put(describe(BackendRequest(url=engine.url, id="judge")))
    done = judged(store)
    assert (done.state, done.reward) == (State.COMPLETED, 1.0)
    record = done.trajectory.chains[0]
    assert (record.role, record.policy) == ("judge", "judge") and 0 < sum(record.loss_mask) <= 40
    assert record.policy_versions[0] == "default" and done.policy_versions != ["default"]


def test_a_judge_whose_engine_dies_in_mid_call_drops_the_sample(store):
    with fake_engine(step_ms=2, first_id=20, vocab_size=300) as dying:
        store.put(describe(BackendRequest(url=dying.url, id="judge")))
        httpx.post(f"{dying.url}/fault", json={"kind": "die", "tokens": 3}, timeout=60).raise_for_status()
        done = judged(store)
    assert dropped(done) and (done.error.blame, done.attempt) == (Blame.INFRASTRUCTURE, 2)
    assert "no backend answered" in done.error.message


def test_a_judge_that_the_breaker_leaves_alone_is_not_asked(store, engine):
    before = len(calls(engine))
    store.put(describe(BackendRequest(url=engine.url, id="judge")))
    store.fail("judge", "7 calls failed, though /health answers", by="health")
    done = judged(store)
    assert dropped(done) and (done.error.blame, done.attempt) == (Blame.INFRASTRUCTURE, 2)
    assert len(calls(engine)) == before


def test_without_any_backend_of_the_judge_the_sample_is_dropped(store):
    done = judged(store)
    assert dropped(done) and (done.error.blame, done.attempt) == (Blame.INFRASTRUCTURE, 2)


def test_the_time_limit_of_eval_closes_the_judges_call_in_its_engine(store, engine):
    store.put(describe(BackendRequest(url=engine.url, id="judge")))
    httpx.post(f"{engine.url}/fault", json={"kind": "slow", "factor": 1000}, timeout=60).raise_for_status()
    try:
        before = len(calls(engine))
        done = judged(store, max_attempts=1, eval_timeout_s=1.5)
        assert dropped(done) and done.error.blame is Blame.TIMEOUT
        states = lambda: [call["state"] for call in calls(engine)[before:]]  # noqa: E731
        wait_until(lambda: states() == ["cancelled"], 60, "the call to be closed")
    finally:
        httpx.post(f"{engine.url}/fault", json={"kind": "none"}, timeout=60)


def test_waiting_for_room_at_the_judge_takes_nothing_of_evals_time(store, engine, monkeypatch):
    store.put(describe(BackendRequest(url=engine.url, id="judge", max_rollouts=1)))
    (taken,) = store.many([store.acquire("somebody")])
    assert taken["word"] == "ok"
    timer = threading.Timer(2.5, lambda: store.many([store.release("somebody")]))
    router = Placed.router
    monkeypatch.setattr(Placed, "router", lambda *asked: timer.start() or router(*asked))
    done = judged(store, eval_timeout_s=2.0, max_attempts=1)
    timer.join()
    assert (done.state, done.reward) == (State.COMPLETED, 1.0), done.error
    assert done.stage_seconds["eval"] >= 2.0
