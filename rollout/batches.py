"""`Client.batches` and `AsyncClient.batches`: all that can be done with batches beside running one.

request = BatchRequest(prompts=prompts, n=8, groups=32)
for group in client.batch(request):
    learn_from(group.rollouts)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from rollout import batch_operations as op
from rollout.batch import Batch, BatchRequest, Group, GroupPage
from rollout.batch_operations import GroupInclude
from rollout.calls import Operation
from rollout.schema import RolloutRequest


class Batches:
    """The batches of a service. Every method may raise `ApiError` and `Unavailable`."""

    def __init__(
        self,
        drive: Callable[[Operation[Any]], Any],
        iterate: Callable[[op.Groups], Iterator[Group]],
        retry_for: float,
    ) -> None:
        self._drive, self._iterate, self._retry_for = drive, iterate, retry_for

    def create(self, request: BatchRequest) -> Batch:
        """Start a batch. It gets an id before it is sent, so a retry creates nothing twice."""
        return self._drive(op.create(request, self._retry_for))

    def get(self, batch_id: str, wait: float = 0.0) -> Batch:
        """Its state and counters; with `wait`, once it has ended or after so many seconds."""
        return self._drive(op.get(batch_id, wait, self._retry_for))

    def list(self, limit: int = 100) -> Sequence[Batch]:
        """The newest first."""
        return self._drive(op.list_batches(limit, self._retry_for))

    def groups(
        self,
        batch_id: str,
        cursor: str = "0",
        wait: float = 0.0,
        limit: int = 16,
        include: GroupInclude = "trajectory",
        every: bool = False,
    ) -> GroupPage:
        """One page of groups in the order in which they were decided; `every`: not only those kept."""
        return self._drive(op.groups(batch_id, cursor, wait, limit, include, every, self._retry_for))

    def stream(
        self,
        batch_id: str,
        cursor: str = "0",
        timeout: float | None = None,
        include: GroupInclude = "trajectory",
        every: bool = False,
    ) -> Iterator[Group]:
        """Groups as they are decided, until the batch has ended or `timeout` seconds are over."""
        return self._iterate(op.stream(batch_id, cursor, timeout, include, every, self._retry_for))

    def extend(
        self, batch_id: str, prompts: Sequence[RolloutRequest] = (), closed: bool | None = None
    ) -> int:
        """Add prompts; `closed`: these are the last. Returns how many wait."""
        return self._drive(op.extend(batch_id, prompts, closed, self._retry_for))

    def pause(self, batch_id: str) -> Batch:
        """Start no more groups; what runs goes on."""
        return self._drive(op.control(batch_id, "pause", self._retry_for))

    def resume(self, batch_id: str) -> Batch:
        """Start groups again."""
        return self._drive(op.control(batch_id, "resume", self._retry_for))

    def cancel(self, batch_id: str) -> Batch:
        """End it with all that is under way. Harmless when it has ended."""
        return self._drive(op.control(batch_id, "cancel", self._retry_for))


class AsyncBatches:
    """The same for asyncio; see `Batches`."""

    def __init__(
        self,
        drive: Callable[[Operation[Any]], Awaitable[Any]],
        iterate: Callable[[op.Groups], AsyncIterator[Group]],
        retry_for: float,
    ) -> None:
        self._drive, self._iterate, self._retry_for = drive, iterate, retry_for

    async def create(self, request: BatchRequest) -> Batch:
        return await self._drive(op.create(request, self._retry_for))

    async def get(self, batch_id: str, wait: float = 0.0) -> Batch:
        return await self._drive(op.get(batch_id, wait, self._retry_for))

    async def list(self, limit: int = 100) -> Sequence[Batch]:
        return await self._drive(op.list_batches(limit, self._retry_for))

    async def groups(
        self,
        batch_id: str,
        cursor: str = "0",
        wait: float = 0.0,
        limit: int = 16,
        include: GroupInclude = "trajectory",
        every: bool = False,
    ) -> GroupPage:
        return await self._drive(op.groups(batch_id, cursor, wait, limit, include, every, self._retry_for))

    def stream(
        self,
        batch_id: str,
        cursor: str = "0",
        timeout: float | None = None,
        include: GroupInclude = "trajectory",
        every: bool = False,
    ) -> AsyncIterator[Group]:
        return self._iterate(op.stream(batch_id, cursor, timeout, include, every, self._retry_for))

    async def extend(
        self, batch_id: str, prompts: Sequence[RolloutRequest] = (), closed: bool | None = None
    ) -> int:
        return await self._drive(op.extend(batch_id, prompts, closed, self._retry_for))

    async def pause(self, batch_id: str) -> Batch:
        return await self._drive(op.control(batch_id, "pause", self._retry_for))

    async def resume(self, batch_id: str) -> Batch:
        return await self._drive(op.control(batch_id, "resume", self._retry_for))

    async def cancel(self, batch_id: str) -> Batch:
        return await self._drive(op.control(batch_id, "cancel", self._retry_for))
