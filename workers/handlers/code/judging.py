"""Runs a solution on the hidden tests in a fresh sandbox and compares outside of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.client import SandboxClient
from workers.errors import InfrastructureError, StageError, TaskError
from workers.handlers.base import EvalContext
from workers.handlers.code.compare import same_output, same_value
from workers.handlers.code.task import Case, CodeTask

RUNNER = Path(__file__).parent / "inside" / "runner.py"
MOST_TIMEOUTS = 3
"""Cases that may run into their limit before the rest is not tried: an endless loop is one in all of them."""
JOB_CHARS = 16 << 20
"""Inputs that go to the sandbox at once."""
OUTPUT_FACTOR = 4
LEAST_OUTPUT = 1 << 20
"""Bytes that a solution may print: so much, or so many times what is expected."""
MARGIN_S = 30.0
"""On top of the cases' own limits: starting Python, and ending what a solution left running."""
HARMLESS = "print(0)\n"
PYTHON = "python3"
READY = "runner ready"
"""Said by the runner before the solution can do anything about it."""


class NoPython(TaskError):
    """The image has no python3."""


@dataclass
class Result:
    """What became of one case."""

    status: str
    """`passed`, `wrong`, `error`, `timeout`, `output` (too much of it), `killed` (the runner or the sandbox
    ended), `skipped` (after too many time-outs)."""
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
    await box.write_file(f"{here}/runner.py", RUNNER.read_bytes())
    await box.write_file(f"{here}/solution.py", solution)
    results: list[Result] = []
    timeouts = 0
    for batch in _batches(task.tests):
        while batch:
            if timeouts >= MOST_TIMEOUTS:
                results += [Result("skipped")] * len(batch)
                break
            found = await _run(box, here, task, batch, MOST_TIMEOUTS - timeouts)
            results += found
            timeouts += sum(one.status in ("timeout", "killed") for one in found)
            batch = batch[len(found) :]
    return results


def _batches(cases: list[Case]) -> Iterator[list[Case]]:
    batch: list[Case] = []
    size = 0
    for case in cases:
        length = len(case.stdin or "") + (len(json.dumps(case.args)) if case.is_call else 0)
        if batch and size + length > JOB_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(case)
        size += length
    yield batch


async def _run(
    box: SandboxClient, here: str, task: CodeTask, cases: list[Case], most_timeouts: int
) -> list[Result]:
    """Results of the first of the cases, at least of one."""
    wanted = max(len((case.stdout or "").encode()) for case in cases)
    job = {
        "solution": f"{here}/solution.py",
        "fn_name": task.fn_name if cases[0].is_call else None,
        "time_limit_s": task.time_limit_s,
        "memory_limit_mb": task.memory_limit_mb,
        "output_limit": max(LEAST_OUTPUT, OUTPUT_FACTOR * wanted),
        "most_timeouts": most_timeouts,
        "inputs": [case.args if case.is_call else case.stdin for case in cases],
    }
    await box.write_file(f"{here}/job.json", json.dumps(job))
    limit = MARGIN_S + task.time_limit_s * len(cases)
    command = f"rm -f {here}/results; {PYTHON} {here}/runner.py {here}/job.json {here}/results"
    ended = await box.bash(command, timeout=limit)
    if ended.exit_code == 127:
        raise NoPython(f"the image has no python3 to run solutions with: {ended.output[-200:]}")
    if READY not in ended.output:
        raise InfrastructureError(
            f"the runner did not start (exit code {ended.exit_code}): {ended.output[-500:]}"
        )
    lines = await _lines(box, f"{here}/results")
    results = [_verdict(line, case) for line, case in zip(lines, cases, strict=False)]
    if len(results) < len(cases):
        # The case under way took the runner along: it killed everything, or the sandbox's limits did.
        results.append(Result("killed", detail=(ended.limit_exceeded or ended.output)[-500:]))
    return results


async def _lines(box: SandboxClient, path: str) -> list[dict[str, Any]]:
    there = await box.bash(f"test -f {path}", timeout=30)
    if there.exit_code != 0:
        return []
    lines = []
    for line in (await box.read_file(path)).decode("utf-8", "replace").splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            break
        if not isinstance(data, dict):
            break
        lines.append(data)
    return lines


def _verdict(line: dict[str, Any], case: Case) -> Result:
    status = str(line.get("status"))
    if status == "ok":
        status = "passed" if _right(line, case) else "wrong"
    seconds = line.get("seconds")
    return Result(
        status,
        float(seconds) if isinstance(seconds, int | float) else 0.0,
        str(line.get("stderr", ""))[-500:],
    )


def _right(line: dict[str, Any], case: Case) -> bool:
    if case.is_call:
        accepted = [case.expected, *(case.any_of or [])]
        return "value" in line and any(same_value(line["value"], one) for one in accepted)
    return isinstance(line.get("stdout"), str) and same_output(line["stdout"], case.stdout or "")
