"""`AgentHandler`: what a team writes to bring its own task.

A handler has three parts, one for each stage. The defaults of `init` and `run` boot a sandbox and
let the model call tools in it; most handlers write a task model, a prompt and `evaluate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from rollout.schema import HandlerInfo, Rollout, RolloutRequest, Stage
from rollout.schema import Limits as RolloutLimits
from rollout.summary import summarize
from rollout.trajectory import FinishReason, Message, Trajectory
from sandbox.client import SandboxClient
from sandbox.spec import Limits
from workers.agent.loop import AgentLoop
from workers.agent.others import Asking, Others
from workers.agent.tools import Tool
from workers.errors import HandlerError, TaskError
from workers.sandboxes import Sandboxes

MAX_ARTIFACT_BYTES = 4 << 20
"""Of all artifacts of a rollout together, which are kept in Redis with its trajectory."""

EVERY_STAGE = tuple(Stage)
"""For `AgentHandler.repeatable`."""


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
    roles: dict[str, float] = field(default_factory=dict)
    """Rewards of other policies by their role, where they are not the agent's."""


@dataclass
class Context(Asking, Generic[TaskT]):
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
    artifacts: dict[str, str] = field(default_factory=dict)
    """Texts of RUN and EVAL that are kept in the trajectory, such as a patch; at most 4 MiB in all."""
    sandboxes: Sandboxes = None  # type: ignore[assignment]
    """Boots sandboxes on this node, which end with the rollout."""
    others: Others = None  # type: ignore[assignment]

    @property
    def limits(self) -> RolloutLimits:
        """Bounds of the rollout: turns, tokens, seconds."""
        return self.request.limits


@dataclass
class InitContext(Context[TaskT]):
    """What `init` has; artifacts made there are not kept."""

    survives: Literal["files", "nothing"] | None = None
    """Of this task, where that is not what the handler says; see `AgentHandler.survives`."""


