"""`AsyncClient.batches`: groups of rollouts with dynamic sampling.

request = BatchRequest(prompts=prompts, n=8, groups=32)
async for group in client.batch(request):
    learn_from(group.rollouts)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple
from urllib.parse import quote

from rollout.calls import Request, parts_of, with_id
from rollout.errors import ApiError
from rollout.http import CONFLICT, Gateway, Polls, present
from rollout.schema import (
    Batch,
    BatchList,
    BatchRequest,
    Group,
    GroupPage,
    PromptsRequest,
    PromptsResponse,
    new_id,
)

GroupInclude = Literal["trajectory", "arrays", "summary", "verdicts"]
AHEAD = 3
"""Pages on their way at once: together with the one that the caller has, what a batch takes of memory."""
LARGE = ("trajectory", "arrays")
"""Includes with which a page takes long enough for others to be fetched meanwhile."""
FIRST, PAGE = 2, 8
"""Groups asked for at once, at first and at most: each holds many trajectories. With few the caller can begin
soon, and has something to work on while more are on their way; with more, each costs less."""
WATCHED_S = 2.0
"""Longest wait of a page while somebody watches the counters."""


class AsyncBatches:
    """The batches of a service. Every method may raise `ApiError` and `Unavailable`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: BatchRequest) -> Batch:
        """Start a batch. It gets an id before it is sent, so a retry creates nothing twice."""
        request = with_id(request)
        parts = await self._gateway.aside(lambda: _parts(request.prompts))
        # Prompts that do not fit into one call follow in others; only behind the last is a batch closed.
        first = request.model_copy(update={"prompts": parts[0], "closed": request.closed and len(parts) == 1})
        batch = await self._gateway.fetch(Batch, "POST", "/v1/batches", body=first)
        for number, part in enumerate(parts[1:], 2):
            closed = request.closed if number == len(parts) else None
            try:
                await self._add(batch.id, PromptsRequest(id=f"part-{number}", prompts=part, closed=closed))
            except ApiError as error:
                if error.status != CONFLICT:
                    raise
                break  # it has ended already: the rest is not needed
        return batch

    async def get(self, batch_id: str, wait: float = 0.0) -> Batch:
        """Its state and counters; with `wait`, once it has ended or after so many seconds."""
        params = {"wait": round(wait, 3)} if wait else {}
        return await self._gateway.fetch(Batch, "GET", _path(batch_id), params=params, wait=wait)

    async def list(self, limit: int = 100, tenant: str | None = None) -> Sequence[Batch]:
        """The newest first.

        Args:
            tenant: Whose; `*` = everybody's, for keys with the scope `admin`. None = the key's own.
        """
        params = present(limit=limit, tenant=tenant)
        return (await self._gateway.fetch(BatchList, "GET", "/v1/batches", params=params)).batches

    async def groups(
        self,
        batch_id: str,
        cursor: str = "0",
        wait: float = 0.0,
        limit: int = 16,
        include: GroupInclude = "trajectory",
        every: bool = False,
    ) -> GroupPage:
        """One page of groups in the order in which they were decided; `every`: not only those kept."""
        params = {"cursor": cursor, "wait": round(wait, 3), "limit": limit}
        params["verdict"] = "all" if every else "kept"
        return await self._gateway.fetch_rollouts(
            GroupPage, _path(batch_id, "/groups"), params, include, wait
        )

    async def stream(
        self,
        batch_id: str,
        cursor: str = "0",
        timeout: float | None = None,
        include: GroupInclude = "trajectory",
        every: bool = False,
    ) -> AsyncIterator[Group]:
        """Groups as they are decided, until the batch has ended or `timeout` seconds are over."""
        async for group in self.watch(batch_id, None, cursor, timeout, include, every):
            yield group

    async def watch(
        self,
        batch_id: str,
        show: Callable[[Batch], None] | None,
        cursor: str = "0",
        timeout: float | None = None,
        include: GroupInclude = "trajectory",
        every: bool = False,
    ) -> AsyncIterator[Group]:
        """As `stream`; `show` is told of the batch's counters at each page, and every two seconds."""
        polls, pages = Polls(timeout, WATCHED_S if show else None), _Pages(cursor)
        # Pages on their way, and whether the batch had ended when each was asked for. Where one was full, the
        # next are asked for while the caller works.
        begun: deque[tuple[_Place, asyncio.Task[GroupPage], bool]] = deque()

        def begin(place: _Place, wait: float, ended: bool) -> None:
            request = self.groups(batch_id, place.cursor, wait, place.limit, include, every)
            begun.append((place, asyncio.create_task(request), ended))

        try:
            while True:
                if not begun:
                    if (place := pages.next()) is None:
                        pages = _Pages(cursor)
                        place = pages.next()
                    begin(place, polls.next(), ended=True)
                place, task, ended = begun[0]
                page = await task
                begun.popleft()
                cursor = page.cursor
                if show:
                    await self._gateway.aside(partial(show, page.batch))
                if len(page.groups) == place.limit and not page.last:
                    pages.learn(place, page)
                    while include in LARGE and len(begun) < AHEAD and (place := pages.next()):
                        begin(place, 0.0, page.batch.state.ended)
                elif not begun:
                    pages = _Pages(cursor)
                for group in page.groups:
                    yield group
                # An empty page that was begun is the last one only if the batch had ended by then.
                more = page.groups or begun or not ended
                if not begun and (page.last or (not more and (page.batch.state.ended or polls.over))):
                    return
                if not more:
                    await polls.pause()
        finally:
            for _, task, _ in begun:
                task.cancel()

    async def extend(self, batch_id: str, prompts: Sequence[Request] = (), closed: bool | None = None) -> int:
        """Add prompts; `closed`: these are the last. Returns how many wait."""
        parts = await self._gateway.aside(lambda: _parts(prompts))
        waiting = 0
        for number, part in enumerate(parts, 1):
            last = closed if number == len(parts) else None
            waiting = await self._add(batch_id, PromptsRequest(id=new_id(), prompts=part, closed=last))
        return waiting

    async def pause(self, batch_id: str) -> Batch:
        """Start no more groups; what runs goes on."""
        return await self._gateway.fetch(Batch, "POST", _path(batch_id, "/pause"))

    async def resume(self, batch_id: str) -> Batch:
        """Start groups again."""
        return await self._gateway.fetch(Batch, "POST", _path(batch_id, "/resume"))

    async def cancel(self, batch_id: str) -> Batch:
        """End it with all that is under way. Harmless when it has ended."""
        return await self._gateway.fetch(Batch, "POST", _path(batch_id, "/cancel"))

    async def _add(self, batch_id: str, request: PromptsRequest) -> int:
        path = _path(batch_id, "/prompts")
        return (await self._gateway.fetch(PromptsResponse, "POST", path, body=request)).waiting


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
        """Note what a full page tells."""
        for number, cursor in enumerate([page.cursor, *page.ahead], 1):
            if (at := place.at + number * place.limit) >= self._asked:
                self._known[at] = cursor


def _path(batch_id: str, rest: str = "") -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}{rest}"


def _parts(prompts: Sequence[Request]) -> list[list[Request]]:
    """Prompts by calls; one part without any where there are none."""
    return [[prompt for prompt, _ in part] for part in parts_of(prompts)] or [[]]
