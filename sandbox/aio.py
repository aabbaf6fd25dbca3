"""The frames of `server/wire.py` over asyncio, and one exchange with a Unix socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from sandbox import errors
from sandbox.address import Address
from sandbox.server import wire

STREAM_BUFFER_BYTES = 1 << 20

T = TypeVar("T")


class NotListening(errors.SandboxGone):
    """Nobody took the connection, so nothing of the request was done."""


async def connect(address: str | Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a Unix socket and show its key. Raises NotListening when nobody is there."""
    address = Address.parse(address)
    try:
        reader, writer = await asyncio.open_unix_connection(address.path, limit=STREAM_BUFFER_BYTES)
    except OSError as error:
        raise NotListening(f"nobody listens on {address}: {error}") from error
    writer.write(address.greeting())
    return reader, writer


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Write one frame."""
    writer.write(wire.encode(message))
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Read one frame; None when the peer closed the connection."""
    try:
        size = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))[0]
        wire.check_size(size)
        return json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def result_of(reply: dict[str, Any] | None, socket_path: str | Address) -> dict[str, Any]:
    """The result in a reply. Raises what the other side reports, or SandboxGone when there was no reply."""
    if reply is None:
        raise errors.SandboxGone(f"the connection to {socket_path} was closed before the answer came")
    if not reply.get("ok"):
        raise errors.from_wire(reply.get("error", {}))
    return reply["result"]


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking function in a thread and, even when cancelled, wait until it has ended."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # taken note of; the cancellation is what counts
        raise


async def exchange(address: str | Address, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """One request on a connection of its own. Raises SandboxGone, SandboxTimeout or what the other side
    reports.
    """
    address = Address.parse(address)
    reader, writer = await connect(address)
    try:
        async with asyncio.timeout(timeout):
            await send(writer, request)
            return result_of(await receive(reader), address)
    except TimeoutError as error:
        raise errors.SandboxTimeout(
            f"no answer to {request['op']!r} from {address} in {timeout:g} s"
        ) from error
    except ConnectionError as error:
        raise errors.SandboxGone(f"the connection to {address} broke: {error}") from error
    finally:
        writer.close()
