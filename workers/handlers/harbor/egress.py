"""A proxy on the worker by which programs of one sandbox reach some hosts, and nothing of the operator's.

It takes `CONNECT` and requests with a whole URL (`GET http://host/…`), as programs send that know
`HTTP_PROXY`. A name is resolved here, once, its addresses are checked, and the connection goes to one that
was checked: a name that changes its mind leads nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from services.webhook_address import AddressRefused, AllowedAddresses

HEAD_BYTES = PIECE_BYTES = 64 << 10
HEAD_S, CONNECT_S = 60.0, 20.0
IDLE_S = 600.0
"""Without a byte in either direction a connection is ended."""
MOST_CONNECTIONS = 256
MOST_OPEN = 512
"""Those included that have not said yet what they want."""
MOST_LOOKUPS = 4
"""Of one proxy at once: a name may be made so that its server never answers."""
NO_PORTS = frozenset((25,))
"""Mail between servers, which nobody's work needs, and by which an operator's address is soon barred."""
EVERY_HOST = "*"

_lookups = ThreadPoolExecutor(16, thread_name_prefix="egress")
"""Not the event loop's own threads: a name that is never resolved must not keep handlers from theirs."""

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a name, best first. Raises OSError."""


class Refused(Exception):
    """The proxy's own answer: a status of HTTP and why."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """As the worker's machine does it."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_lookups, look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(host: str, address: str) -> bool:
    """Whether an address is routed on the internet, leads to none that is not, and is not this machine's."""
    try:
        parsed = ip_address(address.partition("%")[0])
        AllowedAddresses("public").check_address(host, parsed)
    except (AddressRefused, ValueError):
        return False
    if isinstance(parsed, IPv6Address) and not any(parsed in network for network in _ROUTED):
        return False
    return not _is_ours(parsed)


_ROUTED = tuple(map(IPv6Network, ("2000::/3", "64:ff9b::/96", "::ffff:0:0/96")))
"""Where public addresses of IPv6 are; others lead to IPv4 behind translators, or are no more."""


