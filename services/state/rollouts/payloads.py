"""How trajectories are kept in Redis, and read back.

A trajectory is kept as the record that goes over the wire (`rollout.arrays`), so that the gateway passes it
on without reading it. The bytes do not pass through the connection's decoding of strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from redis.client import NEVER_DECODE

from rollout import arrays
from rollout.trajectory import Trajectory


class PayloadError(ValueError):
    """A stored trajectory cannot be read; the message says why."""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The form in which a trajectory is stored: its record, or JSON where no record can hold it."""
    try:
        return _encode(trajectory)
    except PydanticSerializationError:
        # A model may write half a surrogate pair into a tool call, and a handler into an artifact.
        return _encode(Trajectory.model_validate(with_whole_characters(trajectory.model_dump())))


def _encode(trajectory: Trajectory) -> bytes:
    try:
        return arrays.encode(trajectory)
    except arrays.WireError:
        # Ids of more than 32 bits, say: no engine's, but a handler may write what it likes.
        return trajectory.model_dump_json().encode()


def with_whole_characters(value: Any) -> Any:
    """A value in which `?` stands for what UTF-8 cannot hold, and a list for a tuple."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {with_whole_characters(name): with_whole_characters(item) for name, item in value.items()}
    return [with_whole_characters(item) for item in value] if isinstance(value, list | tuple) else value


def decode_trajectory(stored: bytes) -> Trajectory:
    """The trajectory of a stored value of either form.

    Raises:
        PayloadError: It is damaged, or a newer version of the service wrote it.
    """
    try:
        if arrays.is_record(stored):
            return arrays.decode(stored).trajectory()
        return Trajectory.model_validate_json(stored)
    except (arrays.WireError, ValidationError) as error:
        raise PayloadError(f"a stored trajectory of {len(stored)} bytes cannot be read: {error}") from error


def get(client: redis.Redis, key: str) -> Any:
    """GET that leaves bytes alone: bytes or None, or in a pipeline the promise of them."""
    return client.execute_command("GET", key, **{NEVER_DECODE: True})


def get_many(client: redis.Redis, names: Sequence[str]) -> Any:
    """MGET that leaves bytes alone: bytes or None for each name, or in a pipeline the promise of them.

    One command: a reply for each value costs the reader as much time as the value itself.
    """
    return client.execute_command("MGET", *names, **{NEVER_DECODE: True})
