"""The contract of rollouts: what is asked for, how it is accepted, and what comes of it."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_serializer, model_validator

from rollout.schema.agents import AgentAccess
from rollout.schema.base import (
    DEFAULT_POLICY,
    MAX_INT32,
    MAX_INT53,
    Identifier,
    Items,
    PolicyName,
    Strict,
    Tag,
    TokenId,
    new_id,
)
from rollout.schema.branches import Checkpointing, Origin
from rollout.schema.trajectory import FinishReason, OtherRole, Trajectory

if TYPE_CHECKING:
    from rollout.arrays import Arrays

MAX_ROLLOUTS_PER_CALL = 1000
"""Rollouts that one `POST /v1/rollouts` may create, every request's `n` counted."""


class State(StrEnum):
    """Where a rollout is. The transition table is in `services/state/rollouts/store.py`."""

    QUEUED = "queued"
    INITIALIZING = "initializing"
    READY = "ready"
    RUNNING = "running"
    EVALUATING = "evaluating"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED, State.TIMED_OUT})


class Stage(StrEnum):
    """A step of the pipeline; also the name of its Celery queue."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class Blame(StrEnum):
    """To whom a failure is laid."""

    TASK = "task"
    HANDLER = "handler"
    AGENT = "agent"
    MODEL = "model"
    SANDBOX = "sandbox"
    INFRASTRUCTURE = "infrastructure"
    TIMEOUT = "timeout"


LOWEST_TEMPERATURE = 0.01
"""Below it (but for 0) vLLM takes 0.01 without a word, and so samples from another distribution."""
MAX_SECONDS = 1e9
"""Of a limit: some thirty years, which is none."""


def _check_temperature(value: float) -> float:
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"{value:g} is too low for engines: 0 (the most likely token) or at least 0.01")
    return value


class SamplingParams(Strict):
    """How the engine samples. The defaults give log-probs that a full-vocabulary trainer reproduces.

    What no engine takes is refused here, before anything is enqueued; ids are checked against the model's
    vocabulary only by the engine.
    """

    temperature: Annotated[float, AfterValidator(_check_temperature)] = Field(default=1.0, ge=0.0, le=2.0)
    """0 always takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, le=MAX_INT32)
    """Keep the k most likely tokens; -1 (or 0) keeps all."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    """Most ids sampled in one model call; None = what the context leaves."""
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    """Seed of the first call; each rollout of a group and each turn derives its own from it."""
    stop_token_ids: Items[TokenId] = Field(default_factory=list, max_length=64)
    """End a turn, beside those of the model's chat format."""


class Limits(Strict):
    """Bounds of one rollout. Times are seconds; waiting in a queue counts only against `deadline_s`."""

    max_turns: int = Field(default=30, ge=1, le=1000)
    max_response_tokens: int | None = Field(default=None, ge=1, le=MAX_INT53)
    """Most ids sampled over all turns; None = what the context leaves."""
    max_malformed_calls: int = Field(default=3, ge=1, le=MAX_INT53)
    """Consecutive turns whose every tool call is malformed before the rollout ends."""
    max_repeated_actions: int | None = Field(default=8, ge=2, le=MAX_INT53)
    """Consecutive turns with the same tool calls and the same answers before the rollout ends; None = any
    number."""
    max_attempts: int = Field(default=3, ge=1, le=20)
    """Starts from INIT, the first included, when infrastructure fails."""
    init_timeout_s: float = Field(default=300.0, gt=0, le=MAX_SECONDS)
    run_timeout_s: float = Field(default=1800.0, gt=0, le=MAX_SECONDS)
    eval_timeout_s: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    call_timeout_s: float = Field(default=300.0, gt=0, le=MAX_SECONDS)
    """One model call."""
    tool_timeout_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """One tool call."""
    deadline_s: float = Field(default=4 * 3600.0, gt=0, le=7 * 86400.0)
    """From submission to the end, queues and retries included."""


