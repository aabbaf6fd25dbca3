"""A policy whose rollouts differ: the fake engine's `--script tests.helpers.page_policy:play`.

As `policy_script`, but a plan has several variants: each rollout that begins takes the next one, and goes on
with the one whose turns it has said so far. And the handler of such rollouts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from pydantic import BaseModel

from rollout.trajectory import Message
from tests.helpers.policy_script import plan_of
from workers.agent.replay import Action, Call, encode
from workers.agent.tools import ExecuteBash, Finish, Think
from workers.handlers.base import AgentHandler, EvalContext, InitContext, Reward

VARIABLE = "TEST_PAGE_PLANS"
_NAME = re.compile(r"Task ([a-z0-9-]+):")
_TURN = "<|im_start|>assistant\n"
_begun: Counter[str] = Counter()


CODE = """def twice(x):
    return x + x + 1


def half(x):
    return x // 2
"""
TESTS = """import unittest
from calc import half, twice


class Calc(unittest.TestCase):
    def test_twice(self):
        self.assertEqual(twice(2), 4)

    def test_twice_of_nothing(self):
        self.assertEqual(twice(0), 0)

    def test_half(self):
        self.assertEqual(half(4), 2)

    def test_half_of_an_odd_number(self):
        self.assertEqual(half(5), 2)
"""
CHECK = "python3 -m unittest -v 2>&1"


class MendTask(BaseModel):
    prompt: str
    rewards: list[float] | None = None
    """Of the members of a group, in turn; None = the share of tests that pass."""


class Mend(AgentHandler[MendTask]):
    """Mends a small program in a sandbox as its plan says; leaves what it has changed."""

    name = "mend"
    Task = MendTask
    tools = (ExecuteBash(), Think(), Finish())
    uses_sandbox = True
    advertise_tools = False

    async def init(self, ctx: InitContext[MendTask]) -> None:
        await super().init(ctx)
        for name, text in (("calc.py", CODE), ("test_calc.py", TESTS)):
            await ctx.sandbox.write_file(name, text)
            await ctx.sandbox.write_file(f"/tmp/before/{name}", text)

    def prompt(self, task: MendTask) -> list[Message]:
        system = "You mend small programs. Look first, change little, and run the tests."
        return [Message(role="system", content=system), Message(role="user", content=task.prompt)]

    async def evaluate(self, ctx: EvalContext[MendTask]) -> Reward:
        tested = await ctx.sandbox.bash(CHECK, timeout=60)
        passed = tested.output.count("... ok") / TESTS.count("def test_")
        changed = await ctx.sandbox.bash(
            "diff -u --label a/calc.py --label b/calc.py /tmp/before/calc.py calc.py", 60
        )
        ctx.artifacts["patch.diff"] = changed.output
        ctx.artifacts["tests.txt"] = tested.output
        rewards = ctx.task.rewards
        return Reward(
            rewards[ctx.index % len(rewards)] if rewards else passed, {"tests": passed, "style": 0.25}
        )


def use(tool: str, content: str = "", **arguments: object) -> Action:
    """A turn that calls one tool."""
    return Action(content=content, tool_calls=[Call(name=tool, arguments=arguments)])


def bash(command: str, content: str = "") -> Action:
    """A turn that runs a command."""
    return use("execute_bash", content, command=command)


def write_plan(directory: Path, name: str, *variants: list[Action]) -> str:
    """Write a plan; returns the words that a prompt begins with, by which it is found."""
    data = [[action.model_dump() for action in variant] for variant in variants]
    (directory / f"{name}.json").write_text(json.dumps(data))
    return f"Task {name}:"


def play(prompt: list[int], call_number: int) -> list[int]:
    """All ids of the turn that is due, its stop id included; behind the last action an empty turn."""
    codec, text, name, data = plan_of(prompt, _NAME, VARIABLE)
    variants = [[Action.model_validate(action) for action in variant] for variant in data]
    *said, _ = text.split(_TURN)[1:] or [""]
    if not said:
        _begun[name] += 1
        fitting = [variants[(_begun[name] - 1) % len(variants)]]
    else:
        fitting = [variant for variant in variants if _begins(variant, said)]
    actions = fitting[0] if fitting else []
    return encode(actions[len(said)] if len(said) < len(actions) else Action(), codec, prompt)


def _begins(variant: list[Action], said: list[str]) -> bool:
    return len(variant) >= len(said) and all(
        turn.startswith(action.text) for action, turn in zip(variant, said, strict=False)
    )


all_handlers = [Mend]
