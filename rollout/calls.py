"""One HTTP call of the client without its I/O: what is sent, tried again, and given up on.

An operation is a generator. It yields a `Call` and is sent the `Reply`, or yields a `Sleep` and is
sent nothing, or has a call sent meanwhile (`Begin`, `Join`); it returns its result. So the sync and the
async client share every line of logic.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from rollout.errors import ApiError, Unavailable
from rollout.schema import Problem

BACKOFF_S = (0.1, 5.0)
"""First and longest pause between tries of one call."""
RETRIED_STATUS = frozenset({502, 503, 504})
"""503 is the gateway's own; the others come from a proxy before it."""
OVER_QUOTA = 429
"""Tried again when the gateway says, by Retry-After, when that may help."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One HTTP request. Every one is idempotent, so that it may be sent again."""

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    wait: float = 0.0
    """Seconds that the gateway may hold the answer back."""
    typed: bool = False
    """The answer may come as msgpack with typed arrays."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class Sleep(NamedTuple):
    seconds: float


@dataclass(frozen=True)
class Begin:
    """Send a call while the operation goes on; what is sent back stands for its reply."""

    call: Call


@dataclass(frozen=True)
class Join:
    """Wait for the reply to a call that was begun."""

    begun: Any


Reply = httpx.Response | httpx.TransportError
Step = Call | Sleep | Begin | Join
Operation = Generator[Step, Any, T]


def problem_of(response: httpx.Response) -> Problem:
    """What a refusal says."""
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:  # a proxy's page, or something that is no gateway at all
        text = response.text.strip()
        return Problem(
            title=response.reason_phrase or "error", status=response.status_code, detail=text[:300]
        )


def backoff_s(attempt: int, retry_after: str | None = None) -> float:
    """Seconds before the next try."""
    if retry_after and retry_after.isdigit():
        return min(float(retry_after), 60.0)
    first, longest = BACKOFF_S
    # Jitter: many trainers' ranks that lost the same gateway must not come back in step.
    return min(longest, first * 2**attempt) * random.uniform(0.5, 1.0)


def send(call: Call, retry_for: float, begun: Any = None) -> Operation[httpx.Response]:
    """Send a call, again after connection errors, 503 and 429, for at most `retry_for` seconds.

    Args:
        begun: What `Begin` gave: the first try is under way.

    Raises:
        ApiError: Any other answer that is not a success; also 429 when `retry_for` is over.
        Unavailable: `retry_for` is over.
    """
    end = time.monotonic() + retry_for
    attempt = 0
    while True:
        reply: Reply = yield call if begun is None else Join(begun)
        begun = None
        retry_after = None
        if isinstance(reply, httpx.Response):
            if reply.is_success:
                return reply
            retry_after = reply.headers.get("retry-after")
            refused = ApiError(reply.status_code, problem_of(reply), str(call))
            if reply.status_code == OVER_QUOTA and retry_after:
                pause = backoff_s(attempt, retry_after)
                if time.monotonic() + pause > end:
                    raise refused
                attempt += 1
                yield Sleep(pause)
                continue
            if reply.status_code not in RETRIED_STATUS:
                raise refused
            problem = refused.problem
            last = f"{reply.status_code} {problem.title}" + (f": {problem.detail}" if problem.detail else "")
            remedy = "`rollout status` says more"
        else:
            last = f"{type(reply).__name__}: {reply}" if str(reply) else type(reply).__name__
            remedy = "Is the gateway up? `rollout up` starts one; ROLLOUT_URL or --url names another one"
        pause = backoff_s(attempt, retry_after)
        attempt += 1
        if time.monotonic() + pause > end:
            raise Unavailable(
                f"{call} failed for {retry_for:g} s ({attempt} tries, the last: {last}). {remedy}"
            )
        yield Sleep(pause)


def fetch(call: Call, model: type[M], retry_for: float) -> Operation[M]:
    response = yield from send(call, retry_for)
    return model.model_validate_json(response.content)


def fetch_json(call: Call, retry_for: float) -> Operation[dict[str, Any]]:
    response = yield from send(call, retry_for)
    return response.json()
