"""How large values are kept in Redis: as records or compressed, and read back whatever their form.

A trajectory is kept as the record that goes over the wire (`rollout.wire`), so that the gateway passes it on
without reading it. A value without a marker is text as it is, so what was written before there were records,
or compression, stays readable. The bytes do not pass through the connection's decoding of strings.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import redis
from pydantic import ValidationError
from redis.client import NEVER_DECODE

from rollout import wire
from rollout.trajectory import Trajectory

ZLIB = b"\x01"
"""First byte of a compressed value; no JSON text begins with it."""
RECORD = b"\x02"
"""First byte of a trajectory's record."""
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
        return RECORD + wire.encode(trajectory)
    except (
        wire.WireError
    ):  # ids of more than 32 bits, say: no engine's, but a handler may write what it likes
        return encode(trajectory.model_dump_json())


def decode_trajectory(stored: bytes) -> Trajectory:
    """The trajectory of a stored value of any form.

    Raises:
        PayloadError: It is damaged, or a newer version of the service wrote it.
    """
    try:
        if stored[:1] == RECORD:
            return wire.decode(stored[1:]).trajectory()
        return Trajectory.model_validate_json(decode(stored))
    except (wire.WireError, ValidationError) as error:
        raise PayloadError(f"a stored trajectory of {len(stored)} bytes cannot be read: {error}") from error


def record(stored: bytes) -> bytes | memoryview:
    """The record of a stored trajectory, for the wire: as it lies there, or made from what is older.

    Raises:
        PayloadError: It is damaged, or a newer version of the service wrote it.
        WireError: It is JSON that no record can hold.
    """
    return memoryview(stored)[1:] if stored[:1] == RECORD else wire.encode(decode_trajectory(stored))


def get(client: redis.Redis, key: str) -> Any:
    """GET that leaves bytes alone: bytes or None, or in a pipeline the promise of them."""
    return client.execute_command("GET", key, **{NEVER_DECODE: True})


def get_many(client: redis.Redis, names: Sequence[str]) -> Any:
    """MGET that leaves bytes alone: bytes or None for each name, or in a pipeline the promise of them.

    One command: a reply for each value costs the reader as much time as the value itself.
    """
    return client.execute_command("MGET", *names, **{NEVER_DECODE: True})
