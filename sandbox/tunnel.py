"""Leads what programs in a sandbox say to a loopback port to one address outside: `Tunnel`.

Bytes alone: what a request is, and that it goes out again when nothing of an answer came, the sandbox's own
server knows (`server/bridge.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

from sandbox import connection
from sandbox.connection import Address, NotListening, Streams
from sandbox.errors import SandboxError

LISTEN_S = 30.0
CONNECT_S = 10.0
PIECE_BYTES = 64 << 10
PAUSE_S = 0.2
"""After a connection that the sandbox did not take or keep."""
GONE = (FileNotFoundError, ConnectionRefusedError)
"""How connecting to a server that has ended fails; it never comes back."""


class Tunnel:
    """The way out of one sandbox, for as long as the block lasts.

    The latest one of a sandbox leads, in whichever process it is; the ones before end with :attr:`gone`.
    """

    def __init__(self, socket: str | Address, host: str, port: int, *, ready: int = 4) -> None:
        """`socket`: `SandboxInfo.socket`. `host`, `port`: where requests are led to. `ready`: how many
        connections wait for the next ones; more requests at once wait a moment.
        """
        self._address = Address.parse(socket)
        self._target = (host, port)
        self._ready = ready
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        """Of 127.0.0.1 in the sandbox; the same for every tunnel of it."""
        self.gone = asyncio.Event()
        """Set when the sandbox has ended, or another tunnel leads out of it."""

    async def __aenter__(self) -> Tunnel:
        """Begin. Raises SandboxGone, SandboxTimeout, or SandboxRequestError for a sandbox of a release without
        a way out.
        """
        answer = await connection.exchange(self._address, {"op": "listen", "port": 0}, LISTEN_S)
        self.port, self._turn = answer["port"], answer["turn"]
        for _ in range(self._ready):
            self._begin(self._accept())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Break off what is under way; another tunnel can go on with what was not answered yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        """Keep one connection waiting for a request, and another as soon as one came."""
        while not self.gone.is_set():
            try:
                inside = await connection.connect(self._address)
                if await self._request_comes(inside):
                    self._begin(self._lead_out(inside))
                    continue
            except NotListening as error:
                if isinstance(error.__cause__, GONE):
                    self.gone.set()
            except SandboxError:  # SandboxTaken, or a server that does not know us
                self.gone.set()
            except OSError:
                pass  # the server is slow to take connections
            if not self.gone.is_set():
                await asyncio.sleep(PAUSE_S)

    async def _request_comes(self, inside: Streams) -> bool:
        """Whether one comes on this connection before it breaks. Raises SandboxTaken."""
        came = False
        try:
            await connection.send(inside[1], {"op": "accept", "turn": self._turn})
            reply = await connection.receive(inside[0])
            came = reply is not None and bool(connection.result_of(reply, self._address))
        finally:
            if not came:
                inside[1].transport.abort()
        return came

    async def _lead_out(self, inside: Streams) -> None:
        """One request and its answer. Whichever side ends, the other is ended at once."""
        pumps: list[asyncio.Task[None]] = []
        writers = [inside[1]]
        try:
            async with asyncio.timeout(CONNECT_S):
                outside = await asyncio.open_connection(*self._target)
            writers.append(outside[1])
            for writer in writers:
                writer.transport.set_write_buffer_limits(0)  # what is drained has left us
            ways = (inside[0], outside[1]), (outside[0], inside[1])
            pumps = [asyncio.create_task(_pump(*way)) for way in ways]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # nobody is there (yet); the sandbox's server asks again
        finally:
            for pump in pumps:
                pump.cancel()
            for writer in writers:
                writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one of the two ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
