"""The outer half of `server/bridge.py`, which knows what a request is; here are bytes alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

from sandbox import connection
from sandbox.connection import Address
from sandbox.errors import SandboxError

LISTEN_S, CONNECT_S, PAUSE_S = 30.0, 10.0, 0.2  # the last after a connection that was not taken or kept
PIECE_BYTES, BUFFER_BYTES = 64 << 10, 1 << 20
GONE = (FileNotFoundError, ConnectionRefusedError)  # said of a server that has ended; it never comes back


class Tunnel:
    """Leads what programs in a sandbox say to a loopback port to one address outside, while the block lasts.

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
        """Begin. Raises SandboxGone, SandboxTimeout, SandboxRequestError (a release without a way out)."""
        answer = await connection.exchange(self._address, {"op": "listen", "port": 0}, LISTEN_S)
        self.port, self._turn = answer["port"], answer["turn"]
        for _ in range(self._ready):
            self._begin(self._lead())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Break off what is under way; another tunnel can go on with what was not answered yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def led(self) -> tuple[int, bool]:
        """How many requests of all tunnels nobody answered, and whether the last try to have one answered
        failed. Raises SandboxGone, SandboxTimeout.
        """
        answer = await connection.exchange(self._address, {"op": "led"}, LISTEN_S)
        return answer["unanswered"], answer["cut_off"]

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _lead(self) -> None:
        """Wait for a request on one connection after the other; lead it out while another task waits."""
        while not self.gone.is_set():
            try:
                reader, writer = await asyncio.open_unix_connection(self._address.path, limit=BUFFER_BYTES)
                with contextlib.closing(writer):
                    writer.write(self._address.greeting())
                    await connection.send(writer, {"op": "accept", "turn": self._turn})
                    reply = await connection.receive(reader)
                    if reply is not None:
                        connection.result_of(reply, self._address)
                        self._begin(self._lead())
                        await self._pass(reader, writer)
                        return
            except (SandboxError, *GONE):  # a server that has ended, or that has another tunnel
                self.gone.set()
            except OSError:
                pass  # the server is slow to take connections
            await asyncio.sleep(PAUSE_S)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer. Whichever side ends, the other is ended at once."""
        with contextlib.suppress(OSError):  # nobody is there (yet): the sandbox's server sends it again
            answer, target = await asyncio.wait_for(asyncio.open_connection(*self._target), CONNECT_S)
            with contextlib.closing(target):
                out = self._begin(_pump(reader, target))
                out.add_done_callback(lambda _: target.transport.abort())
                await _pump(answer, writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one of the two ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
