"""Asking a handler what it makes of an exception of its own stage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sandbox.errors import SandboxError
from workers.errors import StageError
from workers.handlers.base import Context

HOOK_S = 30.0
"""Most seconds a hook may take: the stage's own limit has perhaps passed already."""

T = TypeVar("T")


async def consult(
    hook: Callable[[Any, Exception], Awaitable[T]], ctx: Context[Any], error: Exception
) -> tuple[Exception, T | None]:
    """The failure as the hook sees it, and what the hook answers.

    The answer is None where the hook has no say: another attempt may mend the failure, or the hook failed.
    """
    try:
        async with asyncio.timeout(HOOK_S):
            answer = await hook(ctx, error)
    except StageError as other:
        if other is not error:
            other.__cause__ = error
        return other, None
    except Exception as trouble:
        ctx.log.warning("an error hook of the handler failed", hook=hook.__name__, error=repr(trouble))
        return error, None
    mendable = isinstance(error, SandboxError) or (isinstance(error, StageError) and error.retry)
    return error, None if mendable else answer
