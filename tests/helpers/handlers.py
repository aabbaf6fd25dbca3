"""Handlers that go wrong on purpose, one way each."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pydantic import BaseModel

from rollout.trajectory import FinishReason, Message
from sandbox.spec import Limits
from workers.agent.tools import ExecuteIPythonCell, StrReplaceEditor, ToolContext
from workers.handlers.base import AgentHandler, EvalContext, InitContext, Reward, RunContext
from workers.scoring import score


class FaultTask(BaseModel):
    stage: str
    """Where it happens: init, run or eval."""
    how: str = "raise"
    """`raise`, `hang`, `timeout` (raises TimeoutError), `cancel` (its own)."""


class Faulty(AgentHandler[FaultTask]):
    """Fails in the stage it is told, with a sandbox in hand."""

    name = "faulty"
    Task = FaultTask
    uses_model = False
    uses_sandbox = True

    async def _go_wrong(self, stage: str, task: FaultTask) -> None:
        if task.stage != stage:
            return
        if task.how == "hang":
            await asyncio.sleep(3600)
        if task.how == "timeout":
            raise TimeoutError("something inside took too long")
        if task.how == "cancel":
            raise asyncio.CancelledError
        if task.how == "raise":
            raise ValueError(f"broken on purpose in {stage}")

    async def init(self, ctx: InitContext[FaultTask]) -> None:
        await super().init(ctx)
        await self._go_wrong("init", ctx.task)

    async def run(self, ctx: RunContext[FaultTask]) -> FinishReason:
        await self._go_wrong("run", ctx.task)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[FaultTask]) -> Reward:
        await self._go_wrong("eval", ctx.task)
        return Reward(1.0)


class BadImage(AgentHandler):
    """Asks for an image that is not there."""

    name = "bad_image"
    uses_model = False
    uses_sandbox = True
    image = "no-such-image"

    async def run(self, ctx: RunContext) -> FinishReason:
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext) -> Reward:
        return Reward(1.0)


class Unready(AgentHandler):
    """Fails in INIT, before there is a sandbox."""

    name = "unready"

    async def init(self, ctx: InitContext) -> None:
        raise ValueError("broken on purpose in init")

    async def evaluate(self, ctx: EvalContext) -> Reward:
        return Reward(1.0)


class SleepTask(BaseModel):
    command: str = "sleep 600"


class InTool(AgentHandler[SleepTask]):
    """Runs one command in the sandbox for as long as it takes."""

    name = "in_tool"
    Task = SleepTask
    uses_model = False
    uses_sandbox = True

    async def run(self, ctx: RunContext[SleepTask]) -> FinishReason:
        result = await ctx.sandbox.bash(ctx.task.command, timeout=600)
        ctx.metrics["exit_code"] = result.exit_code if result.exit_code is not None else -1
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[SleepTask]) -> Reward:
        # The same shell as in RUN: its working directory has stayed.
        return Reward(1.0, {"cwd_kept": float((await ctx.sandbox.bash("pwd", timeout=10)).exit_code == 0)})


class Greedy(AgentHandler):
    """Fills its disk again and again, whatever it is told."""

    name = "greedy"
    uses_model = False
    uses_sandbox = True
    limits = Limits(disk_mb=20)

    async def run(self, ctx: RunContext) -> FinishReason:
        while True:
            await ctx.sandbox.bash(
                "for i in 1 2 3 4 5; do head -c 10M /dev/zero >$RANDOM; done; sleep 60", 60
            )

    async def evaluate(self, ctx: EvalContext) -> Reward:
        return Reward(1.0)


class Notebook(AgentHandler):
    """Computes in the IPython kernel, which is started ahead, and edits a file."""

    name = "notebook"
    uses_model = False
    uses_sandbox = True
    tools = (ExecuteIPythonCell(), StrReplaceEditor())

    async def run(self, ctx: RunContext) -> FinishReason:
        tools = ToolContext(ctx.sandbox, 60)
        cell, editor = self.tools
        await editor({"command": "create", "path": "/workspace/x.py", "file_text": "answer = 41\n"}, tools)
        edit = {"command": "str_replace", "path": "/workspace/x.py", "old_str": "41", "new_str": "42"}
        await editor(edit, tools)
        output = await cell({"code": "from x import answer; answer"}, tools)
        ctx.metrics["answer"] = float(output.text)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext) -> Reward:
        return Reward(1.0)


class DigitsTask(BaseModel):
    digits: int
    """Length of the prompt: the demo tokenizer gives each digit an id of its own."""


class Digits(AgentHandler[DigitsTask]):
    """Talks to the model without a sandbox or tools; the prompt is as long as it is told."""

    name = "digits"
    Task = DigitsTask

    def prompt(self, task: DigitsTask) -> list[Message]:
        return [Message(role="user", content="1" * task.digits)]

    async def evaluate(self, ctx: EvalContext[DigitsTask]) -> Reward:
        return Reward(0.5)


class TalkTask(BaseModel):
    text: str
    turns: int = 4
    max_tokens: int = 64


class Talker(AgentHandler[TalkTask]):
    """A conversation of a given number of turns, whatever the model says; no sandbox, no tools."""

    name = "talker"
    Task = TalkTask

    async def run(self, ctx: RunContext[TalkTask]) -> FinishReason:
        await ctx.agent.start([Message(role="user", content=ctx.task.text)])
        for number in range(ctx.task.turns):
            _, completion = await ctx.agent.query(ctx.task.max_tokens)
            if completion.finish_reason == "length":
                return FinishReason.LENGTH
            if number + 1 < ctx.task.turns:
                ctx.agent.append([Message(role="user", content=f"and then {number}?")])
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[TalkTask]) -> Reward:
        return Reward(float(ctx.trajectory.turns))


class Chatty(AgentHandler):
    """Writes to the log, by itself and through a library."""

    name = "chatty"
    uses_model = False

    async def run(self, ctx: RunContext) -> FinishReason:
        ctx.log.info("handler says")
        logging.getLogger("library").warning("library says")
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext) -> Reward:
        return Reward(1.0)


class JudgedTask(BaseModel):
    function: str
    """`package.module:function` that gives `{"sum": …}`, or goes wrong."""
    payload: Any = None


class Judged(AgentHandler[JudgedTask]):
    """The reward is what a function in a scorer process says."""

    name = "judged"
    Task = JudgedTask
    uses_model = False

    async def run(self, ctx: RunContext[JudgedTask]) -> FinishReason:
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[JudgedTask]) -> Reward:
        verdict = await score(ctx.task.function, ctx.task.payload, timeout_s=120)
        return Reward(float(verdict["sum"]))


class Questioned(Judged):
    """As `judged`, after the model was asked what is in the payload."""

    name = "questioned"
    uses_model = True
    run = AgentHandler.run

    def prompt(self, task: JudgedTask) -> list[Message]:
        return [Message(role="user", content=task.payload)]


class LotteryTask(BaseModel):
    rewards: list[float]
    """Those of the members of a group, in turn."""
    run_s: float = 0.0
    number: int = 0


class Lottery(AgentHandler[LotteryTask]):
    """Gives each member of a group the reward that is its turn's; no model, no sandbox."""

    name = "lottery"
    Task = LotteryTask
    uses_model = False

    async def run(self, ctx: RunContext[LotteryTask]) -> FinishReason:
        await asyncio.sleep(ctx.task.run_s)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[LotteryTask]) -> Reward:
        return Reward(ctx.task.rewards[ctx.index % len(ctx.task.rewards)])


all_handlers = [
    *(Chatty, Judged, Questioned, Faulty, BadImage, Unready, InTool, Greedy, Notebook, Digits, Talker),
    Lottery,
]
