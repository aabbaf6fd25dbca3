"""Programming problems with hidden tests: `code` (with a sandbox to work in) and `code_text` (without)."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter

from rollout.trajectory import Message
from sandbox.errors import SandboxRequestError
from workers.agent.tools import ExecuteBash, Finish, StrReplaceEditor, Think
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, Reward, RunContext
from workers.handlers.code.judging import Result, judge
from workers.handlers.code.task import Case, CodeTask
from workers.handlers.oracle import Hidden

__all__ = ["Case", "Code", "CodeTask", "CodeText"]

SOLUTION = "/workspace/solution.py"
MAX_SOLUTION_CHARS = 1 << 20
MOST_HIDDEN = 20
"""Solutions, and tests, that are looked for in a sandbox where none must be."""
_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)

STDIN = "The program reads standard input and prints its answer to standard output."
CALL = "Define the function `{name}`; it is called with the arguments of each test and returns the answer."
WORK = """Write your solution in Python 3 to {path}, and test it here: you have a Linux sandbox.
Hidden tests, {seconds:g} s and {memory} MB each, decide about the file as it is when you are done."""
SAY = """Answer with your solution in Python 3, as one block of code between ```python and ```.
Hidden tests, {seconds:g} s and {memory} MB each, decide."""


def _problem(task: CodeTask) -> str:
    name = task.fn_name if task.tests[0].is_call else None
    parts = [task.prompt.strip(), CALL.format(name=name) if name else STDIN]
    if task.starter_code.strip():
        parts.append(f"Begin with:\n```python\n{task.starter_code.strip()}\n```")
    return "\n\n".join(parts)


def last_block(text: str) -> str:
    """The last block of code in a text, or "" where there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else ""


def is_python(text: str) -> bool:
    """Whether a text is a program of Python 3; published solutions are of any release."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class CodeText(AgentHandler[CodeTask]):
    """Programming problems: the last block of code of the answer is run on hidden tests."""

    name = "code_text"
    repeatable = EVERY_STAGE
    Task = CodeTask

    def prompt(self, task: CodeTask) -> list[Message]:
        how = SAY.format(seconds=task.time_limit_s, memory=task.memory_limit_mb)
        return [Message(role="user", content=f"{_problem(task)}\n\n{how}")]

    async def warm(self, ctx: RunContext[CodeTask]) -> None:
        await ctx.sandboxes.warm(ctx, image=self.image)

    def solution(self, task: CodeTask) -> str | None:
        """The first of the row's solutions that is Python 3, as one block of code; None: it has none."""
        known = next(filter(is_python, task.solutions), None)
        if known is None:
            return None
        lacks_head = task.fn_name and not re.search(rf"\bdef\s+{task.fn_name}\b", known)
        return f"```python\n{task.starter_code if lacks_head else ''}{known.rstrip()}\n```"

    def hidden(self, task: CodeTask) -> list[Hidden]:
        """The solutions, and of each test what goes in and what comes out."""
        texts = {f"solution {number}": text for number, text in enumerate(task.solutions[:MOST_HIDDEN], 1)}
        for number, case in enumerate(task.tests[:MOST_HIDDEN], 1):
            texts[f"test {number}"] = "\n".join(filter(None, (case.stdin, case.stdout)))
        return [Hidden(what, text) for what, text in texts.items()]

    async def submitted(self, ctx: EvalContext[CodeTask]) -> str:
        """What is to be judged; "" = there is nothing."""
        return last_block(ctx.trajectory.final_text())

    async def evaluate(self, ctx: EvalContext[CodeTask]) -> Reward:
        solution = (await self.submitted(ctx))[:MAX_SOLUTION_CHARS]
        if not solution.strip():
            return Reward(0.0, {"answered": 0.0, "passed": 0.0})
        ctx.artifacts["solution.py"] = solution
        results = await judge(ctx, ctx.task, solution, self.image)
        ctx.artifacts["tests.txt"] = _report(results)
        passed = sum(result.passed for result in results) / len(results)
        value = passed if ctx.task.score == "fraction" else float(passed == 1.0)
        return Reward(value, {"answered": 1.0, "passed": passed})

    def metrics(self, ctx: EvalContext[CodeTask], reward: Reward) -> dict[str, float]:
        return {"cases": len(ctx.task.tests)}


class Code(CodeText):
    """Programming problems in a sandbox: /workspace/solution.py is run on hidden tests in another one."""

    name = "code"
    tools = (ExecuteBash(), StrReplaceEditor(), Think(), Finish())
    uses_sandbox = True

    def prompt(self, task: CodeTask) -> list[Message]:
        how = WORK.format(path=SOLUTION, seconds=task.time_limit_s, memory=task.memory_limit_mb)
        return [Message(role="user", content=f"{_problem(task)}\n\n{how}")]

    async def submitted(self, ctx: EvalContext[CodeTask]) -> str:
        """The file, or the last block of code where the agent only said it."""
        assert ctx.sandbox is not None
        try:
            return (await ctx.sandbox.read_file(SOLUTION, MAX_SOLUTION_CHARS)).decode("utf-8", "replace")
        except SandboxRequestError:  # it is not there, no file, or too long to be one
            return await super().submitted(ctx)


def _report(results: list[Result]) -> str:
    """A line for each kind of result, and what the first failure had to say. Shows no hidden test."""
    lines = [
        f"{status}: {count}" for status, count in Counter(result.status for result in results).most_common()
    ]
    failed = next((result for result in results if not result.passed), None)
    if failed is not None:
        number = results.index(failed) + 1
        lines.append(f"the first that failed: case {number}, {failed.status} after {failed.seconds:g} s")
        if failed.detail:
            lines.append(failed.detail)
    return "\n".join(lines)
