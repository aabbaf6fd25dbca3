"""`execute_ipython_cell`: the persistent IPython kernel."""

from __future__ import annotations

from pydantic import Field

from sandbox.client import IPythonResult
from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext, sandbox_of


class IPythonArgs(Arguments):
    code: str = Field(description="Python code; IPython magics and `!command` work, too.")


class ExecuteIPythonCell(Tool):
    """A cell in the sandbox's IPython kernel."""

    name = "execute_ipython_cell"
    description = (
        "Run a cell of Python in a persistent IPython kernel and return what it prints, displays and "
        "evaluates to. Names and imports stay for later cells; the kernel starts in the same directory as "
        "the shell. `input()` does not work. Images are saved as files and named in the output."
    )
    Args = IPythonArgs
    uses_ipython = True

    async def call(self, args: IPythonArgs, ctx: ToolContext) -> Observation:
        result = await sandbox_of(ctx, self).ipython(args.code, ctx.timeout_s)
        return Observation(describe(result, ctx.timeout_s))


def describe(result: IPythonResult, timeout_s: float) -> str:
    """A cell's result as the model reads it: its output, then what else happened, in brackets."""
    parts = []
    if result.late_output:
        parts += ["[printed by earlier cells meanwhile]", result.late_output.rstrip("\n"), "[this cell]"]
    parts.append(result.output.rstrip("\n"))
    if result.timed_out:
        parts.append(f"[timed out after {timeout_s:g} s and was interrupted]")
    elif result.interrupted:
        parts.append("[interrupted]")
    if result.limit_exceeded:
        parts.append(f"[{result.limit_exceeded}]")
    if result.restarted and result.execution_count is None:
        parts.append("[the kernel died and was restarted: all names and imports are gone]")
    elif result.restarted:
        parts.append("[the kernel had died and was restarted before this cell: earlier names are gone]")
    return "\n".join(part for part in parts if part) or "[no output]"
