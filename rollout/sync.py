"""`Client`: `AsyncClient` for blocking code.

Each method is that of `AsyncClient`, run by an event loop in a thread of the client's own; hence it works
where a loop runs already, as in notebooks. Signatures are told once: `_blocking` and `_iterating` carry them
over, for type checkers, editors and `help()` alike.

What is the caller's own, such as an iterator over requests, is never run by the loop: the thread that waits
for a call does it (`_Original.aside`). There it may use the client, and what it raises leaves the call.

The loop is asyncio's own and its thread a daemon: anyio's blocking portal waits for its thread when it is
collected, and hangs at the end of a program that did not close its client, and in a forked child.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from rollout.async_batches import AsyncBatches
from rollout.async_client import AsyncClient
from rollout.http import Gateway, Wire

P = ParamSpec("P")
T = TypeVar("T")
_END = object()
_ERRANDS: ContextVar[SimpleQueue[Callable[[], None]]] = ContextVar("errands")
"""What the thread that waits for the call under way is to do meanwhile."""


def _carry_over(method: Callable[..., Any], derived: Callable[..., Any]) -> Callable[..., Any]:
    """Give a derived method the name, the text and the signature of its original."""
    functools.update_wrapper(derived, method)
    del derived.__wrapped__  # it returns something else than this one
    signature = inspect.signature(method)
    returned = str(signature.return_annotation).replace("AsyncIterator", "Iterator")
    derived.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    derived.__annotations__ = {**method.__annotations__, "return": returned}
    owner, _, name = method.__qualname__.partition(".")
    derived.__qualname__ = f"{'Batches' if owner == 'AsyncBatches' else 'Client'}.{name}"
    derived.__module__ = __name__
    return derived


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The method that waits for what a coroutine returns."""

    def derived(self: Client | Batches, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(functools.partial(method, self._original, *args, **kwargs))

    return _carry_over(method, derived)


def _iterating(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The method that gives an iterator over what an asynchronous one yields."""

    def derived(self: Client | Batches, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._iterate(method(self._original, *args, **kwargs))

    return _carry_over(method, derived)


def _passed_on(name: str, text: str) -> Any:
    """An attribute that is read from, and written to, the asynchronous client."""

    def write(client: Client, value: Any) -> None:
        setattr(client._original, name, value)

    return property(lambda client: getattr(client._original, name), write, doc=text)


class Client:
    """Synchronous client; usable from several threads. Close it, or use it as a context manager.

    Every method may raise `ApiError` (the gateway refused; the message names the field) and
    `Unavailable` (no gateway for `retry_for` seconds). Iterators that are given are read in the thread
    that calls, and may use the client too.
    """

    def __init__(
        self,
        base_url: str | None = None,
        timeout: float = 30.0,
        retry_for: float = 30.0,
        api_key: str | None = None,
        wire: Wire = "auto",
    ) -> None:
        self._original = _Original(base_url, timeout, retry_for, api_key, wire)
        # Reentrant: a signal's handler and a finalizer may use the client, too.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        _CLIENTS.add(self)

    __init__.__doc__ = Gateway.__init__.__doc__

    base_url = _passed_on("base_url", "The gateway's address.")
    found = _passed_on("found", "The address and how it was found; None = the caller named it.")
    timeout = _passed_on("timeout", "Seconds to wait for one answer, beside what a long-poll waits.")
    retry_for = _passed_on("retry_for", "Seconds during which a request that fails is sent again.")
    auth = _passed_on("auth", "What authorizes requests; None = nothing does.")

    def close(self) -> None:
        """Close the connections; calls of other threads end with an error."""
        self._forbid_own_thread()
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is not None and self._thread is not None:
            _stop(loop)
            self._thread.join()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forbid_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("the client is used by its own event loop, which cannot wait for itself")

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop, which starts at the first call, and anew where it has ended."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the client was closed; make another one")
            if self._loop is None or self._loop.is_closed():
                if self._loop is not None:
                    self._original.forget_connections()
                self._loop = asyncio.new_event_loop()
                arguments = (self._loop, self._lock, self._original)
                self._thread = threading.Thread(
                    target=_serve, args=arguments, name="rollout-client", daemon=True
                )
                self._thread.start()
                # Of a client that nobody closes. At the program's end others may still use it.
                weakref.finalize(self, _stop, self._loop).atexit = False
            return self._loop

    def _call(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._forbid_own_thread()
        inbox: SimpleQueue[Any] = SimpleQueue()
        with self._lock:  # so that what is begun is ended where the loop ends
            loop = self._running()
            future = asyncio.run_coroutine_threadsafe(_attended(inbox, begin), loop)
        future.add_done_callback(inbox.put)
        try:
            while (errand := inbox.get()) is not future:
                errand()
            try:
                return future.result()
            except CancelledError:
                raise RuntimeError("the client was closed during the call") from None
        finally:
            future.cancel()  # where Ctrl-C or an errand ended the wait; what is done it leaves alone

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        # An iterator that is left is closed by the loop, as asyncio does with asynchronous ones.
        loop = self._running()
        while (item := self._call(functools.partial(_next, items))) is not _END:
            yield item
            if loop is not self._loop:
                raise RuntimeError("the iterator belongs to a client that was closed, or to a parent process")

    @property
    def batches(self) -> Batches:
        """Groups of rollouts with dynamic sampling."""
        return Batches(self)

    submit = _blocking(AsyncClient.submit)
    fork = _blocking(AsyncClient.fork)
    checkpoints = _blocking(AsyncClient.checkpoints)
    put_bundle = _blocking(AsyncClient.put_bundle)
    get = _blocking(AsyncClient.get)
    wait = _blocking(AsyncClient.wait)
    list = _blocking(AsyncClient.list)
    page = _blocking(AsyncClient.page)
    agent = _blocking(AsyncClient.agent)
    cancel = _blocking(AsyncClient.cancel)
    cancel_many = _blocking(AsyncClient.cancel_many)
    ack = _blocking(AsyncClient.ack)
    results = completions = _blocking(AsyncClient.results)
    stream = _iterating(AsyncClient.stream)
    rollouts = _iterating(AsyncClient.rollouts)
    run = _blocking(AsyncClient.run)
    stream_results = stream_completions = _iterating(AsyncClient.stream_results)
    batch = _iterating(AsyncClient.batch)
    handlers = _blocking(AsyncClient.handlers)
    backends = _blocking(AsyncClient.backends)
    add_backend = _blocking(AsyncClient.add_backend)
    backend = _blocking(AsyncClient.backend)
    drain_backend = _blocking(AsyncClient.drain_backend)
    remove_backend = _blocking(AsyncClient.remove_backend)
    policies = _blocking(AsyncClient.policies)
    policy = _blocking(AsyncClient.policy)
    update_policy = _blocking(AsyncClient.update_policy)
    forget_policy = _blocking(AsyncClient.forget_policy)
    policy_update = _blocking(AsyncClient.policy_update)
    report = _blocking(AsyncClient.report)
    reports = _blocking(AsyncClient.reports)
    status = _blocking(AsyncClient.status)
    fleet = _blocking(AsyncClient.fleet)
    ready = _blocking(AsyncClient.ready)


class Batches:
    """The batches of a service. Every method may raise `ApiError` and `Unavailable`."""

    def __init__(self, client: Client) -> None:
        self._original = client._original.batches
        self._call, self._iterate = client._call, client._iterate

    create = _blocking(AsyncBatches.create)
    get = _blocking(AsyncBatches.get)
    list = _blocking(AsyncBatches.list)
    groups = _blocking(AsyncBatches.groups)
    stream = _iterating(AsyncBatches.stream)
    watch = _iterating(AsyncBatches.watch)
    extend = _blocking(AsyncBatches.extend)
    pause = _blocking(AsyncBatches.pause)
    resume = _blocking(AsyncBatches.resume)
    cancel = _blocking(AsyncBatches.cancel)


class _Original(AsyncClient):
    """The client from which a synchronous one is derived."""

    async def aside(self, function: Callable[[], T]) -> T:
        outcome: Future[T] = Future()

        def errand() -> None:
            if outcome.set_running_or_notify_cancel():
                # What it raises ends the call, which is cancelled then.
                outcome.set_result(function())

        _ERRANDS.get().put(errand)
        return await asyncio.wrap_future(outcome)


# ---------------------------------------------------------------------------------- the loop


def _serve(loop: asyncio.AbstractEventLoop, lock: AbstractContextManager[Any], client: AsyncClient) -> None:
    """Run the loop until it is stopped; then end what is under way, so that nobody waits for ever."""
    try:
        loop.run_forever()
    finally:
        with lock:
            loop.run_until_complete(_end(client))
            loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it has ended already
        loop.call_soon_threadsafe(loop.stop)


async def _attended(inbox: SimpleQueue[Any], begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do a call that the thread attends which reads this inbox."""
    _ERRANDS.set(inbox)
    return await begin()


async def _next(items: AsyncIterator[T]) -> T | object:
    return await anext(items, _END)


async def _end(client: AsyncClient) -> None:
    """End what is under way, and close the connections."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await client.close()


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked child: the threads of the parent are not there, and its connections remain the parent's."""
    for client in [*_CLIENTS]:
        client._lock, client._loop, client._thread = threading.RLock(), None, None
        client._original.forget_connections()


os.register_at_fork(after_in_child=_begin_anew)
