"""The client of the HTTP API: `Client`, and `AsyncClient` with the same methods as coroutines."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

from rollout import bodies
from rollout import operations as op
from rollout import policy_operations as policy_op
from rollout.async_client import AsyncClient
from rollout.batch import BatchRequest, Group
from rollout.batch_operations import GroupInclude
from rollout.batches import Batches
from rollout.calls import Begin, Join, Operation, Reply, Sleep, Step
from rollout.connection import (
    AHEAD,
    DEFAULT_URL,
    KEY_VARIABLE,
    URL_VARIABLE,
    Accepted,
    Backends,
    Base,
    Handlers,
    Results,
    T,
    Wire,
    batch_steps,
    with_bar,
)
from rollout.errors import AddressError, ApiError, ApiKeyError, RolloutError, Unavailable, WaitTimeout
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

__all__ = [
    "DEFAULT_URL",
    "KEY_VARIABLE",
    "URL_VARIABLE",
    "AddressError",
    "ApiError",
    "ApiKeyError",
    "AsyncClient",
    "Client",
    "RolloutError",
    "Unavailable",
    "WaitTimeout",
]


class Client(Base):
    """Synchronous client; usable from several threads. Close it, or use it as a context manager.

    Every method may raise `ApiError` (the gateway refused; the message names the field) and
    `Unavailable` (no gateway for `retry_for` seconds).
    """

    def __init__(
        self,
        base_url: str | None = None,
        timeout: float = 30.0,
        retry_for: float = 30.0,
        api_key: str | None = None,
        wire: Wire = "auto",
    ) -> None:
        super().__init__(base_url, timeout, retry_for, api_key, wire)
        self._http = httpx.Client(**self._http_options)
        # Its threads start when something is first fetched ahead.
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="rollout-ahead")

    __init__.__doc__ = Base.__init__.__doc__

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _perform(self, step: Step) -> Reply | Future[Reply] | None:
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
            return None
        if isinstance(step, Begin):
            return self._pool.submit(self._perform, step.call)
        if isinstance(step, Join):
            return step.begun.result()
        try:
            if not step.typed:
                return self._http.request(**self._request(step))
            with self._http.stream(**self._request(step)) as response:
                bodies.read(response)
            return response
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

    @property
    def batches(self) -> Batches:
        """Groups of rollouts with dynamic sampling."""
        return Batches(self._drive, self._iterate, self.retry_for)

    def _iterate(self, stream: Generator[Step | T, Any, Any]) -> Iterator[T]:
        answer = None
        while True:
            try:
                step = stream.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(step, Step):
                answer = self._perform(step)
            else:
                yield step

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

    def rollouts(
        self,
        requests: Requests,
        in_flight: int | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
        progress: bool | None = None,
        announce: Callable[[Accepted], None] | None = None,
    ) -> Iterator[Rollout]:
        """Submit, then yield in order of completion.

        Args:
            requests: May be an iterator over a dataset of any size, when `in_flight` is given.
            in_flight: Most rollouts submitted and not ended; None = all are submitted at once.
            timeout: Seconds after which `WaitTimeout` is raised; None = no limit.
            include: `arrays` gives NumPy arrays in place of lists.
            progress: A bar on standard error; None = where that is a terminal.
            announce: Told what was accepted, at each submission.
        """
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
    ) -> Iterator[Group]:
        """Start a batch, and yield its groups as they are kept, until it has ended.

        A request with the id of a batch that was started before, by a trainer that died since, goes on with
        that one. Leaving the iterator does not end the batch: `batches.cancel` does, and the next one may
        take over what is under way (`carry_from`).

        Args:
            cursor: Of the page up to which its groups have been dealt with.
            timeout: Seconds after which the iterator ends, whether the batch has or not; None = no limit.
            include: `arrays` gives NumPy arrays in place of lists.
            every: Groups that were not kept too.
            progress: A bar on standard error; None = where that is a terminal.
        """
        steps = batch_steps(request, cursor, timeout, include, every, progress, self.retry_for)
        return self._iterate(steps)

    def run(
        self,
        requests: Requests,
        timeout: float | None = None,
        include: Include = "trajectory",
        progress: bool | None = None,
    ) -> Results:
        """Submit and wait for all; results in the order of submission.

        Args:
            progress: A bar on standard error; None = where that is a terminal.

        Raises:
            WaitTimeout: Some had not ended after `timeout` seconds. They go on; cancel them if
                they are no longer wanted.
        """
        requests = [requests] if isinstance(requests, RolloutRequest) else list(requests)
        bar = partial(with_bar, requests=requests, progress=progress)
        return self._drive(op.collect(requests, timeout, include, self.retry_for, bar))

    def stream_completions(
        self,
        cursor: str | None = None,
        tag: str | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> Iterator[Rollout]:
        """Whatever ends after `cursor`, as it ends, over one connection (server-sent events).

        Each comes at least once: keep `completion` of the last rollout dealt with, and pass it as `cursor`
        to go on after a restart. A connection that is cut is made again. Where the gateway gives no stream,
        because all are in use, long-polls do the same.

        Args:
            cursor: None or "0" = from the beginning, "$" = from now on.
            timeout: Seconds after which the iterator ends; None = never.
        """
        follow = Follower(cursor, tag, include, timeout, self.retry_for)
        while not follow.over:
            error = None
            try:
                with self._http.stream(**self._stream_request(follow)) as response:
                    response.is_success or response.read()
                    if follow.refused(response):
                        yield from self.stream(None, tag, follow.cursor, follow.left(), include)
                        return
                    for line in response.iter_lines():
                        if (item := follow.line(line)) is not None:
                            yield item
                        if follow.over:
                            return
            except httpx.TransportError as raised:
                error = raised
            time.sleep(follow.cut(error))

    def ack(self, ids: Iterable[str]) -> AckResponse:
        """Say that results have arrived for good: their trajectories may be freed early."""
        return self._drive(op.ack(ids, self.retry_for))

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
        capacity_tokens: int | None = None,
        max_rollouts: int | None = None,
    ) -> Backend:
        """Register an LLM server; one that is registered already is described anew. See `BackendRequest`."""
        request = BackendRequest(
            url=url,
            id=id,
            model=model,
            tokenizer=tokenizer,
            logprobs_mode=logprobs_mode,
            capacity_tokens=capacity_tokens,
            max_rollouts=max_rollouts,
        )
        return self._drive(op.add_backend(request, self.retry_for))

    def backend(self, backend_id: str) -> Backend:
        """One LLM server."""
        return self._drive(op.backend(backend_id, self.retry_for))

    def drain_backend(self, backend_id: str, drain: bool = True) -> Backend:
        """Let an LLM server take no new rollouts, or with `drain=False` again some; those on it go on."""
        return self._drive(op.drain_backend(backend_id, drain, self.retry_for))

    def remove_backend(self, backend_id: str, force: bool = True) -> None:
        """Take an LLM server out of service; its rollouts move to others at their next call.

        Args:
            force: False = refuse (`ApiError` 409) while it has live rollouts.
        """
        self._drive(op.remove_backend(backend_id, force, self.retry_for))

    def policy(self) -> PolicyStatus:
        """The current policy, the update under way, and the latest ones."""
        return self._drive(policy_op.policy(self.retry_for))

    def update_policy(
        self,
        version: str,
        path: str | None = None,
        *,
        mode: PauseMode = "keep",
        canary: Canary | None = None,
        wait: float = 60.0,
        **more: Any,
    ) -> PolicyUpdate:
        """Bring new weights to the backends.

        Sending the same version and path again is harmless while the first update is under way or once it is
        done; another update meanwhile is refused (`ApiError` 409).

        Args:
            path: Checkpoint directory as the backends see it; None = they have the weights already.
            canary: Token ids and the trainer's log-probs of them; without one nothing is verified.
            wait: Seconds to wait for the end. The update goes on when they are over.
            more: Further fields of `PolicyRequest`.

        Returns:
            The update; look at its `state`, for one that failed raises nothing.
        """
        request = PolicyRequest(version=version, path=path, mode=mode, canary=canary, **more)
        return self._drive(policy_op.update_policy(request, wait, self.retry_for))

    def policy_update(self, update_id: str, wait: float = 0.0) -> PolicyUpdate:
        """One update, once it has ended or after `wait` seconds (at most what the gateway allows)."""
        return self._drive(policy_op.policy_update(update_id, wait, self.retry_for))

    def status(self) -> dict[str, Any]:
        """`{"states": {state: count}, "queues": {name: depth}, "backends": [...], "version"}`."""
        return self._drive(op.status(self.retry_for))

    def ready(self) -> dict[str, Any]:
        """`{"ready": bool, ...}` with what is missing; asks once and raises nothing."""
        return self._drive(op.ready())
