"""The clients of sandboxes and of their host for tests, which are plain functions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import connection
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxInfo, SandboxSpec
from tests.helpers.sandboxes import leftovers, new_state


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread, for the rest of the program."""
    endless = asyncio.new_event_loop()
    threading.Thread(target=endless.run_forever, name="portal", daemon=True).start()
    return endless


class Portal:
    """Shows an object of asyncio as a blocking one: a call of a coroutine waits for it."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._original, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute
        return lambda *args, **kwargs: asyncio.run_coroutine_threadsafe(
            attribute(*args, **kwargs), loop()
        ).result()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class SyncSandboxClient(Portal):
    """`SandboxClient` for blocking code; safe to share between threads."""

    def __init__(self, address: str) -> None:
        super().__init__(SandboxClient(address))


class SyncHostClient(Portal):
    """`HostClient` for blocking code."""

    def __init__(self, state: Any = None) -> None:
        super().__init__(HostClient(state))


def exchange(address: Any, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """`sandbox.connection.exchange` for blocking code."""
    return asyncio.run_coroutine_threadsafe(connection.exchange(address, request, timeout), loop()).result()


@contextlib.contextmanager
def private_host(
    state: Path | None = None, runtime: str = "local-unsafe", **settings: object
) -> Iterator[SyncHostClient]:
    """A host of one's own, started with these variables; afterwards nothing of it is left.

    `runtime`: one that it gives, for it reads its settings with a first start.
    """
    host = SyncHostClient(state or new_state())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, str(value))
        host.release(host.start(SandboxSpec(runtime=runtime)).id)
    yield host
    host.stop()
    assert leftovers(host.state) == []
    shutil.rmtree(host.state)


@contextlib.contextmanager
def sandbox_of(host: SyncHostClient, **spec: Any) -> Iterator[tuple[SandboxInfo, SyncSandboxClient]]:
    """A sandbox of a host, and a client of it, for the block."""
    info = host.start(SandboxSpec(**spec))
    try:
        with SyncSandboxClient(info.socket) as client:
            yield info, client
    finally:
        host.release(info.id)
