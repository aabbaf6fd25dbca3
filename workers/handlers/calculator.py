"""The demo task: arithmetic that the policy does by calling bash."""

from __future__ import annotations

import re

from pydantic import BaseModel, Field

from rollout.trajectory import Message
from workers.agent.tools import ExecuteBash
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, Reward

_INTEGER = re.compile(r"-?\d+")


class CalculatorTask(BaseModel):
    question: str = Field(min_length=1, max_length=200)
    """For example `37 times 85`."""
    answer: str = Field(pattern=r"^-?\d+$")
    """The number, in decimal digits."""


def is_right(said: str, task: CalculatorTask) -> bool:
    """Whether the last number of a text is the task's answer."""
    numbers = _INTEGER.findall(said)
    return bool(numbers) and int(numbers[-1]) == int(task.answer)


class Calculator(AgentHandler[CalculatorTask]):
    """Arithmetic by bash: reward 1 when the last message is the right number."""

    name = "calculator"
    repeatable = EVERY_STAGE
    Task = CalculatorTask
    tools = (ExecuteBash(),)
    # The demo model was trained on the call's format; a description would be longer than its task.
    advertise_tools = False
    uses_sandbox = True

    def prompt(self, task: CalculatorTask) -> list[Message]:
        return [Message(role="user", content=task.question)]

    def solution(self, task: CalculatorTask) -> str:
        return task.answer

    async def evaluate(self, ctx: EvalContext[CalculatorTask]) -> Reward:
        correct = is_right(ctx.trajectory.final_text(), ctx.task)
        called = any(message.role == "tool" for message in ctx.trajectory.messages)
        return Reward(float(correct), {"correct": float(correct), "called_tool": float(called)})
