"""Failures of a stage, each with the party it is laid to."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import ClassVar

from rollout.schema import Blame, ErrorInfo, Stage
from sandbox.errors import (
    NodeShort,
    NotAllowed,
    SandboxAhead,
    SandboxError,
    SandboxRequestError,
    SandboxSpoiled,
    SandboxTaken,
)
from sandbox.spec import Fate
from services.logs import masked

MAX_TRACEBACK = 8000
"""Characters of a traceback that are kept; the end says what happened."""


class StageError(Exception):
    """A failure with blame. `retry`: another attempt from INIT may go better."""

    blame: ClassVar[Blame]
    retry: ClassVar[bool] = False


class TaskError(StageError):
    """The task's data cannot be worked on."""

    blame = Blame.TASK


class HandlerError(StageError):
    """The handler's own code failed, or answered with something it must not."""

    blame = Blame.HANDLER


class AgentFault(StageError):
    """The agent brought the end about: it is scored, 0 where the handler has nothing else, and never dropped.

    Were it dropped, an agent could escape a bad reward by breaking what it works in.
    """

    blame = Blame.AGENT


class ModelError(StageError):
    """The engine refused the call, or answered with what cannot be trained on."""

    blame = Blame.MODEL


class SandboxFailure(StageError):
    """The sandbox did not start, or died."""

    blame = Blame.SANDBOX
    retry = True


def from_sandbox(error: SandboxError, fate: Fate | None = None) -> StageError:
    """A sandbox's error as a stage's, given what its host knows of its end.

    A request that cannot be served is its caller's fault, and what the node does not allow the task's, which
    named it. A sandbox that its host ended for going over its limits is the agent's doing, and so is one that
    its own server cannot work in. One that was ended because the node ran short, or that has done more than
    Redis knows of, is the deployment's. One that died is neither's: no process inside can end or stop its
    server, so the kernel or somebody on the node did, and another attempt may go better.
    """
    message = f"{type(error).__name__}: {error}" + (f" (the sandbox {fate.reason})" if fate else "")
    kind = fate and fate.kind
    if kind == "node" or isinstance(error, NodeShort | SandboxAhead | SandboxTaken):
        return InfrastructureError(message)
    if kind == "limited" or isinstance(error, SandboxSpoiled):
        return AgentFault(message)
    if isinstance(error, NotAllowed):
        return TaskError(message)
    return (HandlerError if isinstance(error, SandboxRequestError) else SandboxFailure)(message)


class InfrastructureError(StageError):
    """Something of the deployment failed: no backend, no socket, no disk."""

    blame = Blame.INFRASTRUCTURE
    retry = True


class UnknownHandler(StageError):
    """This worker does not carry the handler; one of another release or with other packages may."""

    blame = Blame.INFRASTRUCTURE


class StageTimeout(StageError):
    """The stage's time limit passed."""

    blame = Blame.TIMEOUT
    retry = True


class DeadlinePassed(StageTimeout):
    """The deadline of the whole rollout passed: there is no time for another attempt."""

    retry = False


def laid(error: Exception, handler: object) -> Exception:
    """The error, or one of ours in its place where no code of the handler or its tools takes part in it."""
    if _took_part(handler, error.__traceback__):
        return error
    failure = InfrastructureError(f"an error of the service: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _took_part(handler: object, trace: TracebackType | None) -> bool:
    """Whether the way to where an error arose leads through a module of the handler or of its tools."""
    kinds = [*type(handler).__mro__, *map(type, getattr(handler, "tools", ()))]
    modules = {kind.__module__ for kind in kinds} - _NOT_THE_HANDLERS
    return any(frame.f_globals.get("__name__") in modules for frame, _ in traceback.walk_tb(trace))


_NOT_THE_HANDLERS = {"builtins", "abc", "typing", "workers.handlers.base", "workers.agent.tools.base"}


def describe(error: BaseException, stage: Stage) -> ErrorInfo:
    """The record of a failure. Whatever has no blame of its own was raised by the handler: see `laid`."""
    blame = error.blame if isinstance(error, StageError) else Blame.HANDLER
    lines = masked("".join(traceback.format_exception(error)))
    return ErrorInfo(
        blame=blame,
        stage=stage,
        type=type(error).__name__,
        # What a sandbox or a model wrote may be in it, and half a surrogate pair in that.
        message=masked(str(error)).encode(errors="replace").decode() or type(error).__name__,
        traceback=lines[-MAX_TRACEBACK:].encode(errors="replace").decode(),
    )
