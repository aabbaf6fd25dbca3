"""Several questions of the calculator, one after the other: a task of as many turns, for forks to leave.

    user       37 times 85
    assistant  <tool_call>{"name": "execute_bash", "arguments": {"command": "echo $((37*85))"}}</tool_call>
    tool       12 plus 30
    assistant  <tool_call>{"name": "execute_bash", "arguments": {"command": "echo $((12+30))"}}</tool_call>

What a call gives is not shown: the tool asks the next question, and the reward is the share of right ones. A
worker takes it as `ROLLOUT_HANDLERS=examples.demo_model.quiz:Quiz`; it needs no sandbox.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, Field

from examples.demo_model.task import OPERATORS, make_tasks
from rollout.schema import FinishReason
from rollout.trajectory import Message
from workers.agent.loop import AgentLoop
from workers.agent.tools import BashArgs, Observation, Tool, ToolContext
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, Reward, RunContext

_COMMAND = re.compile(r"echo \$\(\((\d+)([-+*/])(\d+)\)\)")


class QuizTask(BaseModel):
    questions: list[Annotated[str, Field(max_length=40)]] = Field(min_length=1, max_length=16)
    answers: list[Annotated[str, Field(pattern=r"^-?\d+$")]] = Field(min_length=1, max_length=16)


def make_quizzes(n: int, questions: int, seed: int) -> list[dict[str, list[str]]]:
    """So many tasks of so many questions; the same seed gives the same."""
    drawn = make_tasks(n * questions, seed)
    parts = [drawn[i : i + questions] for i in range(0, len(drawn), questions)]
    return [{f"{name}s": [task[name] for task in part] for name in ("question", "answer")} for part in parts]


def computed(command: str) -> str | None:
    """What bash would print; None where it is no call of the demo model's."""
    match = _COMMAND.fullmatch(command.strip())
    if match is None or (match[2] == "/" and int(match[3]) == 0):
        return None
    by_symbol = dict(OPERATORS.values())
    return str(by_symbol[match[2]](int(match[1]), int(match[3])))


class Ask(Tool):
    """In the place of bash: asks the next question, which is told by the turns of its one rollout."""

    name = "execute_bash"
    description = "Works the command out, and asks the next question."
    Args = BashArgs

    def __init__(self, agent: AgentLoop, questions: list[str]) -> None:
        self._agent, self._questions = agent, questions

    async def call(self, args: BashArgs, ctx: ToolContext) -> Observation:
        turn = self._agent.trajectory.turns
        last = turn >= len(self._questions)
        return Observation("done" if last else self._questions[turn], finished=last)


class Quiz(AgentHandler[QuizTask]):
    """Questions of the calculator, asked one by one; reward: the share of right ones."""

    name = "quiz"
    repeatable = EVERY_STAGE
    Task = QuizTask
    advertise_tools = False

    def prompt(self, task: QuizTask) -> list[Message]:
        return [Message(role="user", content=task.questions[0])]

    async def run(self, ctx: RunContext[QuizTask]) -> FinishReason:
        return await ctx.agent.run(self.prompt(ctx.task), tools=[Ask(ctx.agent, ctx.task.questions)])

    async def evaluate(self, ctx: EvalContext[QuizTask]) -> Reward:
        said = [message for message in ctx.trajectory.messages if message.role == "assistant"]
        commands = [str(m.tool_calls[0].arguments.get("command")) if m.tool_calls else "" for m in said]
        pairs = zip(commands, ctx.task.answers, strict=False)
        right = sum(computed(command) == answer for command, answer in pairs)
        share = right / len(ctx.task.answers)
        return Reward(share, {"right": share, "all_right": float(share == 1.0)})
