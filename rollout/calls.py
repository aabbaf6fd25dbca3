"""How requests and ids are put into calls: each with an id, and no more in one than the gateway takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rollout.schema import MAX_ROLLOUTS_PER_CALL, BatchRequest, ForkRequest, RolloutRequest, new_id

Request = RolloutRequest | ForkRequest
Requests = Request | Iterable[Request]
R = TypeVar("R", bound=RolloutRequest | ForkRequest | BatchRequest)
MAX_CALL_BYTES = 8 << 20
"""Body size at which a submission is split, well under the gateway's default limit of 32 MiB."""


def requests_in(requests: Requests) -> Iterable[Request]:
    """The requests, also where there is only one."""
    return [requests] if isinstance(requests, Request) else requests


def take(source: Iterator[Request], room: float) -> list[Request]:
    """Requests for so many rollouts. A group is submitted whole, so the last may go a little beyond."""
    requests: list[Request] = []
    while room > 0 and (request := next(source, None)) is not None:
        requests.append(request)
        room -= request.n
    return requests


def with_id(request: R) -> R:
    """The request with an id, so that sending it twice creates nothing twice."""
    return request if request.id else request.model_copy(update={"id": new_id()})


def ids_by_calls(ids: Iterable[str]) -> list[dict[str, list[str]]]:
    """Ids as the bodies of calls, 1,000 in each."""
    every = [*ids]
    starts = range(0, len(every), MAX_ROLLOUTS_PER_CALL)
    return [{"ids": every[start : start + MAX_ROLLOUTS_PER_CALL]} for start in starts]


def parts_of(requests: Iterable[Request]) -> list[list[tuple[Request, bytes]]]:
    """Requests with their JSON by calls, in order: at most 1,000 rollouts, and 8 MiB, in each."""
    parts: list[list[tuple[Request, bytes]]] = []
    total = size = 0
    for request in requests:
        text = request.model_dump_json(exclude_defaults=True).encode()
        if not parts or total + request.n > MAX_ROLLOUTS_PER_CALL or size + len(text) > MAX_CALL_BYTES:
            parts.append([])
            total = size = 0
        parts[-1].append((request, text))
        total += request.n
        size += len(text)
    return parts
