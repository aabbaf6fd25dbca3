"""An agent that keeps a diary in its sandbox: what was done there can be compared with what its record says.

Each turn appends one line, numbered by a variable of the shell and marked with a word that the model draws anew
at each call. So a tool call that ran twice or not at all, a turn that was sampled twice, and a shell that was
not the same one all show in the file.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cache
from typing import Any

from pydantic import BaseModel
from transformers import AutoTokenizer

from rollout.trajectory import Message
from tests.helpers.llm_servers import DEMO_MODEL
from workers.agent.tools import ExecuteBash, Finish
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, Reward

_ASKED = re.compile(r"(\d+) lines, pause ([\d.]+)")
_WRITTEN = re.compile(r"(?m)^wrote \d+$")


class DiaryTask(BaseModel):
    lines: int = 10
    pause_s: float = 0.0
    """What each tool call takes."""


class Diary(AgentHandler[DiaryTask]):
    """Writes so many lines, one a turn; the reward says whether the file is what the trajectory says."""

    name = "diary"
    Task = DiaryTask
    tools = (ExecuteBash(), Finish())
    advertise_tools = False
    uses_sandbox = True
    repeatable = EVERY_STAGE

    def prompt(self, task: DiaryTask) -> list[Message]:
        return [Message(role="user", content=f"{task.lines} lines, pause {task.pause_s}")]

    async def evaluate(self, ctx: EvalContext[DiaryTask]) -> Reward:
        file = (await ctx.sandbox.read_file("diary")).decode() if ctx.task.lines else ""
        ctx.artifacts["diary"] = file
        words = [
            re.search(r"\$n (\w+)", call.arguments["command"])[1]
            for message in ctx.trajectory.messages
            for call in message.tool_calls
            if call.name == "execute_bash"
        ]
        said = [f"{number} {word}" for number, word in enumerate(words, 1)]
        ctx.metrics["lines"] = len(file.splitlines())
        return Reward(float(file.splitlines() == said and len(said) == ctx.task.lines))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(DEMO_MODEL))


def script(prompt: list[int], number: int) -> list[int]:
    """For `fake_engine --script`: the next line, or the end of the diary."""
    text = tokenizer().decode(prompt)
    lines, pause = _ASKED.search(text).groups()
    if len(_WRITTEN.findall(text)) >= int(lines):
        return spoken("finish", {"message": "done"})
    command = f"n=$((n+1)); echo $n {secrets.token_hex(4)} >> diary; sleep {pause}; echo wrote $n"
    return spoken("execute_bash", {"command": command})


def spoken(name: str, arguments: dict[str, str]) -> list[int]:
    """A turn that makes one call."""
    text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return tokenizer().encode(text + "<|im_end|>", add_special_tokens=False)
