"""Frames between the worker and a scorer process: a length of four bytes, big endian, then JSON.

JSON and not pickle: what comes back was computed from a model's words, and must be data.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

MAX_FRAME_BYTES = 64 << 20
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


async def read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next frame, on the worker's side.

    Raises:
        asyncio.IncompleteReadError: The other side ended.
        ValueError: What came is no frame.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} were expected")
    return json.loads(await reader.readexactly(length))


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next frame, on the child's side; None: the worker is gone."""
    # The worker sends no further frame before this one is answered: nothing is read ahead.
    with channel.makefile("rb") as stream:
        header = stream.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        body = stream.read(length)
    return json.loads(body) if len(body) == length else None
