"""What the client can do with batches, a generator each (see `rollout.calls`); streams yield groups."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple
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
FIRST, PAGE = 2, 8
"""Groups asked for at once, at first and at most: each holds many trajectories. With few the caller can begin
soon, and has something to work on while more are on their way; with more, each costs less."""


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


class _Place(NamedTuple):
    """A page that is asked for."""

    at: int
    """Groups before it."""
    cursor: str
    limit: int


class _Pages:
    """Where the next pages begin, as far as that is known, and how long they are to be.

    A page tells where those behind it begin, counted in its own length.
    """

    def __init__(self, cursor: str) -> None:
        self._known = {0: cursor}
        self._asked, self._limit = 0, FIRST

    def next(self) -> _Place | None:
        """The next one; None = nothing is known yet of where it begins."""
        cursor = self._known.pop(self._asked, None)
        if cursor is None:
            return None
        place = _Place(self._asked, cursor, self._limit)
        self._asked += self._limit
        self._limit = min(PAGE, 2 * self._limit)
        return place

    def learn(self, place: _Place, page: GroupPage) -> None:
        """What a full page tells."""
        for number, cursor in enumerate([page.cursor, *page.ahead], 1):
            if (at := place.at + number * place.limit) >= self._asked:
                self._known[at] = cursor


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
    pages = _Pages(cursor)
    begun: deque[tuple[_Place, Any, bool]] = deque()
    while True:
        left = poll_s if end is None else min(poll_s, max(0.0, end - time.monotonic()))
        asked = time.monotonic()
        if begun:
            place, handle, over = begun.popleft()
        else:
            if (place := pages.next()) is None:
                pages = _Pages(cursor)
                place = pages.next()
            handle, over = None, False
        # What was begun did not wait; should it have to be sent again, it does not either.
        call = _groups_call(batch_id, place.cursor, 0.0 if handle else left, place.limit, include, every)
        page = yield from fetch_rollouts(call, GroupPage, include, retry_for, handle)
        cursor = page.cursor
        if seen:
            seen(page.batch)
        if len(page.groups) == place.limit and not page.last:
            pages.learn(place, page)
            while include in LARGE and len(begun) < AHEAD and (following := pages.next()):
                call = _groups_call(batch_id, following.cursor, 0.0, following.limit, include, every)
                begun.append((following, (yield Begin(call)), page.batch.state.ended))
        elif not begun:
            pages = _Pages(cursor)
        yield from page.groups
        if page.last and not begun:
            return page.batch
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
