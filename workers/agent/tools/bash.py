"""`execute_bash`: the persistent shell."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sandbox.client import BashResult
from sandbox.errors import SandboxRequestError
from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext, sandbox_of


class BashArgs(Arguments):
    command: str = Field(
        description="The command; several lines are fine. With is_input: text to type (a line end is added), "
        "a key such as `C-c`, `C-d` or `C-z`, or nothing to wait for more output."
    )
    is_input: bool = Field(False, description="Send `command` to the command that is still running.")
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds to wait for the end; without it a silent command is reported earlier.",
    )
    reset: bool = Field(
        False, description="First end all processes and start a fresh shell; `command` may be empty."
    )


class ExecuteBash(Tool):
    """A command in the sandbox's persistent shell."""

    name = "execute_bash"
    aliases = ("bash",)
    description = (
        "Run a command in a persistent bash shell and return what it prints. Directory, variables and "
        "background jobs stay for later commands. A command that asks for input, is silent for long or runs "
        "into its timeout is left running: answer or interrupt it with is_input. Start servers in the "
        "background (`command > log 2>&1 &`)."
    )
    Args = BashArgs

    quiet_timeout_s: ClassVar[float] = 10.0
    """Seconds without output after which a command is left running, unless the model gave a timeout."""

    async def call(self, args: BashArgs, ctx: ToolContext) -> Observation:
        sandbox = sandbox_of(ctx, self)
        timeout = min(args.timeout or ctx.timeout_s, ctx.timeout_s)
        quiet = self.quiet_timeout_s if args.timeout is None else None
        before = ""
        try:
            if args.reset:
                before = describe(await sandbox.reset(), timeout, quiet)
                if args.is_input or not args.command.strip():
                    return Observation(before)
                before += "\n"
            if args.is_input:
                result = await sandbox.send_input(args.command, timeout, quiet_timeout=quiet)
            else:
                result = await sandbox.bash(args.command, timeout, on_timeout="keep", quiet_timeout=quiet)
        except SandboxRequestError as error:
            return Observation(f"{before}Error: {self.name}: {error}")
        return Observation(before + describe(result, timeout, quiet))


def describe(result: BashResult, timeout_s: float, quiet_timeout_s: float | None) -> str:
    """A result as the model reads it: the bare output, then what else is to be known, in brackets."""
    parts = []
    if result.late_output:
        parts += ["[printed in the background meanwhile]", _clean(result.late_output), "[this command]"]
    if result.late_exit_code is not None:
        parts.append(f"[the command before had ended with exit code {result.late_exit_code}]")
    parts.append(_clean(result.output))
    if result.limit_exceeded:
        parts.append(f"[{result.limit_exceeded}]")
    if result.running:
        parts.append(_why_running(result, timeout_s, quiet_timeout_s))
    elif result.suspended:
        parts.append("[stopped: `fg` continues it, `bg` does so in the background]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    if not result.input_sent:
        parts.append("[the command had ended before the input could be sent]")
    if result.shell_restarted:
        parts.append("[the shell ended and was restarted: its state is gone]")
    if result.previous_cwd and result.cwd != result.previous_cwd:
        parts.append(f"[now in {_printable(result.cwd)}]")
    return "\n".join(part for part in parts if part) or "[no output]"


def _why_running(result: BashResult, timeout_s: float, quiet_timeout_s: float | None) -> str:
    if result.waiting_for_input:
        return "[waiting for input: send it with is_input, or C-c to interrupt]"
    if result.timed_out or quiet_timeout_s is None:
        why = f"still running after {timeout_s:g} s"
    else:
        why = f"still running, without output for {quiet_timeout_s:g} s"
    return f"[{why}: wait with is_input and an empty command, send it input, or C-c to interrupt]"


def _clean(text: str) -> str:
    return text.strip("\n")


def _printable(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
