"""What a tool is: a name, a schema and a way to act. It knows nothing of the loop that calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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
    call_id: str | None = None
    """Of this call, and the same one where another worker makes it again because the first was lost in it:
    what a tool does outside of the sandbox it can do once by it."""


class Arguments(BaseModel):
    """Arguments of a call; unknown ones are told to the model."""

    model_config = ConfigDict(extra="forbid")


class Tool(ABC):
    """One tool. Subclass it with a name, a description for the model and an `Args` model."""

    name: ClassVar[str]
    description: ClassVar[str]
    aliases: ClassVar[Sequence[str]] = ()
    """Other names a model may call it by, understood but not advertised."""
    Args: ClassVar[type[BaseModel]] = Arguments
    uses_ipython: ClassVar[bool] = False
    """Whether the sandbox shall start its IPython kernel ahead of the first call."""

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
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by every name they are called by; where two claim one, a main name beats an alias.

    Raises:
        ValueError: Two tools have the same main name.
    """
    tools_by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in tools_by_name:
            raise ValueError(f"two tools are named {tool.name!r}; give one another name")
        tools_by_name[tool.name] = tool
    for tool in list(tools_by_name.values()):
        for alias in tool.aliases:
            tools_by_name.setdefault(alias, tool)
    return tools_by_name


def sandbox_of(ctx: ToolContext, tool: Tool) -> SandboxClient:
    """The sandbox of a tool that cannot do without.

    Raises:
        RuntimeError: The handler has not booted one.
    """
    if ctx.sandbox is None:
        raise RuntimeError(f"{tool.name} needs a sandbox: set `uses_sandbox = True` on the handler")
    return ctx.sandbox
