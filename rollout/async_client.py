"""`AsyncClient`: the methods of `Client` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from functools import partial
from typing import Any

import httpx

from rollout import bodies
from rollout import operations as op
from rollout import policy_operations as policy_op
from rollout.batch import BatchRequest, Group
from rollout.batch_operations import GroupInclude
from rollout.batches import AsyncBatches
from rollout.calls import Begin, Join, Operation, Reply, Sleep, Step
from rollout.connection import Accepted, Backends, Base, Handlers, Results, T, Wire, batch_steps, with_bar
from rollout.operations import Include, Requests
from rollout.policy import Canary, PauseMode, PolicyRequest, PolicyStatus, PolicyUpdate
from rollout.schema import (
    AckResponse,
    Backend,
    BackendRequest,
    CompletionPage,
    Rollout,
    RolloutPage,
    RolloutRequest,
    State,
)
from rollout.sse import Follower


class AsyncClient(Base):
    """`Client` for asyncio: the same methods, arguments and errors."""

    def __init__(
        self,
        base_url: str | None = None,
        timeout: float = 30.0,
        retry_for: float = 30.0,
        api_key: str | None = None,
        wire: Wire = "auto",
    ) -> None:
        super().__init__(base_url, timeout, retry_for, api_key, wire)
        self._http = httpx.AsyncClient(**self._http_options)

    __init__.__doc__ = Base.__init__.__doc__

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _perform(self, step: Step) -> Reply | asyncio.Task[Reply] | None:
        if isinstance(step, Sleep):
            await asyncio.sleep(step.seconds)
            return None
        if isinstance(step, Begin):
            return asyncio.create_task(self._perform(step.call))
        if isinstance(step, Join):
            return await step.begun
        try:
            if not step.typed:
                return await self._http.request(**self._request(step))
            async with self._http.stream(**self._request(step)) as response:
                await bodies.aread(response)
            return response
        except httpx.TransportError as error:
            return error

    async def _drive(self, operation: Operation[T]) -> T:
        answer = None
        while True:
            try:
                step = operation.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = await self._perform(step)

    @property
    def batches(self) -> AsyncBatches:
        return AsyncBatches(self._drive, self._iterate, self.retry_for)

    async def _iterate(self, stream: Generator[Step | T, Any, Any]) -> AsyncIterator[T]:
        answer = None
        while True:
            try:
                step = stream.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(step, Step):
                answer = await self._perform(step)
            else:
                yield step

    async def submit(self, requests: Requests) -> Accepted:
        return await self._drive(op.submit(requests, self.retry_for))

    async def get(
        self, rollout_id: str, wait: float | None = None, include: Include = "trajectory"
    ) -> Rollout:
        return await self._drive(op.get(rollout_id, wait, include, self.retry_for))

    async def wait(
        self, rollout_id: str, timeout: float | None = None, include: Include = "trajectory"
    ) -> Rollout:
        return await self._drive(op.wait(rollout_id, timeout, include, self.retry_for))

    async def list(
        self,
        state: State | str | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> RolloutPage:
        return await self._drive(op.list_page(state, handler, group_id, tag, limit, cursor, self.retry_for))

    async def cancel(self, rollout_id: str) -> dict[str, Any]:
        return await self._drive(op.cancel(rollout_id, self.retry_for))

    async def cancel_many(
        self, ids: Iterable[str] | None = None, group_id: str | None = None, tag: str | None = None
    ) -> dict[str, int]:
        return await self._drive(op.cancel_many(ids, group_id, tag, self.retry_for))

    async def completions(
        self,
        cursor: str | None = None,
        wait: float | None = None,
        limit: int | None = None,
        tag: str | None = None,
        include: Include = "trajectory",
    ) -> CompletionPage:
        return await self._drive(op.completions(cursor, wait, limit, tag, include, self.retry_for))

    def stream(
        self,
        ids: Iterable[str] | None = None,
        tag: str | None = None,
        cursor: str | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> AsyncIterator[Rollout]:
        return self._iterate(op.stream(ids, tag, cursor, timeout, include, self.retry_for))

    def rollouts(
        self,
        requests: Requests,
        in_flight: int | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
        progress: bool | None = None,
        announce: Callable[[Accepted], None] | None = None,
    ) -> AsyncIterator[Rollout]:
        steps = op.run(requests, timeout, include, self.retry_for, announce, in_flight)
        return self._iterate(with_bar(steps, requests, progress))

    def batch(
        self,
        request: BatchRequest,
        cursor: str = "0",
        timeout: float | None = None,
        include: GroupInclude = "trajectory",
        every: bool = False,
        progress: bool | None = None,
    ) -> AsyncIterator[Group]:
        steps = batch_steps(request, cursor, timeout, include, every, progress, self.retry_for)
        return self._iterate(steps)

    async def run(
        self,
        requests: Requests,
        timeout: float | None = None,
        include: Include = "trajectory",
        progress: bool | None = None,
    ) -> Results:
        requests = [requests] if isinstance(requests, RolloutRequest) else list(requests)
        bar = partial(with_bar, requests=requests, progress=progress)
        return await self._drive(op.collect(requests, timeout, include, self.retry_for, bar))

    async def stream_completions(
        self,
        cursor: str | None = None,
        tag: str | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> AsyncIterator[Rollout]:
        follow = Follower(cursor, tag, include, timeout, self.retry_for)
        while not follow.over:
            error = None
            try:
                async with self._http.stream(**self._stream_request(follow)) as response:
                    response.is_success or await response.aread()
                    if follow.refused(response):
                        rest = self.stream(None, tag, follow.cursor, follow.left(), include)
                        async for item in rest:
                            yield item
                        return
                    async for line in response.aiter_lines():
                        if (item := follow.line(line)) is not None:
                            yield item
                        if follow.over:
                            return
            except httpx.TransportError as raised:
                error = raised
            await asyncio.sleep(follow.cut(error))

    async def ack(self, ids: Iterable[str]) -> AckResponse:
        return await self._drive(op.ack(ids, self.retry_for))

    async def handlers(self) -> Handlers:
        return await self._drive(op.handlers(self.retry_for))

    async def backends(self) -> Backends:
        return await self._drive(op.backends(self.retry_for))

    async def add_backend(
        self,
        url: str,
        id: str | None = None,
        model: str | None = None,
        tokenizer: str | None = None,
        logprobs_mode: str | None = None,
        capacity_tokens: int | None = None,
        max_rollouts: int | None = None,
    ) -> Backend:
        request = BackendRequest(
            url=url,
            id=id,
            model=model,
            tokenizer=tokenizer,
            logprobs_mode=logprobs_mode,
            capacity_tokens=capacity_tokens,
            max_rollouts=max_rollouts,
        )
        return await self._drive(op.add_backend(request, self.retry_for))

    async def backend(self, backend_id: str) -> Backend:
        return await self._drive(op.backend(backend_id, self.retry_for))

    async def drain_backend(self, backend_id: str, drain: bool = True) -> Backend:
        return await self._drive(op.drain_backend(backend_id, drain, self.retry_for))

    async def remove_backend(self, backend_id: str, force: bool = True) -> None:
        await self._drive(op.remove_backend(backend_id, force, self.retry_for))

    async def policy(self) -> PolicyStatus:
        return await self._drive(policy_op.policy(self.retry_for))

    async def update_policy(
        self,
        version: str,
        path: str | None = None,
        *,
        mode: PauseMode = "keep",
        canary: Canary | None = None,
        wait: float = 60.0,
        **more: Any,
    ) -> PolicyUpdate:
        request = PolicyRequest(version=version, path=path, mode=mode, canary=canary, **more)
        return await self._drive(policy_op.update_policy(request, wait, self.retry_for))

    async def policy_update(self, update_id: str, wait: float = 0.0) -> PolicyUpdate:
        return await self._drive(policy_op.policy_update(update_id, wait, self.retry_for))

    async def status(self) -> dict[str, Any]:
        return await self._drive(op.status(self.retry_for))

    async def ready(self) -> dict[str, Any]:
        return await self._drive(op.ready())
