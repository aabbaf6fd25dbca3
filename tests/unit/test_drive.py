"""How a program has ended: what is scored, and what was no doing of its own."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.schema import Agent, Limits, RolloutRequest
from rollout.trajectory import FinishReason, Trajectory
from sandbox.client import ExecResult
from services.settings import Settings
from services.state.capture.store import Summary
from tests.unit.test_swe_rows import BENCH
from workers.errors import HandlerError, InfrastructureError, TaskError
from workers.handlers.calculator import Calculator
from workers.handlers.code import Code, CodeText
from workers.handlers.swe import Swe
from workers.harnesses.drive import Driven

WELL, BADLY, LATE = ExecResult(0), ExecResult(1), ExecResult(timed_out=True)
OVER = ExecResult(limit_exceeded="memory")


FEW = {
    "now_ms": 0,
    "calls": 3,
    "sampled": 9,
    "nodes": 3,
    "in_flight": 0,
    "lost": 0,
    "refused": {},
    "session": "",
}


def driven(agent: Agent) -> Driven:
    request = RolloutRequest(handler="calculator", task={"question": "x", "answer": "2"}, agent=agent)
    return Driven(Calculator(), request, Settings())


def waited(**more: Any) -> FinishReason:
    store = SimpleNamespace(summary=lambda *ids: Summary(**FEW | more, finished=True))
    ctx = SimpleNamespace(rollout_id="r", attempt=1)
    return asyncio.run(driven(Agent(harness="external"))._wait(ctx, store, 5.0))


def ended(result: ExecResult, unanswered: int = 0, cut_off: bool = False, **more: Any) -> FinishReason:
    ctx = SimpleNamespace(agent=SimpleNamespace(trajectory=Trajectory()))
    command = driven(Agent(harness="command", command=["x"]))
    return command._ended(ctx, result, Summary(**FEW | more), unanswered, cut_off)


@pytest.mark.parametrize(
    ("result", "more", "reason"),
    [
        (WELL, {}, FinishReason.STOP),
        (BADLY, {}, FinishReason.STOP),
        (ExecResult(signal=11), {}, FinishReason.STOP),
        (LATE, {}, FinishReason.TIME_LIMIT),
        (OVER, {"refused": {"unavailable": 1}}, FinishReason.SANDBOX_LIMIT),
        # It got over what failed.
        (WELL, {"refused": {"unavailable": 1}, "unanswered": 1, "lost": 1}, FinishReason.STOP),
        (LATE, {"refused": {"unavailable": 1}, "unanswered": 1}, FinishReason.TIME_LIMIT),
        # Its own doing, whatever it makes of it.
        (BADLY, {"refused": {"busy": 9, "context": 1}, "fault": "busy"}, FinishReason.STOP),
        (BADLY, {"refused": {"context": 1}, "fault": "context"}, FinishReason.CONTEXT_LENGTH),
        (BADLY, {"stopped": "turn_limit"}, FinishReason.TURN_LIMIT),
    ],
)
def test_a_program_that_the_model_did_not_fail_is_scored(result, more, reason):
    assert ended(result, **more) is reason


@pytest.mark.parametrize(
    "more",
    [
        {"fault": "unavailable", "refused": {"unavailable": 1}},
        {"fault": "internal", "refused": {"internal": 1}},
        {"cut_off": True},
        {"cut_off": True, "calls": 0},
        {"nodes": 0, "in_flight": 1},
    ],
)
@pytest.mark.parametrize("result", [WELL, BADLY, LATE], ids=["well", "badly", "late"])
def test_a_program_whose_last_call_the_service_failed_is_not_scored_however_it_ended(result, more):
    with pytest.raises(InfrastructureError):
        ended(result, **more)


@pytest.mark.parametrize(
    "more", [{"refused": {"unavailable": 1}}, {"refused": {"internal": 1}}, {"unanswered": 1}, {"lost": 1}]
)
@pytest.mark.parametrize("result", [BADLY, ExecResult(signal=9)], ids=["badly", "killed"])
def test_a_program_that_failed_after_the_service_did_is_not_scored(result, more):
    with pytest.raises(InfrastructureError):
        ended(result, **more)


@pytest.mark.parametrize("fault", ["unavailable", "internal"])
def test_a_program_elsewhere_that_the_service_failed_says_itself_what_that_was_worth(fault):
    assert waited(fault=fault, reward=0.5) is FinishReason.STOP
    assert waited(fault="context") is FinishReason.CONTEXT_LENGTH
    with pytest.raises(InfrastructureError):
        waited(fault=fault)


def test_a_program_whose_first_call_has_no_room_is_told_to_want_a_longer_context():
    with pytest.raises(TaskError, match="max_model_len"):
        ended(BADLY, calls=0, nodes=0, refused={"context": 1}, fault="context")


def test_a_program_that_never_called_is_the_handlers_to_explain():
    for result in (WELL, BADLY, OVER):
        with pytest.raises(HandlerError):
            ended(result, calls=0)


class Begun(Exception):
    """The handler was told that the turns begin."""


@pytest.mark.parametrize("agent", [Agent(harness="external"), Agent(harness="command", command=["x"])])
def test_a_handler_gets_ready_for_its_score_before_turns_that_a_program_drives(agent):
    class Warming(Calculator):
        async def warm(self, ctx: Any) -> None:
            raise Begun

    request = RolloutRequest(handler="calculator", task={"question": "x", "answer": "2"}, agent=agent)
    with pytest.raises(Begun):
        asyncio.run(Driven(Warming(), request, Settings()).run(SimpleNamespace()))


CASE = {"prompt": "Double it.", "tests": [{"stdin": "1", "stdout": "2"}]}


@pytest.mark.parametrize(("handler", "task"), [(Code(), CASE), (Swe(), BENCH)])
def test_a_handler_whose_work_is_left_in_a_sandbox_names_no_tool_that_a_program_does_not_have(handler, task):
    said = " ".join(message.text for message in handler.prompt(handler.check_task(task)))
    names = [tool.name for tool in handler.tools if tool.name != "think"]  # a word of its own
    assert len(names) == 3 and not re.search("|".join(names), said)


@pytest.mark.parametrize(
    ("handler", "task", "image"),
    [(Code(), CASE, None), (CodeText(), CASE, None), (Swe(), {**BENCH, "image": "calc"}, "calc")],
)
def test_a_handler_that_scores_in_another_sandbox_has_it_started_as_its_own_turns_begin(handler, task, image):
    asked = []

    async def warm(ctx: Any, **options: Any) -> None:
        asked.append(options["image"])
        raise Begun

    ctx = SimpleNamespace(task=handler.check_task(task), sandboxes=SimpleNamespace(warm=warm))
    ctx.limits, ctx.spent_s = Limits(), 0.0
    with pytest.raises(Begun):
        asyncio.run(handler.run(ctx))
    assert asked == [image]
