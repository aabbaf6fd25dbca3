"""What the client can do with batches, a generator each (see `rollout.calls`); streams yield groups."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal
from urllib.parse import quote

from rollout.answers import fetch_rollouts
from rollout.batch import (
    MAX_PROMPTS_PER_CALL,
    Batch,
    BatchList,
    BatchRequest,
    Group,
    GroupPage,
    PromptsRequest,
    PromptsResponse,
)
from rollout.calls import Begin, Call, Operation, Sleep, Step, fetch
from rollout.errors import ApiError
from rollout.operations import LONG_POLL_S, MAX_CALL_BYTES, asked
from rollout.schema import RolloutRequest, new_id

GroupInclude = Literal["trajectory", "arrays", "summary", "verdicts"]
Groups = Generator[Step | Group, Any, Batch]
AHEAD = 3
"""Pages on their way at once: together with the one that the caller has, what a batch takes of memory."""
Seen = Callable[[Batch], None]
WATCHED_S = 2.0
"""Longest wait of a page while somebody watches the counters."""
CONFLICT = 409
LARGE = ("trajectory", "arrays")
"""Includes with which a page takes long enough for others to be fetched meanwhile."""
PAGE = 4
"""Groups asked for at once: each holds many trajectories."""


def _address(batch_id: str, rest: str = "") -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}{rest}"


def create(request: BatchRequest, retry_for: float) -> Operation[Batch]:
    """Prompts that do not fit into one call follow in others; only behind the last is a batch closed."""
    request = request if request.id else request.model_copy(update={"id": new_id()})
    parts = _parts(request.prompts)
    first = request.model_copy(update={"prompts": parts[0], "closed": request.closed and len(parts) == 1})
    body = first.model_dump_json(exclude_defaults=True).encode()
    made = yield from fetch(Call("POST", "/v1/batches", body=body), Batch, retry_for)
    for number, part in enumerate(parts[1:], 2):
        last = number == len(parts)
        wanted = PromptsRequest(id=f"part-{number}", prompts=part, closed=request.closed if last else None)
        try:
            yield from _extend(made.id, wanted, retry_for)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            break  # it has ended already: the rest is not needed
    return made


def _parts(prompts: Sequence[RolloutRequest]) -> list[list[RolloutRequest]]:
    """Prompts by calls: at most 1,000 of them and 8 MiB each."""
    parts: list[list[RolloutRequest]] = [[]]
    size = 0
    for prompt in prompts:
        length = len(prompt.model_dump_json(exclude_defaults=True))
        if parts[-1] and (len(parts[-1]) == MAX_PROMPTS_PER_CALL or size + length > MAX_CALL_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(prompt)
        size += length
    return parts


def get(batch_id: str, wait: float, retry_for: float) -> Operation[Batch]:
    params = {"wait": round(wait, 3)} if wait else {}
    return fetch(Call("GET", _address(batch_id), params, wait=wait), Batch, retry_for)


def list_batches(limit: int, retry_for: float) -> Operation[list[Batch]]:
    answer = yield from fetch(Call("GET", "/v1/batches", {"limit": limit}), BatchList, retry_for)
    return answer.batches


def _groups_call(batch_id: str, cursor: str, wait: float, limit: int, include: str, every: bool) -> Call:
    params = {
        "cursor": cursor,
        "wait": round(wait, 3),
        "limit": limit,
        "include": asked(include),
        "verdict": "all" if every else "kept",
    }
    return Call("GET", _address(batch_id, "/groups"), params, wait=wait, typed=True)


def groups(
    batch_id: str, cursor: str, wait: float, limit: int, include: GroupInclude, every: bool, retry_for: float
) -> Operation[GroupPage]:
    call = _groups_call(batch_id, cursor, wait, limit, include, every)
    return fetch_rollouts(call, GroupPage, include, retry_for)


def stream(
    batch_id: str,
    cursor: str,
    timeout: float | None,
    include: GroupInclude,
    every: bool,
    retry_for: float,
    seen: Seen | None = None,
    poll_s: float = LONG_POLL_S,
) -> Groups:
    """Groups as they are decided, until the batch has ended or the time is up; returns the batch.

    `seen` is told of the batch at every page, after `poll_s` seconds without groups too. Where a page was
    full, the next ones are on their way while the caller works on this one.
    """
    end = None if timeout is None else time.monotonic() + timeout
    begun: deque[tuple[str, Any, bool]] = deque()
    if include in LARGE:
        # What is there already, for next to nothing: so the first pages are asked for at once, too.
        call = _groups_call(batch_id, cursor, 0.0, PAGE, "verdicts", every)
        there = yield from fetch_rollouts(call, GroupPage, "verdicts", retry_for)
        if there.ahead:
            for start in [cursor, there.cursor, *there.ahead][:AHEAD]:
                call = _groups_call(batch_id, start, 0.0, PAGE, include, every)
                begun.append((start, (yield Begin(call)), there.batch.state.ended))
    while True:
        left = poll_s if end is None else min(poll_s, max(0.0, end - time.monotonic()))
        asked = time.monotonic()
        # What was begun did not wait; should it have to be sent again, it does not either.
        start, handle, over = begun.popleft() if begun else (cursor, None, False)
        call = _groups_call(batch_id, start, 0.0 if handle else left, PAGE, include, every)
        page = yield from fetch_rollouts(call, GroupPage, include, retry_for, handle)
        cursor = page.cursor
        if seen:
            seen(page.batch)
        if len(page.groups) == PAGE:
            # The pages begun are the first of these.
            for start in [cursor, *page.ahead][len(begun) : AHEAD]:
                call = _groups_call(batch_id, start, 0.0, PAGE, include, every)
                begun.append((start, (yield Begin(call)), page.batch.state.ended))
        yield from page.groups
        # An empty page that was begun is the last one only if the batch had ended by then.
        if page.groups or begun or (handle and not over):
            continue
        if page.batch.state.ended or (end is not None and time.monotonic() >= end):
            return page.batch
        if time.monotonic() - asked < 0.05:  # something before the gateway does not hold long-polls
            yield Sleep(0.2)


def run(
    request: BatchRequest,
    cursor: str,
    timeout: float | None,
    include: GroupInclude,
    every: bool,
    retry_for: float,
    seen: Seen | None = None,
) -> Groups:
    """Start the batch, or find it where it was started before, and `stream` it."""
    made = yield from create(request, retry_for)
    poll_s = WATCHED_S if seen else LONG_POLL_S
    return (yield from stream(made.id, cursor, timeout, include, every, retry_for, seen, poll_s))


def extend(
    batch_id: str, prompts: Sequence[RolloutRequest], closed: bool | None, retry_for: float
) -> Operation[int]:
    parts = _parts(prompts)
    waiting = 0
    for number, part in enumerate(parts, 1):
        wanted = PromptsRequest(id=new_id(), prompts=part, closed=closed if number == len(parts) else None)
        waiting = yield from _extend(batch_id, wanted, retry_for)
    return waiting


def _extend(batch_id: str, wanted: PromptsRequest, retry_for: float) -> Operation[int]:
    body = wanted.model_dump_json(exclude_defaults=True).encode()
    call = Call("POST", _address(batch_id, "/prompts"), body=body)
    return (yield from fetch(call, PromptsResponse, retry_for)).waiting


def control(
    batch_id: str, action: Literal["pause", "resume", "cancel"], retry_for: float
) -> Operation[Batch]:
    return fetch(Call("POST", _address(batch_id, f"/{action}")), Batch, retry_for)
