"""Mathematics with a final answer that math-verify compares: `math`, and `math_tools` with a sandbox."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from rollout.trajectory import Message
from workers.agent.tools import ExecuteBash, ExecuteIPythonCell, Finish, Think
from workers.errors import TaskError
from workers.handlers.answers import boxed_answer, in_box
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward
from workers.handlers.fields import Answers, Problem, RowTask, tell_of_rows, with_problem_and_answer
from workers.handlers.packages import require
from workers.scoring import score_or_blame

JUDGE = "workers.scoring.math_answers:judge"
CHECK = "workers.scoring.math_answers:check"
SCORE_S = 20.0
"""Seconds that a comparison may take; nearly all take milliseconds."""


class MathTask(RowTask):
    """A problem and its accepted answers."""

    model_config = ConfigDict(json_schema_extra=tell_of_rows)

    problem: Problem
    answer: Answers
    """The accepted answers, of which any one will do; LaTeX or plain."""

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> dict[str, Any]:
        return with_problem_and_answer(row)


class Math(AgentHandler[MathTask]):
    """Mathematics without tools: reward 1 when the last boxed answer is right."""

    name = "math"
    repeatable = EVERY_STAGE
    Task = MathTask

    async def init(self, ctx: InitContext[MathTask]) -> None:
        """Raises:
        TaskError: An accepted answer cannot be parsed, so that no answer could ever be right.
        HandlerError: math-verify is not installed.
        """
        require("math_verify", extra="math", handler=self.name)
        gold = ctx.task.answer
        verdict = await score_or_blame(CHECK, {"gold": gold}, known={"gold": ["1"]}, timeout_s=SCORE_S)
        unreadable = gold if verdict is None else verdict["unreadable"]
        if unreadable:
            raise TaskError(
                f"task.answer: math-verify cannot read {unreadable[0]!r}; give it as LaTeX or a plain value"
            )
        await super().init(ctx)

    def prompt(self, task: MathTask) -> list[Message]:
        text = f"{task.problem}\n\nReason step by step, and put your final answer within \\boxed{{}}."
        return [Message(role="user", content=text)]

    def solution(self, task: MathTask) -> str:
        """The first accepted answer, in a box."""
        return in_box(task.answer[0])

    async def evaluate(self, ctx: EvalContext[MathTask]) -> Reward:
        answer = boxed_answer(ctx.trajectory)
        if answer is None:
            return Reward(0.0, {"correct": 0.0, "answered": 0.0})
        gold = ctx.task.answer
        known = {"answer": gold[0], "gold": gold[:1], "as_formulas": True}
        verdict = await score_or_blame(
            JUDGE, {"answer": answer, "gold": gold}, known=known, timeout_s=SCORE_S
        )
        if verdict is None:
            ctx.log.info("an answer that math-verify cannot finish is wrong", answer=repr(answer[:200]))
        correct = float(verdict is not None and verdict["correct"])
        return Reward(correct, {"correct": correct, "answered": 1.0})


class MathTools(Math):
    """Mathematics with Python and a shell: reward 1 when the final answer is right."""

    name = "math_tools"
    tools = (ExecuteIPythonCell(), ExecuteBash(), Think(), Finish())
    uses_sandbox = True

    def prompt(self, task: MathTask) -> list[Message]:
        text = (
            f"{task.problem}\n\nReason step by step; compute with the tools where that helps. When you are "
            "done, call finish with your final answer within \\boxed{} as its message."
        )
        return [Message(role="user", content=text)]
