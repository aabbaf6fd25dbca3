"""What the three stages share: their services, what a handler gets, limits, blame, cleaning up, outcomes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import redis
import structlog

from rollout.schema import RolloutRequest, Stage, State
from rollout.trajectory import FinishReason
from sandbox.client import SandboxClient
from sandbox.errors import ImageError, RuntimeUnavailable, SandboxError
from sandbox.spec import Fate
from services.state.rollouts.store import ABSENT, Claim, Finish, error_fields
from workers.agent.others import Others
from workers.agent.placement import PromptSizes
from workers.agent.router import Router
from workers.agent.turns import TurnLog
from workers.errors import (
    AgentFault,
    DeadlinePassed,
    HandlerError,
    StageError,
    TaskError,
    UnknownHandler,
    describe,
    from_sandbox,
    laid,
)
from workers.handlers.base import AgentHandler, Context
from workers.held import CANCEL, OVERDUE, SHUTDOWN, Held
from workers.patience import time_limit
from workers.sandboxes import Sandboxes, SandboxServices

log = structlog.get_logger("stage")

CLEANUP_S = 20.0
PASSED_ON = "passed on"
BACK = ("handback", "elsewhere")
"""Outcomes that give a rollout back as it is."""
FATE_S = 5.0
"""Most seconds that cleaning up may hold a finished stage."""
HOOK_S = 30.0
"""Most seconds a hook may take: the stage's own limit has perhaps passed already."""
OF_THE_NODE = (ImageError, RuntimeUnavailable)
"""What says of a node that it cannot start an image, and nothing of others."""
MAX_REASON = 500

T = TypeVar("T")
C = TypeVar("C", bound=Context)


class StageServices(SandboxServices, Protocol):
    """What a stage asks of its worker: `WorkerServices`, or the runner of a handler in one process."""

    prompts: PromptSizes
    checkpoints: Any  # a `CheckpointStore`, or None

    def handler(self, request: RolloutRequest) -> AgentHandler[Any]: ...
    def router(self, claim: Claim, policy: str | None = None, slot: str = "") -> Router: ...
    def turn_log(self, claim: Claim, held: Held) -> TurnLog: ...
    def other_nodes(self, rollout_id: str, stage: Stage = Stage.INIT) -> tuple[set[str], set[str]]: ...


class StageRun:
    """One stage of one rollout on this worker, from claim to finish."""

    def __init__(self, services: StageServices, held: Held, claim: Claim) -> None:
        self.services = services
        self.held = held
        self.claim = claim
        self.names: dict[str, Any] = {
            "rollout_id": claim.rollout_id,
            "tenant": claim.tenant,
            "attempt": claim.attempt,
            "stage": claim.stage.value,
            "fence": claim.fence,
        }
        """What each line of its log says, a library's too."""
        self.log = log.bind(**self.names)
        self.sandboxes = Sandboxes(services, claim)
        self.others = Others(self)

    @property
    def has_sandbox(self) -> bool:
        return self.sandboxes.booted or self.claim.sandbox is not None

    @property
    def handler(self) -> AgentHandler[Any]:
        """The rollout's.

        Raises:
            UnknownHandler: This worker does not carry it.
        """
        return self.services.handler(self.claim.request)

    @property
    def can_pass_on(self) -> bool:
        """Whether another worker can go on with the stage at the turn that it has reached."""
        try:
            return self.claim.stage is Stage.RUN and Stage.RUN in self.handler.repeats
        except UnknownHandler:
            return False

    def context(self, kind: type[C], **more: Any) -> C:
        """What the handler gets in this stage.

        Raises:
            TaskError: The task does not fit the handler's model.
        """
        claim = self.claim
        return kind(
            rollout_id=claim.rollout_id,
            group_id=claim.group_id,
            index=claim.index,
            attempt=claim.attempt,
            task=self.handler.check_task(claim.request.task),
            request=claim.request,
            log=self.log,
            sandbox=SandboxClient(claim.sandbox_socket) if claim.sandbox_socket else None,
            sandboxes=self.sandboxes,
            others=self.others,
            **more,
        )

    async def fate(self) -> Fate | None:
        """What the host knows of the end of the rollout's sandbox. Never raises."""
        box = self.sandboxes.own or self.claim.sandbox
        if box is None:
            return None
        try:
            async with asyncio.timeout(FATE_S):
                return await self.services.host.fate(box.id)
        except Exception as error:
            self.log.warning("the sandbox host does not say how the sandbox ended", error=str(error))
            return None

    async def blame(self, error: SandboxError) -> StageError:
        """A failure of the rollout's sandbox, laid to whom the host's knowledge of its end points at."""
        return from_sandbox(error, await self.fate())

    async def clean_up(self, ours: bool = True) -> None:
        """Release what the attempt holds on this node. Never raises: the host's own limit is behind.

        Args:
            ours: Whether the rollout is this worker's. Else another one may go on in the same attempt and the
                same sandbox, and only what this one has booted itself is released.
        """
        if not self.has_sandbox:
            return
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self.sandboxes.release(all_of_attempt=ours)
        except Exception as error:
            self.log.warning("sandbox not released; the host's time limit will end it", error=str(error))

    def laid(self, error: Exception) -> Exception:
        """The error as somebody's, see `workers.errors.laid`."""
        if isinstance(error, StageError | SandboxError):
            return error
        return laid(error, self.handler)


Body = Callable[[StageRun], Awaitable[Finish]]
"""A stage's own work. What it raises is turned into an outcome here."""