class Webhook(Strict):
    """Where to say that a rollout has ended; `rollout.verify_webhook` checks what comes."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=2048)]
    include: Literal["trajectory", "summary"] = "summary"
    """Whether the trajectory comes along."""


EXTERNAL = "external"
"""The harness of a program that runs elsewhere."""


class Agent(Strict):
    """A program that drives the turns in place of the service's own loop, by calling the model over HTTP."""

    harness: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    """How it is started: `claude_code`, `codex`, …, `command`; `external` = by the caller, anywhere."""
    command: Items[Annotated[str, Field(max_length=100_000)]] | None = Field(default=None, max_length=256)
    """Of `command`: the program and its arguments; `{instruction}`, `{base_url}`, `{key}` and `{model}` are
    filled in."""
    env: dict[str, Annotated[str, Field(max_length=10_000)]] = Field(default_factory=dict, max_length=64)
    """Further variables of the program's environment."""

    @model_validator(mode="after")
    def _has_command(self) -> Agent:
        if (self.harness == "command") != bool(self.command):
            raise ValueError("`command` is what the harness `command` starts, and belongs to no other")
        return self


_NEW = {"policy": DEFAULT_POLICY, "trained_roles": [], "checkpoints": "never", "agent": None, "origin": None}
"""Words of a request that releases before do not know, with what they have where they say nothing."""


class RolloutRequest(Strict):
    """One task, to be rolled out `n` times as a group."""

    handler: Annotated[str, Field(min_length=1, max_length=64)]
    task: dict[str, Any] = Field(default_factory=dict, max_length=10_000)
    """What the handler works on; its schema is at `GET /v1/handlers`."""
    n: int = Field(default=1, ge=1, le=MAX_ROLLOUTS_PER_CALL)
    id: Identifier | None = None
    """Chosen by the caller, it makes the submission idempotent. With `n` > 1 it names the group
    and the rollouts are `<id>.0` … `<id>.<n-1>`."""
    group_id: Identifier | None = None
    priority: int = Field(default=0, ge=0, le=9)
    """Higher goes first among the tenant's own waiting rollouts; waiting lifts the others in time."""
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    limits: Limits = Field(default_factory=Limits)
    policy: PolicyName = DEFAULT_POLICY
    """Whose backends serve the agent's turns."""
    policy_version: Annotated[str, Field(max_length=128)] | None = None
    """Only backends with this version serve the rollout; None = any."""
    trained_roles: Items[OtherRole] = Field(default_factory=list, max_length=4)
    """Of other policies that the handler calls, whose chains are to be learned from beside the agent's."""
    sandbox_runtime: Annotated[str, Field(max_length=32)] | None = None
    """`apptainer`, `bubblewrap` or `local-unsafe`; None = what the deployment is set to."""
    tags: Items[Tag] = Field(default_factory=list, max_length=16)
    metadata: dict[str, Any] = Field(default_factory=dict, max_length=1000)
    """Handed back untouched."""
    agent: Agent | None = None
    """Who drives the turns; None = the service's own loop, with the handler's tools."""
    webhook: Webhook | None = None
    """Called for each of the `n` rollouts; None = what the deployment is set to."""
    checkpoints: Checkpointing = "never"
    """What is kept of it for forks."""
    origin: Origin | None = None
    """Of a fork; set by the service, see `ForkRequest`."""

    @model_serializer(mode="wrap")
    def _as_before(self, dump):
        """Without words of newer releases where they say nothing: a release that knows none refuses them."""
        fields = dump(self)
        for name, nothing in _NEW.items():
            if getattr(self, name) == nothing:
                fields.pop(name, None)
        return fields

    def rollout_ids(self) -> tuple[str, list[str]]:
        """The group id and the ids of the `n` rollouts."""
        if self.n == 1:
            rollout_id = self.id or new_id()
            return self.group_id or rollout_id, [rollout_id]
        if self.id:
            return self.group_id or self.id, [f"{self.id}.{k}" for k in range(self.n)]
        return self.group_id or new_id(), [new_id() for _ in range(self.n)]


