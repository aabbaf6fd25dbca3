"""Handlers that ask other policies: recorded beside the agent's turns, and never scored in an outage."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from rollout.adapters import base as adapters
from rollout.arrays import Arrays
from rollout.cli import archive, render
from rollout.exports import atif, otel
from rollout.schema import Blame, Limits, RolloutRequest, SamplingParams, State
from rollout.trajectory import FinishReason, Message, Trajectory
from sandbox.errors import SandboxSpoiled
from services.settings import Settings
from services.state.tenants import Tenant
from tests.helpers.others import Source, broken, played, said
from workers import inprocess, patience
from workers.agent import others as others_module
from workers.agent.replay import Action
from workers.errors import AgentFault, InfrastructureError, ModelError
from workers.handlers import AgentHandler, EvalContext, Reward, RunContext
from workers.handlers.base import AnyTask
from workers.inprocess import InProcess
from workers.testing import play

ASKED = [Message(role="user", content="1 plus 1")]


class Asks(AgentHandler[AnyTask]):
    """Asks a user simulator in RUN, and a judge in EVAL, by what a test gives it."""

    name = "asks"
    repeatable = ("init", "eval")

    def __init__(self, run: Any = None, judge: Any = None, hook: bool = False) -> None:
        self._run, self._judge, self._hook = run, judge, hook

    async def run(self, ctx: RunContext[AnyTask]) -> FinishReason:
        reason = await ctx.agent.run(ASKED)
        if self._run:
            await self._run(ctx)
        return reason

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        return await self._judge(ctx) if self._judge else Reward(1.0)

    async def on_run_error(self, ctx: RunContext[AnyTask], error: Exception) -> FinishReason | None:
        return FinishReason.STOP if self._hook else None

    async def on_eval_error(self, ctx: EvalContext[AnyTask], error: Exception) -> Reward | None:
        return Reward(0.0) if self._hook else None


async def chat(ctx: RunContext[AnyTask]) -> None:
    async with ctx.model("simulator", role="user") as user:
        assert (await user.ask(said("hello"))).text == "who is there"
        assert (await user.ask(said("me"))).text == "go on"


async def judged(ctx: EvalContext[AnyTask]) -> Reward:
    assert ctx.trajectory.final_text() == "2"
    sampling = SamplingParams(temperature=0.5, max_tokens=30)
    judge = ctx.model("judge", sampling=sampling)  # the stage's end closes what its handler does not
    answer = await judge.ask(said("is 2 right?"))
    return Reward(float(answer.text == "yes"), roles={"user": 0.25})


def test_other_policies_chains_come_before_the_agents_and_count_for_nothing_of_it():
    user, judge = Source("who is there", "go on"), Source("yes")
    done = played(Asks(chat, judged), {"simulator": user, "judge": judge}, sampling=SamplingParams(seed=5))
    assert (done.state, done.reward, done.role_rewards) == (State.COMPLETED, 1.0, {"user": 0.25})
    record = done.trajectory
    about = [(c.role, c.policy, c.model, c.teaches) for c in record.chains]
    assert about == [
        ("user", "simulator", "actions", False),
        ("judge", "judge", "actions", False),
        ("agent", None, None, True),
    ]
    assert all(chain.tokenizer == record.tokenizer for chain in record.chains[:2])
    assert [m.text for s in record.chains[0].segments for m in s.messages] == [
        *("hello", "who is there", "me", "go on")
    ]
    # Each id that the policy saw, in the order in which it did.
    assert record.chains[0].token_ids[: len(user.asked[1].prompt)] == user.asked[1].prompt
    assert (record.turns, record.final_text()) == (1, "2")
    assert record.sampled_tokens == sum(record.chain.loss_mask) == done.metrics["sampled_tokens"]
    assert (done.metrics["user_calls"], done.metrics["judge_calls"]) == (2, 1)
    assert done.metrics["judge_tokens"] == sum(record.chains[1].loss_mask) > 0
    assert (user.held, judge.held) == (1, 1) and user.released >= 1 and judge.released >= 1
    # The handler's sampling, with a seed of its own.
    assert (judge.asked[0].sampling.temperature, judge.asked[0].max_tokens) == (0.5, 30)
    assert user.asked[0].seed not in (None, judge.asked[0].seed)
    # Trainers see what they saw before.
    assert [sample.chain.role for sample in adapters.samples(done)] == ["agent"]
    others = done.model_copy(update={"trajectory": Trajectory(chains=record.chains[:2])})
    assert archive.sample(others) is None and archive.sample(done)["prompt_ids"] == record.prompt_ids
    views = Arrays.of(record)
    assert views.token_ids.tolist() == record.chain.token_ids and len(views.trained) == 1


def test_a_trained_role_is_sampled_as_the_request_says_and_is_a_sample_with_its_own_reward():
    async def play(ctx: RunContext[AnyTask]) -> None:
        async with ctx.model("simulator", "user", SamplingParams(temperature=0.1, max_tokens=9)) as user:
            await user.ask(said("hello"))

    user = Source("hi")
    done = played(Asks(play, judged), {"simulator": user, "judge": Source("yes")}, trained_roles=["user"])
    assert (user.asked[0].sampling.temperature, user.asked[0].max_tokens) == (1.0, 9)
    assert [sample.chain.role for sample in adapters.samples(done)] == ["user", "agent"]
    assert (adapters.rewards([done]), adapters.rewards([done], "user")) == ([1.0], [0.25])
    assert [len(view.token_ids) for view in Arrays.of(done.trajectory).trained] == [
        len(done.trajectory.chains[n].token_ids) for n in (0, 2)
    ]
    assert adapters.last_sample(done).chain is done.trajectory.chain


async def away() -> None:
    raise InfrastructureError("no backend answered for 20 s")


async def refused() -> None:
    raise ModelError("HTTP 400: no")


@pytest.mark.parametrize("stage", ["run", "eval"])
@pytest.mark.parametrize(
    ("fails", "blame"),
    [(away, Blame.INFRASTRUCTURE), (refused, Blame.MODEL), (broken, Blame.INFRASTRUCTURE)],
)
def test_an_outage_or_refusal_of_another_policy_is_tried_again_and_never_scored(stage, fails, blame):
    other = Source(fails=fails)
    handler = Asks(chat, hook=True) if stage == "run" else Asks(judge=judged, hook=True)
    done = played(handler, {"simulator": other, "judge": other})
    assert (done.state, done.reward, done.drop, done.attempt) == (State.FAILED, None, True, 2)
    assert (done.error.blame, done.error.stage) == (blame, stage)
    assert other.held == 2 and other.released >= 2


def test_without_a_backend_of_the_policy_nothing_is_scored():
    done = played(Asks(judge=judged, hook=True), {})
    assert (done.reward, done.drop, done.attempt, done.error.blame) == (None, True, 2, Blame.INFRASTRUCTURE)
    assert "'judge'" in done.error.message


def test_a_time_limit_that_passes_in_a_call_to_another_policy_is_not_the_agents():
    async def hang() -> None:
        # Now, and not before the agent has come to this call.
        for clock in patience._running.get():
            clock._reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(60)

    limits = Limits(max_attempts=1, run_timeout_s=50.0)
    done = played(Asks(chat), {"simulator": (other := Source(fails=hang))}, limits=limits)
    assert (done.state, done.drop, done.error.blame) == (State.FAILED, True, Blame.INFRASTRUCTURE)
    assert "'simulator'" in done.error.message and other.released >= 1


@pytest.mark.parametrize("stage", ["run", "eval"])
def test_a_sandbox_that_another_policy_breaks_is_not_the_agents_doing(stage):
    async def breaks() -> None:
        raise SandboxSpoiled("no room on its disk")

    async def asks(ctx: EvalContext[AnyTask]) -> Reward:
        try:
            return await judged(ctx) if stage == "eval" else await chat(ctx)
        except SandboxSpoiled as error:
            raise AgentFault(str(error)) from error  # as a block of `ctx.sandboxes.fresh` does

    other = Source(fails=breaks)
    handler = Asks(asks, hook=True) if stage == "run" else Asks(judge=asks, hook=True)
    done = played(handler, {"simulator": other, "judge": other})
    assert (done.state, done.reward, done.attempt) == (State.FAILED, None, 2)
    assert (done.error.blame, done.error.stage) == (Blame.INFRASTRUCTURE, stage)


def test_a_run_that_another_worker_may_go_on_with_asks_nobody_else():
    class Repeats(Asks):
        repeatable = ("run",)

    done = played(Repeats(chat), {"simulator": (other := Source("x"))})
    assert (done.error.blame, done.attempt, other.held) == (Blame.HANDLER, 1, 0)
    assert "leave `run` out of `repeatable`" in done.error.message


def test_conversations_have_a_limit(monkeypatch):
    monkeypatch.setattr(others_module, "MAX_CONVERSATIONS", 2)

    async def three(ctx: EvalContext[AnyTask]) -> Reward:
        for _ in range(3):
            await ctx.model("judge").ask(said("well?"))
        return Reward(1.0)

    done = played(Asks(judge=three), {"judge": (other := Source("yes"))})
    assert (done.error.blame, done.reward, len(other.asked)) == (Blame.HANDLER, None, 2)
    assert "more than 2 conversations" in done.error.message


def test_a_tenant_asks_only_the_policies_that_it_may_use(monkeypatch):
    tenant = Tenant(name="default", policies=("default", "small-*"))
    monkeypatch.setattr(inprocess._Episode, "tenant", lambda self, name: tenant)
    done = played(Asks(judge=judged), {"judge": (other := Source("yes"))})
    assert (done.error.blame, other.held, done.drop) == (Blame.TASK, 0, True)
    assert "allowed policies: default, small-*" in done.error.message


def test_a_text_only_policy_is_asked_in_words_and_recorded_without_ids():
    user, judge = Source("who is there", "go on", api="chat"), Source("yes", api="chat")
    done = played(Asks(chat, judged), {"simulator": user, "judge": judge}, trained_roles=["user"])
    assert done.reward == 1.0 and done.metrics["user_tokens"] == 14
    first = done.trajectory.chains[0]
    assert (first.role, first.policy, first.text_only, first.segments) == ("user", "simulator", True, [])
    assert [message.text for message in first.texts] == ["hello", "who is there", "me", "go on"]
    assert [message.text for message in user.asked[1].messages] == ["hello", "who is there", "me"]
    assert [sample.chain.role for sample in adapters.samples(done)] == ["agent"], "there is nothing to train"
    views = Arrays.of(done.trajectory)
    assert views.record.trajectory() == done.trajectory and len(views.trained) == 1


def test_a_text_only_policy_serves_no_agent():
    text = Source("2", api="chat")
    runner = InProcess(Asks(), text, Settings(retry_delay_s=0.01))
    (done,) = asyncio.run(runner.run(RolloutRequest(handler="asks")))
    assert (done.error.blame, done.attempt, text.asked) == (Blame.TASK, 1, [])
    assert "text only" in done.error.message


def test_readers_and_exports_show_whose_turns_a_chain_has():
    judge, user = Source("yes"), Source("who is there", "go on", api="chat")
    done = played(Asks(chat, judged), {"simulator": user, "judge": judge})
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render.rollout_view(done))
    shown = console.export_text()
    for words in ("chain 0: user (simulator, actions)", "who is there", "text only", "reward, user", "0.250"):
        assert words in shown
    document = atif.trajectory(done)
    first, second = document["subagent_trajectories"]
    assert first["extra"] == {"chain_role": "user", "policy": "simulator", "text_only": True}
    assert [step["message"] for step in first["steps"]] == ["hello", "who is there", "me", "go on"]
    assert (second["extra"]["policy"], second["agent"]["name"]) == ("judge", "judge")
    assert second["steps"][1]["metrics"]["extra"]["loss_mask"] == [0] * sum(
        done.trajectory.chains[1].loss_mask
    )
    assert document["agent"]["name"] == "rollout-service" and document["extra"]["role_rewards"]
    assert [span["name"] for span in otel.spans(done)["resourceSpans"][0]["scopeSpans"][0]["spans"]].count(
        "chat actions"
    ) == 1, "spans are the agent's"


def test_conversations_that_begin_beside_each_other_have_places_of_their_own(monkeypatch):
    slots = []
    real = inprocess._Episode.router

    def router(self, claim, policy=None, slot=""):
        slots.append((policy, slot))
        return real(self, claim, policy, slot)

    async def beside(ctx: EvalContext[AnyTask]) -> Reward:
        await asyncio.gather(*(ctx.model("judge").ask(said("well?")) for _ in range(4)))
        return Reward(1.0)

    monkeypatch.setattr(inprocess._Episode, "router", router)
    done = played(Asks(judge=beside), {"judge": Source("yes")})
    assert done.reward == 1.0 and len(done.trajectory.chains) == 5
    assert slots == [(None, "")] + [("judge", f"judge{number}") for number in (1, 2, 3, 4)]


def test_behind_a_turn_that_was_cut_off_a_conversation_does_not_go_on():
    async def cut(ctx: EvalContext[AnyTask]) -> Reward:
        judge = ctx.model("judge")
        await judge.ask(said("well?"), max_tokens=2)
        assert not judge.append(said("more"))
        await judge.ask(said("more"))
        return Reward(1.0)

    done = played(Asks(judge=cut), {"judge": Source("a long answer")})
    assert (done.reward, done.error.blame) == (None, Blame.MODEL) and "cut off" in done.error.message


def test_a_test_of_a_handler_says_what_other_policies_say():
    user = [Action(content="who is there"), Action(content="go on")]
    said_so = {"simulator": user, "judge": [Action(content="no")]}
    (done,) = play(Asks(chat, judged), {}, [Action(content="2")], others=said_so)
    assert (done.reward, done.role_rewards) == (0.0, {"user": 0.25})
