"""An agent that keeps a diary in its sandbox: what was done there can be compared with what its record says.

Each turn appends one line, numbered by a variable of the shell and marked with a word that the model draws
anew at each call. So a tool call that ran twice or not at all, a turn that was sampled twice, and a shell
that was not the same one all show in the file.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cache
from pathlib import Path

from pydantic import BaseModel
from tokenizers import Tokenizer

from rollout.trajectory import FinishReason, Message, Trajectory
from tests.helpers.chaos_handlers import Gated
from tests.helpers.llm_servers import DEMO_MODEL
from workers.agent.tools import (
    Arguments,
    ExecuteBash,
    ExecuteIPythonCell,
    Finish,
    Observation,
    Tool,
    ToolContext,
)
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward, RunContext

_ASKED = re.compile(r"(\d+) lines, pause ([\d.]+)(?:, until \S+ is there)?( at a workbench)?")
_ENDS = re.compile(r", until (\S+) is there")
_WRITTEN = re.compile(r"(?m)^wrote \d+$")
_WORD = re.compile(r"(?:\$n|\{n\}) (\w+)")


class DiaryTask(BaseModel):
    lines: int = 10
    pause_s: float = 0.0
    """What each tool call takes."""
    until: str = ""
    """A file: it writes further lines until this is there, so on no machine has it ended before."""


class LineArgs(Arguments):
    command: str = ""


class Diary(AgentHandler[DiaryTask]):
    """Writes so many lines, one a turn; the reward says whether the file is what the trajectory says."""

    name = "diary"
    Task = DiaryTask
    tools = (ExecuteBash(), Finish())
    advertise_tools = False
    uses_sandbox = True
    repeatable = EVERY_STAGE

    def prompt(self, task: DiaryTask) -> list[Message]:
        until = f", until {task.until} is there" if task.until else ""
        return [Message(role="user", content=f"{task.lines} lines, pause {task.pause_s}{until}")]

    def number(self, place: int) -> int:
        """Which number the line at this place has, from 0."""
        return place + 1

    async def evaluate(self, ctx: EvalContext[DiaryTask]) -> Reward:
        file = (await ctx.sandbox.read_file("diary")).decode() if ctx.task.lines else ""
        ctx.artifacts["diary"] = file
        said = [f"{self.number(place)} {word}" for place, word in enumerate(words(ctx.trajectory))]
        as_said = file.splitlines() == said
        ctx.metrics |= {"lines": len(file.splitlines()), "as_said": float(as_said)}
        more = len(said) - ctx.task.lines
        enough = more >= 0 if ctx.task.until else more == 0
        return Reward(float(as_said and enough))


class Workbench(Diary):
    """Writes every other line by IPython, with a number of its own there, beside a job in the background."""

    name = "workbench"
    tools = (ExecuteBash(), ExecuteIPythonCell(), Finish())

    def prompt(self, task: DiaryTask) -> list[Message]:
        (message,) = super().prompt(task)
        return [Message(role="user", content=f"{message.text} at a workbench")]

    def number(self, place: int) -> int:
        return place // 2 + 1

    async def evaluate(self, ctx: EvalContext[DiaryTask]) -> Reward:
        ctx.metrics["jobs"] = len((await ctx.sandbox.bash("jobs -r")).output.splitlines())
        return await super().evaluate(ctx)


class Written(Tool):
    """Says that a line was written."""

    name = "execute_bash"
    description = "Write."
    Args = LineArgs

    async def call(self, args: LineArgs, ctx: ToolContext) -> Observation:
        return Observation(f"wrote {secrets.randbelow(1000)}")


class SpokenDiary(Diary):
    """Has no sandbox: its lines are what was said."""

    name = "spoken_diary"
    tools = (Written(), Finish())
    uses_sandbox = False

    async def evaluate(self, ctx: EvalContext[DiaryTask]) -> Reward:
        return Reward(float(len(words(ctx.trajectory)) == ctx.task.lines))


class GatedTask(DiaryTask):
    gates: str = ""
    """As `chaos_handlers.GatedTask` has it."""


class GatedDiary(Diary):
    """Waits at a gate at the end of INIT and of RUN, and before it scores."""

    name = "gated_diary"
    Task = GatedTask
    _pass = Gated._pass

    async def init(self, ctx: InitContext[GatedTask]) -> None:
        await super().init(ctx)
        await self._pass("init", ctx)

    async def run(self, ctx: RunContext[GatedTask]) -> FinishReason:
        reason = await super().run(ctx)
        await self._pass("run", ctx)
        return reason

    async def evaluate(self, ctx: EvalContext[GatedTask]) -> Reward:
        await self._pass("eval", ctx)
        return await super().evaluate(ctx)


class OnceDiary(GatedDiary):
    """The same where INIT and EVAL are not to be done again."""

    name = "once_diary"
    repeatable = ()


all_handlers = [Diary, SpokenDiary, Workbench, GatedDiary, OnceDiary]


def words(trajectory: Trajectory) -> list[str]:
    """What the model said to write."""
    calls = [call for message in trajectory.messages for call in message.tool_calls]
    commands = [call.arguments.get("command") or call.arguments.get("code", "") for call in calls]
    return [found[1] for command in commands if (found := _WORD.search(command))]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def script(prompt: list[int], number: int) -> list[int]:
    """For `fake_engine --script`: the next line, or the end of the diary."""
    text = tokenizer().decode(prompt, skip_special_tokens=False)
    lines, pause, workbench = _ASKED.search(text).groups()
    written, word, until = len(_WRITTEN.findall(text)), secrets.token_hex(4), _ENDS.search(text)
    if written >= int(lines) and (until is None or Path(until[1]).exists()):
        return spoken("finish", {"message": "done"})
    if workbench and written % 2:
        code = f'n = globals().get("n", 0) + 1; print(f"{{n}} {word}", file=open("diary", "a"), flush=True)'
        code += f'; import time; time.sleep({pause}); print("wrote", n)'
        return spoken("execute_ipython_cell", {"code": code})
    job = "sleep 1000 & " if workbench and not written else ""
    command = f"{job}n=$((n+1)); echo $n {word} >> diary; sleep {pause}; echo wrote $n"
    return spoken("execute_bash", {"command": command})


def spoken(name: str, arguments: dict[str, str]) -> list[int]:
    """A turn that makes one call."""
    text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return tokenizer().encode(text + "<|im_end|>", add_special_tokens=False).ids
