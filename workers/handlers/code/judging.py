"""Runs a solution on the hidden tests in a fresh sandbox and compares outside of it.

Each case is a program that the sandbox's server starts, times and ends (`exec`): no process of ours is inside
that a solution could stop, kill or imitate.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.client import ExecResult, SandboxClient
from workers.errors import StageError, TaskError
from workers.handlers.base import EvalContext
from workers.handlers.code.compare import same_output, same_value
from workers.handlers.code.task import Case, CodeTask

CALL = Path(__file__).parent / "inside" / "call.py"
MOST_TIMEOUTS = 3
"""Cases that may run into their limit before the rest is not tried: an endless loop is one in all of them."""
OUTPUT_FACTOR = 4
LEAST_OUTPUT = 1 << 20
"""Bytes that a solution may print: so much, or so many times what is expected."""
CPU_SLACK_S = 2
MIB = 1 << 20
DETAIL_CHARS = 500
HARMLESS = "print(0)\n"
PYTHON = "python3"


class NoPython(TaskError):
    """The image has no python3."""


@dataclass
class Result:
    """What became of one case."""

    status: str
    """`passed`, `wrong`, `error`, `timeout`, `output` (too much of it), `killed` (the sandbox was over its
    limits, or ended), `skipped` (after too many time-outs)."""
    seconds: float = 0.0
    detail: str = ""
    """The end of what it said on standard error."""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


async def judge(
    ctx: EvalContext[Any], task: CodeTask, solution: str, image: str | None = None
) -> list[Result]:
    """The result of every case, in their order.

    A sandbox that dies under the solution is not taken for the solution's fault until a second one did so
    too, and a third one ran something harmless.

    Raises:
        NoPython: The image cannot run any solution.
        StageError: The sandbox failed, and not because of the solution.
    """
    for attempt in (1, 2):
        try:
            async with ctx.sandboxes.fresh(ctx, image=image) as box:
                return await _cases(box, task, solution)
        except NoPython:
            raise
        except StageError as error:
            ctx.log.warning("a sandbox ended under a solution", attempt=attempt, error=str(error))
    async with ctx.sandboxes.fresh(ctx, image=image) as box:
        await _cases(box, task.model_copy(update={"tests": task.tests[:1]}), HARMLESS)
    return [Result("killed", detail="two sandboxes ended under it")] * len(task.tests)


async def _cases(box: SandboxClient, task: CodeTask, solution: str) -> list[Result]:
    here = f"/tmp/judge-{secrets.token_hex(8)}"
    await box.write_file(f"{here}/solution.py", solution)
    await box.write_file(f"{here}/call.py", CALL.read_bytes())
    started = await box.exec([PYTHON, "-c", ""])
    if started.not_started:
        raise NoPython(f"the image has no python3 to run solutions with: {started.not_started}")
    results: list[Result] = []
    overruns = 0
    for case in task.tests:
        if overruns >= MOST_TIMEOUTS:
            results.append(Result("skipped"))
            continue
        done = await _run(box, here, task, case)
        overruns += done.timed_out or done.limit_exceeded is not None
        results.append(_verdict(done, case))
    return results


async def _run(box: SandboxClient, here: str, task: CodeTask, case: Case) -> ExecResult:
    expected = json.dumps([case.expected, case.any_of]) if case.is_call else case.stdout or ""
    output = max(LEAST_OUTPUT, OUTPUT_FACTOR * len(expected.encode("utf-8", "replace")))
    if case.is_call:
        argv = [PYTHON, f"{here}/call.py", f"{here}/solution.py", str(task.fn_name)]
        given = json.dumps(case.args)
    else:
        argv, given = [PYTHON, f"{here}/solution.py"], case.stdin or ""
    return await box.exec(
        argv,
        task.time_limit_s,
        stdin=given.encode("utf-8", "replace"),
        limits={
            "memory_mb": task.memory_limit_mb,
            "cpu_s": int(task.time_limit_s) + CPU_SLACK_S,
            "file_mb": -(-output // MIB),
        },
        max_output_chars=output,
    )


def _verdict(done: ExecResult, case: Case) -> Result:
    if done.limit_exceeded:
        return Result("killed", round(done.wall_s, 3), done.limit_exceeded[-DETAIL_CHARS:])
    detail = done.not_started or done.stderr
    if done.truncated:
        status = "output"
    elif done.timed_out:
        status = "timeout"
    elif done.exit_code != 0:
        status = "error"
    elif not case.is_call:
        status = "passed" if same_output(done.stdout, case.stdout or "") else "wrong"
    else:
        try:
            value = json.loads(done.stdout)
        except (ValueError, RecursionError):
            status, detail = "error", "the function gave no result, or none that JSON carries"
        else:
            accepted = [case.expected, *(case.any_of or [])]
            status = "passed" if any(same_value(value, option) for option in accepted) else "wrong"
    return Result(status, round(done.wall_s, 3), detail[-DETAIL_CHARS:])
