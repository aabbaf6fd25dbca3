"""Bodies of large answers, read from the socket into one buffer.

httpx takes a body in pieces of 64 KiB, copies each several times, and joins them in the end: for trajectories
that is most of a client's time. Here httpx sends the request and reads the head and the first piece; the rest
comes straight from the connection, which its `network_stream` extension gives. Such a connection is closed
afterwards, since httpx cannot know that its answer was read to the end: hence only for large answers, without
compression and without TLS, where a new connection costs little.
"""

from __future__ import annotations

from typing import Any

import httpcore
import httpx

LEAST_BYTES = 1 << 20
"""Of a body; a shorter one takes httpx less time than a new connection."""
PIECE_BYTES = 1 << 20
"""Most that an asynchronous connection is asked for at once."""
_BODY = "rollout.body"


def take(response: httpx.Response) -> bytes | bytearray:
    """The body of an answer that `read` or `aread` read; a large one can be had once.

    A response is part of a cycle: what it held would stay until Python's collector of garbage comes by.
    """
    body: _Body | None = response.extensions.pop(_BODY, None)
    return response.content if body is None else body.whole


def read(response: httpx.Response) -> None:
    """Read the body of a response that streams.

    Raises:
        httpx.TransportError: The connection broke, or nothing came for the read timeout.
    """
    body = _Body.of(response)
    if body is None:
        response.read()
        return
    pieces = response.iter_raw()
    body.add(next(pieces))
    # Its timeout is still that of httpx's last read.
    receive_into = body.stream.get_extra_info("socket").recv_into
    try:
        while len(body.rest):
            body.count(receive_into(body.rest))
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except OSError as error:
        raise httpx.ReadError(str(error)) from error
    response.extensions[_BODY] = body


async def aread(response: httpx.Response) -> None:
    """As `read`, for a response of an asynchronous client."""
    body = _Body.of(response)
    if body is None:
        await response.aread()
        return
    pieces = response.aiter_raw()
    body.add(await anext(pieces))
    timeout = response.request.extensions["timeout"]["read"]
    try:
        while len(body.rest):
            body.add(await body.stream.read(min(len(body.rest), PIECE_BYTES), timeout=timeout))
    except (httpcore.TimeoutException, httpcore.NetworkError) as error:
        # httpx names its errors as httpcore does.
        raise getattr(httpx, type(error).__name__)(str(error)) from error
    finally:
        await pieces.aclose()
    response.extensions[_BODY] = body


class _Body:
    """A body, and the place of what is not there yet."""

    def __init__(self, stream: Any, size: int) -> None:
        self.stream = stream
        self.whole = bytearray(size)
        self.rest = memoryview(self.whole)

    @classmethod
    def of(cls, response: httpx.Response) -> _Body | None:
        """None: httpx is to read it."""
        stream, headers = response.extensions.get("network_stream"), response.headers
        size = headers.get("content-length", "")
        if not response.is_success or stream is None or not size.isdecimal() or int(size) < LEAST_BYTES:
            return None
        if "transfer-encoding" in headers or headers.get("content-encoding", "identity") != "identity":
            return None
        if response.http_version != "HTTP/1.1" or stream.get_extra_info("ssl_object") is not None:
            return None
        return cls(stream, int(size))

    def add(self, piece: bytes) -> None:
        self.rest[: len(piece)] = piece
        self.count(len(piece))

    def count(self, received: int) -> None:
        """So many bytes more are there.

        Raises:
            httpx.RemoteProtocolError: None: the other side has closed the connection.
        """
        if not received:
            there, size = len(self.whole) - len(self.rest), len(self.whole)
            raise httpx.RemoteProtocolError(
                f"peer closed connection without sending complete message body (received {there} bytes, "
                f"expected {size})"
            )
        self.rest = self.rest[received:]
