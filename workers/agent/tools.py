"""Tools that a model may call. A tool knows its schema and how to act; it knows nothing of the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox.client import SandboxClient


@dataclass(frozen=True)
class Observation:
    """What a tool answers to the model."""

    text: str
    finished: bool = False
    """True: the agent asked to end the rollout."""


@dataclass(frozen=True)
class ToolContext:
    """What a tool may use."""

    sandbox: SandboxClient | None
    timeout_s: float
    """Most seconds one call may take."""


class Arguments(BaseModel):
    """Arguments of a call; unknown ones are told to the model."""

    model_config = ConfigDict(extra="forbid")


class Tool(ABC):
    """One tool. Subclass it with a name, a description for the model and an `Args` model."""

    name: ClassVar[str]
    description: ClassVar[str]
    Args: ClassVar[type[BaseModel]] = Arguments

    @abstractmethod
    async def call(self, args: Any, ctx: ToolContext) -> Observation:
        """Act on validated arguments. An exception fails the rollout, so answer what is the model's
        own fault as text."""

    async def __call__(self, arguments: dict[str, Any], ctx: ToolContext) -> Observation:
        """Validate and act; arguments that do not fit are answered to the model."""
        try:
            args = self.Args.model_validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "arguments"
            return Observation(f"Error: {self.name}: {where}: {first['msg']}")
        return await self.call(args, ctx)

    def spec(self) -> dict[str, Any]:
        """The tool as chat templates take it (function-calling form)."""
        schema = self.Args.model_json_schema()
        schema.pop("title", None)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


class BashArgs(Arguments):
    command: str
    timeout: float | None = None


class ExecuteBash(Tool):
    """A command in the sandbox's persistent shell."""

    name = "execute_bash"
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


class FinishArgs(Arguments):
    message: str = ""


class Finish(Tool):
    """Ends the rollout by the agent's own wish."""

    name = "finish"
    description = "End the task with a final message."
    Args = FinishArgs

    async def call(self, args: FinishArgs, ctx: ToolContext) -> Observation:
        return Observation(args.message, finished=True)