def _is_ours(address: IPv4Address | IPv6Address) -> bool:
    """Whether this machine has it: from here, what it serves is reached behind its firewall."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))  # sends nothing; what is here is reached by its own address
            return ip_address(probe.getsockname()[0].partition("%")[0]) == address
        except OSError:
            return False


class Egress:
    """The proxy, while the block lasts."""

    def __init__(
        self,
        hosts: Sequence[str],
        resolver: Resolver = resolve,
        is_allowed: Callable[[str, str], bool] = is_public,
    ) -> None:
        """
        Args:
            hosts: `example.org` is that host alone, `*.example.org` and `.example.org` are those below it, an
                address or network is what is asked for by such an address; `*` = every host.
            resolver, is_allowed: Others are for tests.
        """
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._below = tuple(host.removeprefix("*") for host in self._hosts if host.startswith(("*.", ".")))
        self._networks = [network for host in self._hosts if (network := _network(host)) is not None]
        self._resolver, self._is_allowed = resolver, is_allowed
        self._open: set[asyncio.Task[None]] = set()
        self._lookups = asyncio.Semaphore(MOST_LOOKUPS)
        self.port = 0
        """Of 127.0.0.1 on this machine."""
        self.refused: set[str] = set()
        """The first hundred hosts that were asked for and refused."""

    async def __aenter__(self) -> Egress:
        self._server = await asyncio.start_server(self._attend, "127.0.0.1", 0, limit=HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def knows(self, host: str) -> bool:
        """Whether the list has it."""
        host = host.lower().rstrip(".")
        if EVERY_HOST in self._hosts or host in self._hosts or host.endswith(self._below or ("\0",)):
            return True
        asked = _network(host)
        return asked is not None and any(
            asked.version == network.version and asked.subnet_of(network)  # type: ignore[arg-type]
            for network in self._networks
        )

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) > MOST_OPEN:
                return
            async with asyncio.timeout(HEAD_S):
                host, port, first = _target(await reader.readuntil(b"\r\n\r\n"))
            if len(self._open) > MOST_CONNECTIONS:
                raise Refused(503, f"more than {MOST_CONNECTIONS} connections at once")
            out_reader, out_writer = await self._connect(host, port)
            try:
                out_writer.write(first)
                if not first:
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _join(reader, writer, out_reader, out_writer)
            finally:
                out_writer.transport.abort()
        except Refused as refusal:
            status, why = refusal.args
            head = f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
            with contextlib.suppress(OSError):
                writer.write(f"{head}{why}\n".encode())
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # the program is gone, or does not say what it wants
        finally:
            self._open.discard(task)
            writer.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self.knows(host):
            raise self._refusal(host, "is not among the hosts that this task may reach")
        if port in NO_PORTS:
            raise self._refusal(host, f"is not reached at port {port}")
        try:
            async with asyncio.timeout(CONNECT_S):
                async with self._lookups:
                    addresses = await self._resolver(host, port)
                # One that is not public among them is a trick, or a machine of the operator's.
                if not addresses or not all(self._is_allowed(host, address) for address in addresses):
                    raise self._refusal(host, "has an address that is not public")
                return await asyncio.open_connection(addresses[0], port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Refused(502, f"{host} port {port} cannot be reached: {error or 'no answer'}") from error

    def _refusal(self, host: str, why: str) -> Refused:
        if len(self.refused) < 100:
            self.refused.add(host)
        return Refused(403, f"{host} {why}")


def _network(text: str) -> IPv4Network | IPv6Network | None:
    """An address or a network; None = a name."""
    try:
        return ip_network(text)
    except ValueError:
        return None


_OURS = ("proxy-", "x-rollout-")
"""Beginnings of headers that are not the server's; the last are the sandbox's own."""
_ANEW = ("connection", "host", "keep-alive")


def _target(head: bytes) -> tuple[str, int, bytes]:
    """Host, port and what goes there first: nothing, where the program has asked for a connection. Refused
    where the request is none for a proxy."""
    try:
        first, *lines = said = head.decode("latin-1")[:-4].split("\r\n")
        method, target, version = first.split(" ")
        connects = method == "CONNECT"
        parts = urlsplit(f"http://{target}" if connects else target)
        host, port = parts.hostname, parts.port or (None if connects else 80)
        if parts.scheme != "http" or not (host and port and version.startswith("HTTP/1.")):
            raise ValueError("it names no host and port, or another scheme than http")
        if any(line.startswith((" ", "\t")) or {"\r", "\n", "\0"} & {*line} for line in said):
            raise ValueError("it has a header of several lines")
    except ValueError as error:
        raise Refused(400, f"this is a proxy, and the request is none for it: {error}") from None
    if connects:
        return host, port, b""
    path = parts._replace(scheme="", netloc="", fragment="").geturl()
    names = [(line.partition(":")[0].strip().lower(), line) for line in lines]
    kept = [line for name, line in names if name not in _ANEW and not name.startswith(_OURS)]
    # The host that was checked. One request a connection; its body follows as it comes.
    place = parts.netloc.rpartition("@")[2]
    told = [f"{method} /{path.removeprefix('/')} HTTP/1.1", f"Host: {place}", *kept, "Connection: close"]
    told += ["", ""]
    return host, port, "\r\n".join(told).encode("latin-1")


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    out_reader: asyncio.StreamReader,
    out_writer: asyncio.StreamWriter,
) -> None:
    """Copy in both directions until the side outside ends, or nobody has said anything for long."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_S) as idle:

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(PIECE_BYTES):
                target.write(data)
                await target.drain()
                idle.reschedule(loop.time() + IDLE_S)
            with contextlib.suppress(OSError):
                target.write_eof()

        saying = asyncio.create_task(copy(reader, out_writer))
        try:
            await copy(out_reader, writer)
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)
