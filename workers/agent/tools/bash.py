"""`execute_bash`: the persistent shell."""

from __future__ import annotations

from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext


class BashArgs(Arguments):
    command: str
    timeout: float | None = None


class ExecuteBash(Tool):
    """A command in the sandbox's persistent shell."""

    name = "execute_bash"
    aliases = ("bash",)
    description = "Run a command in a persistent bash shell and return its output."
    Args = BashArgs

    async def call(self, args: BashArgs, ctx: ToolContext) -> Observation:
        if ctx.sandbox is None:
            raise RuntimeError("execute_bash needs a sandbox: set `uses_sandbox = True` on the handler")
        timeout = min(args.timeout or ctx.timeout_s, ctx.timeout_s)
        result = await ctx.sandbox.bash(args.command, timeout=timeout)
        text = result.output.rstrip("\n")
        if result.timed_out:
            text += f"\n[timed out after {timeout:g} s]"
        elif result.exit_code:
            text += f"\n[exit code {result.exit_code}]"
        if result.shell_restarted:
            text += "\n[the shell ended and was restarted: its state is gone]"
        return Observation(text.lstrip("\n"))
