"""How large values are kept in Redis: as records or compressed, and read back whatever their form.

A trajectory is kept as the record that goes over the wire (`rollout.arrays`), so that the gateway passes it
on without reading it. A value without a marker is text as it is, so what was written before there were
records, or compression, stays readable. The bytes do not pass through the connection's decoding of strings.
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Generator, Sequence
from typing import Any

import redis
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from redis.client import NEVER_DECODE

from rollout import arrays as wire
from rollout.trajectory import Trajectory

ZLIB = b"\x01"
"""First byte of a compressed value; no JSON text begins with it."""
OLD_RECORD = b"\x02"
"""First byte before a trajectory's record as it was kept once; a record begins by itself as no text does."""
LEAST_REPLY = 3
"""Bytes of the shortest reply for a value: that there is none."""
LEAST_BYTES = 1024
"""Shorter values gain next to nothing."""
LEVEL = 1
"""Higher levels take twice the time and more for a few percent."""


class PayloadError(ValueError):
    """A stored value cannot be read; the message says why."""


def encode(text: str) -> bytes:
    """The form in which a value is stored."""
    raw = text.encode()
    if len(raw) < LEAST_BYTES:
        return raw
    packed = ZLIB + zlib.compress(raw, LEVEL)
    return packed if len(packed) < len(raw) else raw


def decode(stored: bytes) -> str:
    """The text of a stored value.

    Raises:
        PayloadError: It is damaged, or a newer version of the service wrote it.
    """
    try:
        if stored[:1] == ZLIB:
            return zlib.decompress(stored[1:]).decode()
        if stored[:1] and stored[0] < 0x09:
            raise PayloadError(
                f"a stored value begins with the marker {stored[0]}, which this version does not know; "
                "upgrade this process to the version that wrote it"
            )
        return stored.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise PayloadError(f"a stored value of {len(stored)} bytes is damaged: {error}") from error


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The form in which a trajectory is stored: its record, or JSON where no record can hold it."""
    try:
        return _encode_trajectory(trajectory)
    except PydanticSerializationError:
        # A model may write half a surrogate pair into a tool call, and a handler into an artifact.
        return _encode_trajectory(Trajectory.model_validate(_with_whole_characters(trajectory.model_dump())))


def _encode_trajectory(trajectory: Trajectory) -> bytes:
    try:
        return wire.encode(trajectory)
    except (
        wire.WireError
    ):  # ids of more than 32 bits, say: no engine's, but a handler may write what it likes
        return encode(trajectory.model_dump_json())


def _with_whole_characters(value: Any) -> Any:
    """A value in which `?` stands for what UTF-8 cannot hold."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_with_whole_characters(name): _with_whole_characters(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_characters(item) for item in value]
    return value


def decode_trajectory(stored: bytes) -> Trajectory:
    """The trajectory of a stored value of any form.

    Raises:
        PayloadError: It is damaged, or a newer version of the service wrote it.
    """
    try:
        if wire.is_record(stored):
            return wire.decode(stored).trajectory()
        if stored[:1] == OLD_RECORD:
            return wire.decode(stored[1:]).trajectory()
        return Trajectory.model_validate_json(decode(stored))
    except (wire.WireError, ValidationError) as error:
        raise PayloadError(f"a stored trajectory of {len(stored)} bytes cannot be read: {error}") from error


def record(stored: bytes) -> bytes | None:
    """The record of a stored trajectory: as it lies there, or made from what is older.

    None: no record can hold it.

    Raises:
        PayloadError: It is damaged, or a newer version of the service wrote it.
    """
    if wire.is_record(stored):
        return stored
    try:
        return wire.encode(decode_trajectory(stored))
    except wire.WireError:
        return None


def get(client: redis.Redis, key: str) -> Any:
    """GET that leaves bytes alone: bytes or None, or in a pipeline the promise of them."""
    return client.execute_command("GET", key, **{NEVER_DECODE: True})


def get_many(client: redis.Redis, names: Sequence[str]) -> Any:
    """MGET that leaves bytes alone: bytes or None for each name, or in a pipeline the promise of them.

    One command: a reply for each value costs the reader as much time as the value itself.
    """
    return client.execute_command("MGET", *names, **{NEVER_DECODE: True})


def stream(client: redis.Redis, names: Sequence[str], sizes: Sequence[int]) -> Generator[bytes]:
    """The values of these sizes, one after the other, each read when it is asked for.

    For what is large. A client of Redis takes a reply in by pieces, joins them, and copies each value out of
    it: most of what it costs to pass trajectories on. Here a value goes from the socket into the bytes that
    are yielded. The reply waits in Redis for a reader that is slow, so it should not be too long.

    Raises:
        PayloadError: A value is not there any more, or has another size by now.
        redis.RedisError: As any command; nothing is tried again.
    """
    connection = client.connection_pool.get_connection()
    try:
        if isinstance(connection, redis.SSLConnection):  # what it decrypts cannot be had in one piece
            connection.send_command("MGET", *names)
            for name, size, value in zip(names, sizes, connection.read_response(True), strict=True):
                if value is None or len(value) != size:
                    raise _changed(name)
                yield value
            return
        connection.send_command("MGET", *names)
        with _Whole(connection._sock) as reply:
            before = b"*%d\r\n" % len(names)
            for name, size in zip(names, sizes, strict=True):
                if not reply.goes_on(before, b"$%d\r\n" % size):
                    raise _changed(name)
                yield reply.take(size)
                before = b"\r\n"
            reply.take(len(before))
    except BaseException:
        # Also when the reader of this has gone: what was not read must not be the next reply.
        connection.disconnect()
        raise
    finally:
        client.connection_pool.release(connection)


def _changed(name: str) -> PayloadError:
    return PayloadError(f"{name} is not what it was a moment ago: it was dropped, or the rollout goes on")


class _Whole:
    """A socket that gives as many bytes as it is asked for, in one call."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._timeout = connected, connected.gettimeout()

    def __enter__(self) -> _Whole:
        # With a timeout of Python's a socket gives what it has; with one of the kernel's it waits for all.
        self._limit(self._timeout or 0.0)
        self._socket.settimeout(None)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.settimeout(self._timeout)
        self._limit(0.0)

    def _limit(self, seconds: float) -> None:
        whole, rest = divmod(seconds, 1.0)
        packed = struct.pack("ll", int(whole), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)

    def goes_on(self, before: bytes, head: bytes) -> bool:
        """Whether this comes next. Never waits for more than there is in any reply."""
        sure = self.take(len(before) + LEAST_REPLY)
        if sure[:1] == b"-":
            raise redis.ResponseError("Redis refuses to read trajectories; its log or ACL may say why")
        head = before + head
        return head.startswith(sure) and self.take(len(head) - len(sure)) == head[len(sure) :]

    def take(self, size: int) -> bytes:
        try:
            found = self._socket.recv(size, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise redis.TimeoutError("Timeout reading from socket") from error
        except OSError as error:
            raise redis.ConnectionError(f"Error while reading from socket: {error}") from error
        if len(found) < size:
            raise redis.ConnectionError(f"the reply ended {size - len(found)} bytes early")
        return found
