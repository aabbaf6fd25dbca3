"""The wire contract of the HTTP API (pydantic models), shared by gateway, workers and client."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rollout.trajectory import FinishReason, Trajectory

MAX_ROLLOUTS_PER_CALL = 1000
"""Rollouts that one `POST /v1/rollouts` may create, every request's `n` counted."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def _check_id(value: str) -> str:
    if not _ID.fullmatch(value):
        raise ValueError(
            "an id is 1 to 128 characters of letters, digits and . _ : - and starts with a letter or digit"
        )
    return value


Identifier = Annotated[str, AfterValidator(_check_id)]
Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:/=-]+$")]


def new_id() -> str:
    """A UUIDv7 (RFC 9562): globally unique, and sorted by time of creation."""
    millis = time.time_ns() // 1_000_000
    value = (millis & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


class State(StrEnum):
    """Where a rollout is. The transition table is in `services/state/rollouts.py`."""

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


class _Strict(BaseModel):
    """Unknown keys are errors: a misspelt limit must not be ignored in silence."""

    model_config = ConfigDict(extra="forbid")


class SamplingParams(_Strict):
    """How the engine samples. The defaults give log-probs that a full-vocabulary trainer reproduces."""

    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    """Keep the k most likely tokens; -1 (or 0) keeps all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most ids sampled in one model call; None = what the context leaves."""
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    """Seed of the first call; each rollout of a group and each turn derives its own from it."""
    stop_token_ids: list[int] = Field(default_factory=list, max_length=64)


class Limits(_Strict):
    """Bounds of one rollout. Times are seconds; waiting in a queue counts only against `deadline_s`."""

    max_turns: int = Field(default=30, ge=1, le=1000)
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Most ids sampled over all turns; None = what the context leaves."""
    max_malformed_calls: int = Field(default=3, ge=1)
    """Consecutive tool calls that cannot be parsed before the rollout ends."""
    max_attempts: int = Field(default=3, ge=1, le=20)
    """Starts from INIT, the first included, when infrastructure fails."""
    init_timeout_s: float = Field(default=300.0, gt=0)
    run_timeout_s: float = Field(default=1800.0, gt=0)
    eval_timeout_s: float = Field(default=600.0, gt=0)
    call_timeout_s: float = Field(default=300.0, gt=0)
    """One model call."""
    tool_timeout_s: float = Field(default=60.0, gt=0)
    """One tool call."""
    deadline_s: float = Field(default=4 * 3600.0, gt=0, le=7 * 86400.0)
    """From submission to the end, queues and retries included."""


class RolloutRequest(_Strict):
    """One task, to be rolled out `n` times as a group."""

    handler: Annotated[str, Field(min_length=1, max_length=64)]
    task: dict[str, Any] = Field(default_factory=dict)
    """What the handler works on; its schema is at `GET /v1/handlers`."""
    n: int = Field(default=1, ge=1, le=MAX_ROLLOUTS_PER_CALL)
    id: Identifier | None = None
    """Chosen by the caller, it makes the submission idempotent. With `n` > 1 it names the group
    and the rollouts are `<id>.0` … `<id>.<n-1>`."""
    group_id: Identifier | None = None
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    limits: Limits = Field(default_factory=Limits)
    policy_version: Annotated[str, Field(max_length=128)] | None = None
    """Only backends with this version serve the rollout; None = any."""
    sandbox_runtime: Annotated[str, Field(max_length=32)] | None = None
    """`apptainer`, `bubblewrap` or `local-unsafe`; None = what the deployment is set to."""
    tags: list[Tag] = Field(default_factory=list, max_length=16)
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Handed back untouched."""

    def rollout_ids(self) -> tuple[str, list[str]]:
        """The group id and the ids of the `n` rollouts."""
        if self.n == 1:
            rollout_id = self.id or new_id()
            return self.group_id or rollout_id, [rollout_id]
        if self.id:
            return self.group_id or self.id, [f"{self.id}.{k}" for k in range(self.n)]
        return self.group_id or new_id(), [new_id() for _ in range(self.n)]


class SubmitRequest(_Strict):
    """Many requests in one call: all are accepted, or none."""

    requests: list[RolloutRequest] = Field(min_length=1, max_length=MAX_ROLLOUTS_PER_CALL)

    @model_validator(mode="after")
    def _bounded(self) -> SubmitRequest:
        total = sum(request.n for request in self.requests)
        if total > MAX_ROLLOUTS_PER_CALL:
            raise ValueError(
                f"{total} rollouts in one call; at most {MAX_ROLLOUTS_PER_CALL}: send several calls"
            )
        return self


class Submitted(BaseModel):
    """One accepted rollout."""

    id: str
    group_id: str
    state: State
    created: bool
    """False: the same id with the same body was there already."""


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
    state: State
    attempt: int
    """Starts from INIT so far, this one included."""
    request: RolloutRequest
    reward: float | None = None
    """None until scored, and whenever `drop` is set."""
    reward_components: dict[str, float] = Field(default_factory=dict)
    drop: bool = False
    """True: the sample must not be trained on; `drop_reason` says why."""
    drop_reason: str | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    trajectory: Trajectory | None = None
    """None until RUN has ended, or when a summary was asked for."""
    backend: str | None = None
    sandbox: SandboxRecord | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """Numbers of the handler and of the loop: turns, tokens, tool calls …"""
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds spent at work in `init`, `run`, `eval`, and waiting in `queued`."""
    created_at: float
    updated_at: float
    finished_at: float | None = None
    deadline_at: float
    timeline: list[TimelineEvent] = Field(default_factory=list)


class RolloutPage(BaseModel):
    rollouts: list[Rollout]
    cursor: str | None = None
    """Pass it to get the next page; None = there is none."""


class CompletionPage(BaseModel):
    """Rollouts that ended, in the order in which they did."""

    rollouts: list[Rollout]
    cursor: str
    """Pass it to get what ended after these; the same cursor gives the same answer again."""


class HandlerInfo(BaseModel):
    """What a handler does and takes, as the workers announced it."""

    name: str
    description: str = ""
    task_schema: dict[str, Any] = Field(default_factory=dict)
    """JSON Schema of `RolloutRequest.task`."""
    uses_sandbox: bool = False
    uses_model: bool = True
    tools: list[str] = Field(default_factory=list)


class BackendRequest(_Strict):
    """Registers an LLM server."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=512)]
    id: Identifier | None = None
    """None = derived from the URL, so that registering twice is harmless."""
    model: str | None = None
    """Name to send with each call; None = the first of the server's `/v1/models`."""
    tokenizer: str | None = None
    """Path or hub name; None = the model root that the server names."""
    logprobs_mode: Annotated[str, Field(pattern=r"^(raw|processed)_logprobs$")] | None = None
    """What the server was started with, if it does not say so itself."""


class Backend(BaseModel):
    """An LLM server and its present load."""

    id: str
    url: str
    model: str
    tokenizer: str
    max_model_len: int
    """Context of the model in tokens."""
    policy_version: str | None = None
    logprobs_mode: str | None = None
    api: str = "generate"
    """`generate` (`/inference/v1/generate`) or `completions`."""
    draining: bool = False
    live_rollouts: int = 0
    load: float = 0.0
    """Score in the heap."""


class FieldError(BaseModel):
    field: str
    """JSON path of the value at fault."""
    message: str


class Problem(BaseModel):
    """An error answer (RFC 9457, `application/problem+json`)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    errors: list[FieldError] = Field(default_factory=list)
