"""The client of the HTTP API: `Client`, and `AsyncClient` with the same methods as coroutines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from rollout import operations as op
from rollout.calls import Call, Operation, Reply, Sleep, Step
from rollout.errors import AddressError, ApiError, RolloutError, Unavailable, WaitTimeout
from rollout.operations import Include, Progress, Requests, Stream
from rollout.schema import (
    Backend,
    BackendRequest,
    CompletionPage,
    HandlerInfo,
    Rollout,
    RolloutPage,
    State,
    Submitted,
)

__all__ = ["AddressError", "ApiError", "AsyncClient", "Client", "RolloutError", "Unavailable", "WaitTimeout"]

DEFAULT_URL = "http://127.0.0.1:8080"
URL_VARIABLE = "ROLLOUT_URL"
T = TypeVar("T")
# Named here because the method `list` hides the builtin inside the classes.
Accepted = list[Submitted]
Handlers = list[HandlerInfo]
Backends = list[Backend]
Results = list[Rollout]


class _Base:
    """Address, timeouts and the making of requests."""

    def __init__(self, base_url: str | None = None, timeout: float = 30.0, retry_for: float = 30.0) -> None:
        """
        Args:
            base_url: The gateway; None = `$ROLLOUT_URL`, else http://127.0.0.1:8080.
            timeout: Seconds to wait for one answer, beside what a long-poll waits by itself.
            retry_for: Seconds during which a call is sent again after a connection error or a 503.
        """
        self.base_url = (base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self.timeout = timeout
        self.retry_for = retry_for
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AddressError(
                f"gateway address {self.base_url!r} is not an http(s) URL; give one like {DEFAULT_URL} "
                f"as base_url, --url or {URL_VARIABLE}"
            )
        # A proxy of the environment cannot reach this machine's own loopback.
        local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
        self._http_options = {"base_url": self.base_url, "trust_env": not local}

    def _request(self, call: Call) -> dict[str, Any]:
        headers = {"content-type": "application/json"} if call.body is not None else {}
        return {
            "method": call.method,
            "url": call.path,
            "params": call.params,
            "content": call.body,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, read=self.timeout + call.wait),
        }


class Client(_Base):
    """Synchronous client; usable from several threads. Close it, or use it as a context manager.

    Every method may raise `ApiError` (the gateway refused; the message names the field) and
    `Unavailable` (no gateway for `retry_for` seconds).
    """

    def __init__(self, base_url: str | None = None, timeout: float = 30.0, retry_for: float = 30.0) -> None:
        super().__init__(base_url, timeout, retry_for)
        self._http = httpx.Client(**self._http_options)

    __init__.__doc__ = _Base.__init__.__doc__

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _perform(self, step: Step) -> Reply | None:
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
            return None
        try:
            return self._http.request(**self._request(step))
        except httpx.TransportError as error:
            return error

    def _drive(self, operation: Operation[T]) -> T:
        answer = None
        while True:
            try:
                step = operation.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._perform(step)

    def _iterate(self, stream: Stream) -> Iterator[Rollout]:
        answer = None
        while True:
            try:
                step = stream.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(step, Rollout):
                yield step
            else:
                answer = self._perform(step)

    def submit(self, requests: Requests) -> Accepted:
        """Submit one request or many; the rollouts come back in the order of the requests.

        Requests without an id get one before they are sent, so a retry creates nothing twice. More
        than 1,000 rollouts are split into several calls, each of which is accepted or refused whole.
        """
        return self._drive(op.submit(requests, self.retry_for))

    def get(self, rollout_id: str, wait: float | None = None, include: Include = "trajectory") -> Rollout:
        """One rollout. With `wait`, the answer comes when it has ended or after so many seconds."""
        return self._drive(op.get(rollout_id, wait, include, self.retry_for))

    def wait(self, rollout_id: str, timeout: float | None = None, include: Include = "trajectory") -> Rollout:
        """Wait until a rollout has ended.

        Raises:
            WaitTimeout: It has not after `timeout` seconds (None = no limit).
        """
        return self._drive(op.wait(rollout_id, timeout, include, self.retry_for))

    def list(
        self,
        state: State | str | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> RolloutPage:
        """One page of summaries that fit all the filters given."""
        return self._drive(op.list_page(state, handler, group_id, tag, limit, cursor, self.retry_for))

    def cancel(self, rollout_id: str) -> dict[str, Any]:
        """Cancel a rollout: `{"id", "state", "cancelling"}`. Harmless when it has ended."""
        return self._drive(op.cancel(rollout_id, self.retry_for))

    def cancel_many(
        self, ids: Iterable[str] | None = None, group_id: str | None = None, tag: str | None = None
    ) -> dict[str, int]:
        """Cancel by exactly one of ids, group and tag: `{"cancelled", "already_ended"}`."""
        return self._drive(op.cancel_many(ids, group_id, tag, self.retry_for))

    def completions(
        self,
        cursor: str | None = None,
        wait: float | None = None,
        limit: int | None = None,
        tag: str | None = None,
        include: Include = "trajectory",
    ) -> CompletionPage:
        """What ended after `cursor`, in that order.

        Args:
            cursor: That of the page before; None or "0" = from the beginning, "$" = from now on.
            wait: Seconds that the gateway may wait for a first one.
        """
        return self._drive(op.completions(cursor, wait, limit, tag, include, self.retry_for))

    def stream(
        self,
        ids: Iterable[str] | None = None,
        tag: str | None = None,
        cursor: str | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> Iterator[Rollout]:
        """Rollouts in order of completion, each of `ids` once, until all of them have ended.

        Without `ids` everything from `cursor` on, without end, or until `timeout` seconds are over.
        With `ids` and no `cursor`, those that have ended already are asked for one by one, first.

        Raises:
            WaitTimeout: Some of `ids` had not ended after `timeout` seconds.
        """
        return self._iterate(op.stream(ids, tag, cursor, timeout, include, self.retry_for))

    def run_stream(
        self,
        requests: Requests,
        timeout: float | None = None,
        include: Include = "trajectory",
        announce: Callable[[Accepted], None] | None = None,
    ) -> Iterator[Rollout]:
        """Submit, then yield in order of completion. `announce` is told what was accepted."""
        return self._iterate(op.run(requests, timeout, include, self.retry_for, announce))

    def run(
        self,
        requests: Requests,
        progress: Progress | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> Results:
        """Submit and wait for all; results in the order of submission.

        Args:
            progress: Called with each rollout as it ends, how many have, and how many there are.

        Raises:
            WaitTimeout: Some had not ended after `timeout` seconds. They go on; cancel them if
                they are no longer wanted.
        """
        return self._drive(op.collect(requests, timeout, progress, include, self.retry_for))

    def handlers(self) -> Handlers:
        """The handlers that the workers announced."""
        return self._drive(op.handlers(self.retry_for))

    def backends(self) -> Backends:
        """The LLM servers and their load."""
        return self._drive(op.backends(self.retry_for))

    def add_backend(
        self,
        url: str,
        id: str | None = None,
        model: str | None = None,
        tokenizer: str | None = None,
        logprobs_mode: str | None = None,
    ) -> Backend:
        """Register an LLM server; harmless when it is registered already. See `BackendRequest`."""
        request = BackendRequest(
            url=url, id=id, model=model, tokenizer=tokenizer, logprobs_mode=logprobs_mode
        )
        return self._drive(op.add_backend(request, self.retry_for))

    def remove_backend(self, backend_id: str) -> None:
        """Take an LLM server out of service."""
        self._drive(op.remove_backend(backend_id, self.retry_for))

    def status(self) -> dict[str, Any]:
        """`{"states": {state: count}, "queues": {name: depth}, "backends": [...], "version"}`."""
        return self._drive(op.status(self.retry_for))

    def ready(self) -> dict[str, Any]:
        """`{"ready": bool, ...}` with what is missing; asks once and raises nothing."""
        return self._drive(op.ready())


class AsyncClient(_Base):
    """`Client` for asyncio: the same methods, arguments and errors."""

    def __init__(self, base_url: str | None = None, timeout: float = 30.0, retry_for: float = 30.0) -> None:
        super().__init__(base_url, timeout, retry_for)
        self._http = httpx.AsyncClient(**self._http_options)

    __init__.__doc__ = _Base.__init__.__doc__

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _perform(self, step: Step) -> Reply | None:
        if isinstance(step, Sleep):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._http.request(**self._request(step))
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

    async def _iterate(self, stream: Stream) -> AsyncIterator[Rollout]:
        answer = None
        while True:
            try:
                step = stream.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(step, Rollout):
                yield step
            else:
                answer = await self._perform(step)

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

    def run_stream(
        self,
        requests: Requests,
        timeout: float | None = None,
        include: Include = "trajectory",
        announce: Callable[[Accepted], None] | None = None,
    ) -> AsyncIterator[Rollout]:
        return self._iterate(op.run(requests, timeout, include, self.retry_for, announce))

    async def run(
        self,
        requests: Requests,
        progress: Progress | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> Results:
        return await self._drive(op.collect(requests, timeout, progress, include, self.retry_for))

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
    ) -> Backend:
        request = BackendRequest(
            url=url, id=id, model=model, tokenizer=tokenizer, logprobs_mode=logprobs_mode
        )
        return await self._drive(op.add_backend(request, self.retry_for))

    async def remove_backend(self, backend_id: str) -> None:
        await self._drive(op.remove_backend(backend_id, self.retry_for))

    async def status(self) -> dict[str, Any]:
        return await self._drive(op.status(self.retry_for))

    async def ready(self) -> dict[str, Any]:
        return await self._drive(op.ready())