def failed(run: StageRun, error: Exception) -> dict[str, str]:
    """Say in the log that the stage failed; the record's fields that say so too."""
    info = describe(run.laid(error), run.claim.stage)
    run.log.warning("stage failed", blame=info.blame.value, error=info.message, type=info.type)
    return error_fields(info)


def failure(run: StageRun, error: Exception) -> Finish:
    """The outcome of a failed stage: another attempt where that may help, else the end."""
    if isinstance(error, AgentFault):  # RUN and EVAL score those; in INIT no agent has done anything yet
        error = TaskError(str(error))
    if isinstance(error, UnknownHandler):
        # In the middle of an upgrade, say: whoever knows the handler takes it.
        return Finish("elsewhere", failed(run, error), delay_s=run.services.settings.retry_delay_s)
    error = run.laid(error)
    fields = failed(run, error)
    if isinstance(error, StageError) and error.retry:
        delay_s = run.services.settings.retry_delay_s * 2 ** (run.claim.attempt - 1)
        return Finish("again", fields, delay_s=delay_s)
    return Finish(State.FAILED, fields)


def interrupted(run: StageRun) -> Finish | None:
    """The outcome of a stage that was interrupted from outside; None: it is not ours any more."""
    reason = run.held.reason
    if reason == CANCEL:
        return Finish(State.CANCELLED)
    if reason == OVERDUE:
        info = describe(DeadlinePassed("the deadline of the rollout passed"), run.claim.stage)
        return Finish(State.TIMED_OUT, error_fields(info, FinishReason.TIME_LIMIT))
    if reason == SHUTDOWN:
        return Finish(PASSED_ON if run.can_pass_on else "handback")
    return None


async def work(run: StageRun, body: Body) -> Finish | None:
    """The body under the rollout's deadline; every end becomes an outcome."""
    claim = run.claim
    try:
        async with time_limit(claim.deadline_in_s, DeadlinePassed, "the deadline of the rollout passed"):
            outcome = await body(run)
    except DeadlinePassed:
        run.held.reason = run.held.reason or OVERDUE
        outcome = interrupted(run)
    except asyncio.CancelledError:
        if run.held.reason is None:
            # Nobody asked for it: the handler let a cancel of its own escape.
            outcome = failure(run, HandlerError("the handler raised CancelledError"))
        else:
            # The request has been heard; the task goes on to clean up.
            asyncio.current_task().uncancel()
            outcome = interrupted(run)
    except Exception as error:
        run.held.decided = True
        blamed = await run.blame(error) if isinstance(error, SandboxError) else error
        outcome = await unstarted(run, error, failure(run, blamed))
    run.held.decided = True
    return outcome


def releases(run: StageRun, outcome: Finish) -> bool:
    """Whether nobody needs the sandbox once the stage has ended so."""
    # An EVAL that is handed back is done again on the same sandbox.
    again = BACK if run.claim.stage is Stage.EVAL else ()
    return run.has_sandbox and outcome.next not in (State.READY, State.EVALUATING, PASSED_ON, *again)


async def unstarted(run: StageRun, error: Exception, outcome: Finish) -> Finish:
    """What becomes of a stage that `error` ended: the `outcome`, or other nodes take the rollout first.

    Where this node cannot start the image, it is handed on without using up an attempt while a live node is
    left that has not tried since the last attempt, however long ago. Once all have tried, each further
    attempt goes round them again, for what a node lacked may have come.
    """
    cause = error if isinstance(error, OF_THE_NODE) else error.__cause__
    if run.claim.stage is not Stage.INIT or not isinstance(cause, OF_THE_NODE):
        return outcome
    all_tried = False
    try:
        others, untried = await asyncio.to_thread(run.services.other_nodes, run.claim.rollout_id)
        if not others:
            return outcome  # nobody is to wait for a node that is alone to forget it
        all_tried = not untried
    except redis.RedisError as away:
        run.log.warning("cannot tell whether another node may start the image", error=str(away))
    fields = outcome.fields | {ABSENT + run.services.settings.node: str(error)[:MAX_REASON]}
    if all_tried:
        return replace(outcome, fields=fields)
    run.log.warning("handed to another node: this one cannot start the image", error=str(error))
    return Finish("elsewhere", fields)


async def consult(
    hook: Callable[[Any, Exception], Awaitable[T]], ctx: Context[Any], error: Exception
) -> tuple[Exception, T | None]:
    """The failure as the hook sees it, and what the hook answers.

    The answer is None where the hook has no say: another attempt may mend the failure, or the hook failed.
    """
    try:
        async with asyncio.timeout(HOOK_S):
            answer = await hook(ctx, error)
    except StageError as verdict:
        if verdict is not error:
            verdict.__cause__ = error
        return verdict, None
    except Exception as trouble:
        ctx.log.warning("an error hook of the handler failed", hook=hook.__name__, error=repr(trouble))
        return error, None
    may_mend = isinstance(error, SandboxError) or (isinstance(error, StageError) and error.retry)
    return error, None if may_mend else answer


def outcome_fields(
    *, finish_reason: FinishReason | None = None, metrics: dict[str, float] | None = None, **more: Any
) -> dict[str, str]:
    """Fields of the record, as strings."""
    fields = {name: str(value) for name, value in more.items() if value is not None}
    if finish_reason is not None:
        fields["finish_reason"] = finish_reason.value
    if metrics:
        # JSON has no place for others, and a reader none for null.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        fields["metrics"] = json.dumps(finite)
    return fields
