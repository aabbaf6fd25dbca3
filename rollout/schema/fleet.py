"""The wire contract of `GET /v1/fleet`: what works on rollouts, where, and how much of it there is."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from rollout.schema.rollouts import Stage


class StageLoad(BaseModel):
    """One of the stages `init`, `run`, `eval`, over all its workers."""

    workers: int
    """Live worker processes."""
    slots: int
    """Rollouts that they carry at once; a worker of several stages counts in each."""
    busy: int
    """Rollouts that they hold."""
    waiting: int
    """Rollouts that wait for the stage."""
    ended: int
    """Times that the stage ended since Redis was set up; only grows."""
    seconds: float
    """What these took, added up."""


class WorkerLoad(BaseModel):
    """A live worker process, as it announced itself in the last 15 s."""

    name: str
    node: str
    stages: list[str]
    slots: int
    slots_limit: int
    """What `celery control set_slots` may give it."""
    busy: int
    """Rollouts it worked on then."""


class NodeLoad(BaseModel):
    """A node with live workers, or whose sandbox host was heard of."""

    node: str
    stages: list[str]
    slots: int
    """Of all its workers."""
    busy: int
    sandboxes: int | None = None
    """Sandboxes of rollouts; None: no sandbox host was heard of."""
    warm: int | None = None
    """Sandboxes that are started and wait for a rollout."""
    free_disk: int | None = None
    """Bytes left where sandboxes write; None: no INIT worker says."""
    free_memory: int | None = None
    """Bytes that the node, or the job's cgroup, can still give."""
    stopped: list[str] = Field(default_factory=list)
    """Why INIT takes nothing there, a sentence each; empty while there is room."""
    waits_for_run: bool = False
    """INIT is far enough ahead of RUN there."""


class Fleet(BaseModel):
    """The service at one moment. Counters only grow, so two of these make a rate."""

    at: float
    """The gateway's clock, seconds since the epoch."""
    states: dict[str, int]
    """Rollouts by state; those of terminal states only grow."""
    stages: dict[str, StageLoad]
    workers: list[WorkerLoad]
    nodes: list[NodeLoad]
    oldest_s: dict[str, float]
    """Live state → age of its oldest rollout, since its submission."""
    reaper_lag_s: float
    """How late the look at what is overdue is; grows when no worker reaps."""
    leases_lost: int
    """Rollouts whose worker died, hung or was cut off; only grows."""


class HandlerInfo(BaseModel):
    """What a handler does and takes, as the workers announced it."""

    name: str
    description: str = ""
    task_schema: dict[str, Any] = Field(default_factory=dict)
    """JSON Schema of `RolloutRequest.task`."""
    uses_sandbox: bool = False
    uses_model: bool = True
    image: str | None = None
    """Image of its sandbox; None = the deployment's default, or the `image` of the task where it has one."""
    repeatable: list[Stage] = Field(default_factory=list)
    """Stages that a worker goes on with, in the same attempt, when another one was lost in them."""
    survives: Literal["files", "nothing"] = "files"
    """What of a sandbox is enough to go on with on another node."""
    tools: list[str] = Field(default_factory=list)
    tool_schemas: list[dict[str, Any]] = Field(default_factory=list)
    """Those that the prompt describes, in the format of chat completions."""
