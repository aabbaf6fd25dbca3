"""`AgentHandler`: what a team writes to bring its own task.

A handler has three parts, one for each stage. The defaults of `init` and `run` boot a sandbox and
let the model call tools in it; most handlers write a task model, a prompt and `evaluate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from rollout.schema import HandlerInfo, RolloutRequest
from rollout.trajectory import FinishReason, Message, Trajectory
from sandbox.client import SandboxClient
from sandbox.spec import Limits
from workers.agent.loop import AgentLoop
from workers.agent.tools import Tool
from workers.errors import TaskError
from workers.sandboxes import Sandboxes


class AnyTask(BaseModel):
    """A task without a schema: every field is kept."""

    model_config = ConfigDict(extra="allow")


TaskT = TypeVar("TaskT", bound=BaseModel)


@dataclass
class Reward:
    """The score of a rollout."""

    value: float
    """What the trainer gets."""
    components: dict[str, float] = field(default_factory=dict)
    """Parts of it, for logs and dashboards."""


@dataclass
class Context(Generic[TaskT]):
    """What every stage of a rollout has at hand."""

    rollout_id: str
    group_id: str
    index: int
    """Position within the group, from 0."""
    attempt: int
    task: TaskT
    request: RolloutRequest
    log: structlog.stdlib.BoundLogger
    """Carries the rollout's id, attempt and stage."""
    sandbox: SandboxClient | None = None
    """The rollout's own sandbox, from INIT to the end of EVAL; None where none was booted."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers for the rollout's record; the keys are the handler's own."""


@dataclass
class InitContext(Context[TaskT]):
    sandboxes: Sandboxes = None  # type: ignore[assignment]
    """Boots sandboxes on this node."""


@dataclass
class RunContext(Context[TaskT]):
    agent: AgentLoop = None  # type: ignore[assignment]
    """Drives turns of model and tools, and owns the trajectory."""


@dataclass
class EvalContext(Context[TaskT]):
    trajectory: Trajectory = field(default_factory=Trajectory)
    """What RUN left; partial where a limit ended it."""
    finish_reason: FinishReason | None = None


class AgentHandler(ABC, Generic[TaskT]):
    """One kind of task: how it starts, how the agent works on it, how it is scored.

    One instance serves all rollouts of a worker process at once: keep nothing of a rollout on
    `self`. The methods run on the worker's event loop: CPU-heavy or blocking work belongs into
    `asyncio.to_thread`. An exception fails the rollout with blame `handler`; raise one of
    `workers.errors` to lay it elsewhere.
    """

    name: ClassVar[str]
    """What a request's `handler` says."""
    description: ClassVar[str] = ""
    Task: ClassVar[type[BaseModel]] = AnyTask
    """Schema of a request's `task`; checked by the gateway and again before INIT."""
    tools: ClassVar[Sequence[Tool]] = ()
    """What the model may call."""
    advertise_tools: ClassVar[bool] = True
    """Whether the prompt describes the tools; a model trained on them may not need it."""
    uses_sandbox: ClassVar[bool] = False
    uses_model: ClassVar[bool] = True
    image: ClassVar[str | None] = None
    """Image of the sandbox; None = the deployment's default."""
    network: ClassVar[str] = "none"
    """Network of the sandbox: `none` or `host`."""
    limits: ClassVar[Limits] = Limits()
    """What the sandbox may use; what is left open is the node's default."""

    async def init(self, ctx: InitContext[TaskT]) -> None:
        """INIT: make everything ready that RUN needs. Default: boot the sandbox, if one is used."""
        if self.uses_sandbox:
            ipython = any(tool.uses_ipython for tool in self.tools)
            await ctx.sandboxes.boot(
                ctx, image=self.image, network=self.network, limits=self.limits, ipython=ipython
            )

    def prompt(self, task: TaskT) -> list[Message]:
        """The messages the model starts from; used by the default `run`."""
        raise NotImplementedError(f"handler {self.name!r} defines neither `prompt` nor `run`")

    async def run(self, ctx: RunContext[TaskT]) -> FinishReason:
        """RUN: the turns. Default: the agent loop with the handler's tools, from `prompt`."""
        return await ctx.agent.run(self.prompt(ctx.task), sandbox=ctx.sandbox)

    @abstractmethod
    async def evaluate(self, ctx: EvalContext[TaskT]) -> Reward:
        """EVAL: the score. Called for every trajectory that RUN ended, partial ones included."""

    def info(self) -> HandlerInfo:
        """What `GET /v1/handlers` shows."""
        return HandlerInfo(
            name=self.name,
            description=self.description or (type(self).__doc__ or "").strip().split("\n")[0],
            task_schema=self.Task.model_json_schema(),
            uses_sandbox=self.uses_sandbox,
            uses_model=self.uses_model,
            tools=[tool.name for tool in self.tools],
        )

    def check_task(self, task: dict[str, Any]) -> TaskT:
        """The task as the handler's own model.

        Raises:
            TaskError: It does not fit; the message names the field.
        """
        try:
            return self.Task.model_validate(task)  # type: ignore[return-value]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise TaskError(f"task.{where}: {first['msg']}") from error