@dataclass
class RunContext(Context[TaskT]):
    agent: AgentLoop = None  # type: ignore[assignment]
    """Drives turns of model and tools, and owns the trajectory."""
    fence: int = 0
    """Of RUN's claim: who writes for the rollout elsewhere does so under it."""
    spent_s: float = 0.0
    """Seconds of `limits.run_timeout_s` that workers before this one have used up."""


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
    repeatable: ClassVar[Collection[Stage]] = ()
    """Stages that another worker may take up, in the same attempt, when one was lost in them. INIT and EVAL
    are done again; of RUN, method `run` is called again and gets what it got, up to the turn that was
    reached. A `run` that is the default may always be."""
    survives: ClassVar[Literal["files", "nothing"]] = "files"
    """What of a sandbox is enough to go on with on another node when its own ends: its files, and
    directory, variables and functions of its shell, or, as where processes count, nothing: then the rollout
    begins anew."""

    @property
    def repeats(self) -> set[Stage]:
        """`repeatable`, and RUN where it is the default."""
        default = type(self).run is AgentHandler.run
        return {Stage(stage) for stage in self.repeatable} | ({Stage.RUN} if default else set())

    async def init(self, ctx: InitContext[TaskT]) -> None:
        """INIT: make everything ready that RUN needs. Default: boot the sandbox, if one is used."""
        if self.uses_sandbox:
            ipython = any(tool.uses_ipython for tool in self.tools)
            await ctx.sandboxes.boot(
                ctx, image=self.image, network=self.network, limits=self.limits, ipython=ipython
            )

    def prompt(self, task: TaskT) -> list[Message]:
        """The messages the model starts from; used by the default `opening`."""
        raise NotImplementedError(f"handler {self.name!r} defines neither `prompt` nor `run`")

    async def opening(self, ctx: RunContext[TaskT]) -> list[Message]:
        """The messages a rollout starts from, by whomever it is driven. Default: `prompt` of the task."""
        return self.prompt(ctx.task)

    async def warm(self, ctx: RunContext[TaskT]) -> None:
        """Begin what EVAL would wait for, before the turns, whoever drives them. Default: nothing."""

    async def run(self, ctx: RunContext[TaskT]) -> FinishReason:
        """RUN: the turns. Default: `warm`, then the agent loop with the handler's tools, from `prompt`."""
        await self.warm(ctx)
        compacts = type(self).compact is not AgentHandler.compact
        compact = partial(self.compact, ctx) if compacts else None
        return await ctx.agent.run(await self.opening(ctx), sandbox=ctx.sandbox, compact=compact)

    async def compact(self, ctx: RunContext[TaskT], trajectory: Trajectory) -> list[Message] | None:
        """Messages to go on from in a new, shorter chain, when the context has no room for another turn.

        `trajectory.messages` is the history, `trajectory.unread` the observations that did not fit.
        None (the default): the rollout ends with `context_length` and is scored.
        """
        return None

    @abstractmethod
    async def evaluate(self, ctx: EvalContext[TaskT]) -> Reward:
        """EVAL: the score. Called for every trajectory that RUN ended, partial ones included."""

    # -- when something went wrong -------------------------------------------------------------

    async def on_init_error(self, ctx: InitContext[TaskT], error: Exception) -> None:
        """`init` raised. Raise one of `workers.errors` to lay the failure elsewhere; else `error` stands."""

    async def on_run_error(self, ctx: RunContext[TaskT], error: Exception) -> FinishReason | None:
        """`run` raised. A `FinishReason` has what was reached scored; None (the default): the rollout fails.

        What another attempt may mend (a backend's or a sandbox's failure) is retried whatever this answers.
        """
        return None

    async def on_eval_error(self, ctx: EvalContext[TaskT], error: Exception) -> Reward | None:
        """`evaluate` raised. A `Reward` stands in for the score; None (the default): the rollout fails.

        Only for what the agent brought about: a scorer that could not judge has no reward, and what another
        attempt may mend is retried whatever this answers.
        """
        return None

    # -- numbers -------------------------------------------------------------------------------

    def metrics(self, ctx: EvalContext[TaskT], reward: Reward) -> dict[str, float]:
        """Numbers of a scored rollout for its record, added to `ctx.metrics`. Default: none."""
        return {}

    def aggregate_metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Numbers of many ended rollouts of this handler. Default: see `rollout.summary.summarize`."""
        return summarize(rollouts)

    def info(self) -> HandlerInfo:
        """What `GET /v1/handlers` shows."""
        return HandlerInfo(
            name=self.name,
            description=self.description or (type(self).__doc__ or "").strip().split("\n")[0],
            task_schema=self.Task.model_json_schema(),
            uses_sandbox=self.uses_sandbox,
            uses_model=self.uses_model,
            image=self.image,
            repeatable=[stage for stage in Stage if stage in self.repeats],
            survives=self.survives,
            tools=[tool.name for tool in self.tools],
            tool_schemas=[tool.spec() for tool in self.tools] if self.advertise_tools else [],
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
            raise TaskError(f"task.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def check_artifacts(artifacts: dict[str, str], handler: str) -> None:
    """Refuse artifacts that are no texts, or take more than `MAX_ARTIFACT_BYTES` in all; then none is kept.

    Raises:
        HandlerError: It names the artifacts and the size.
    """
    for name, text in list(artifacts.items()):
        if not (isinstance(name, str) and isinstance(text, str)):
            artifacts.clear()
            raise HandlerError(f"{handler}: artifact {name!r} is {type(text).__name__}, not text")
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in artifacts.values())
    if size > MAX_ARTIFACT_BYTES:
        names = ", ".join(artifacts)
        artifacts.clear()
        raise HandlerError(
            f"{handler}: the artifacts {names} have {size} bytes; cut them to {MAX_ARTIFACT_BYTES} in all"
        )