class Submitted(BaseModel):
    """One accepted rollout."""

    id: str
    group_id: str
    state: State
    created: bool
    """False: the same id with the same body was there already."""
    agent: AgentAccess | None = None
    """Of the first attempt, where the harness is `external`; `GET /v1/rollouts/<id>/agent` has later ones."""


class SubmitResponse(BaseModel):
    rollouts: list[Submitted]


class ErrorInfo(BaseModel):
    """What went wrong, where, and who is to blame."""

    blame: Blame
    stage: Stage | None = None
    type: str
    message: str
    traceback: str | None = None


class TimelineEvent(BaseModel):
    """One change of state. `at` is in seconds since the epoch."""

    state: State
    at: float
    attempt: int
    fence: int
    owner: str | None = None


class TimelineNote(BaseModel):
    """Something that happened to a rollout beside its changes of state. `at`: seconds since the epoch."""

    at: float
    attempt: int
    fence: int
    text: str
    """At most 400 bytes."""


class SandboxRecord(BaseModel):
    """The sandbox a rollout ran in, for the trajectory's reader."""

    id: str
    runtime: str
    image: str | None = None
    node: str
    isolation_missing: list[str] = Field(default_factory=list)
    """What this node does not isolate or limit."""
    start_ms: float | None = None


class Rollout(BaseModel):
    """One rollout as the API shows it."""

    id: str
    group_id: str
    index: int
    """Position within its group, from 0."""
    handler: str
    tenant: str = "default"
    """Whose it is: the tenant of the API key that submitted it."""
    state: State
    attempt: int
    """Starts from INIT so far, this one included."""
    resumed: int = 0
    """How often a worker went on with what another one, lost or stopped, had begun."""
    moved: int = 0
    """How often its sandbox's files went to another node, where it went on."""
    request: RolloutRequest
    reward: float | None = None
    """None until scored, and whenever `drop` is set."""
    reward_components: dict[str, float] = Field(default_factory=dict)
    role_rewards: dict[str, float] = Field(default_factory=dict)
    """Of roles that are not the agent's and have a reward of their own, as an opponent has."""
    drop: bool = False
    """True: the sample must not be trained on; `drop_reason` says why."""
    drop_reason: str | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    trajectory: Trajectory | None = None
    """None before RUN, when a summary was asked for, or once it was dropped. One in RUN that is asked for by
    its id has its turns so far; warnings and artifacts come with RUN's end."""
    trajectory_dropped: Literal["acknowledged", "size"] | None = None
    """Why a trajectory that was there is kept no longer; None = it was not dropped."""
    backend: str | None = None
    policy_versions: list[str] = Field(default_factory=list)
    """Versions of the weights that sampled it, in order of first use."""
    sandbox: SandboxRecord | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """Numbers of the handler and of the loop: turns, tokens, tool calls …"""
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds spent at work in `init`, `run`, `eval`, and waiting in `queued`."""
    created_at: float
    updated_at: float
    finished_at: float | None = None
    completion: str | None = None
    """Its place in the order of completion, for good: the cursor after it. None until it has ended."""
    acknowledged_at: float | None = None
    deadline_at: float
    lease_until: float | None = None
    """Until when its worker holds it without another heartbeat (since the epoch); None = nobody holds it."""
    timeline: list[TimelineEvent] = Field(default_factory=list)
    """Its changes of state, the first one first."""
    notes: list[TimelineNote] = Field(default_factory=list)
    """What else happened: its sandbox, its backends, errors of attempts. The first 64 are kept."""

    @cached_property
    def arrays(self) -> Arrays:
        """The trajectory as flat NumPy arrays: views of the answer where it came as msgpack, else copies.

        Raises:
            LookupError: There is no trajectory.
        """
        from rollout.arrays import Arrays

        if self.trajectory is None:
            raise LookupError(
                f"rollout {self.id} came without a trajectory: it has none, or a summary was asked for"
            )
        return Arrays.of(self.trajectory)
