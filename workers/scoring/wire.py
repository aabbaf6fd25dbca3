"""Frames between the worker and a scorer process: a length of four bytes, big endian, then JSON.

JSON and not pickle: what comes back was computed from a model's words, and must be data.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

MAX_FRAME_BYTES = 64 << 20
LEAST_S = 0.001
"""For what came in time while its reader was late."""
_LENGTH = struct.Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    """A frame.

    Raises:
        TypeError: The message holds what JSON cannot carry.
        ValueError: It is longer than `MAX_FRAME_BYTES`, or refers to itself.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes of JSON; a scorer's call takes up to {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive(channel: socket.socket, timeout_s: float | None = None) -> dict[str, Any]:
    """The next frame.

    Raises:
        EOFError: The other side ended.
        TimeoutError: It did not come within `timeout_s` (None = it may take any time).
        ValueError: What came is no frame.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} were expected")
    return json.loads(_read(channel, length, deadline))


def _read(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            channel.settimeout(max(LEAST_S, deadline - time.monotonic()))
        part = channel.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
