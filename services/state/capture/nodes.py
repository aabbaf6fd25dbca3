"""The nodes of a session's tree: a turn of the model each, with what came before it behind its parent's.

They are kept as a list in the order in which they were written, so a node is named by its place. Each is a
msgpack array; ids are packed int32, log-probs float32 where that is exact. Messages are JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct

ROOT = -1
"""Parent of a node whose prompt was rendered from its beginning."""


class Node(Struct, array_like=True):
    """A model call that was answered."""

    call_id: str
    parent: int
    """Place of the node whose conversation the call repeated; `ROOT` = none."""
    path: bytes
    """Digest of tools and messages up to the answer, included; see `services/capture/matching.py`."""
    ids: bytes
    """Given ids behind the parent's last sampled one: of a root the whole prompt."""
    messages: str
    """What they say: of a root all messages of the call, else those behind the parent's answer."""
    tools: str
    """Of a root, and where they are others than the parent's: the tools offered (JSON); empty = none."""
    sampled: bytes
    logprobs: bytes
    width: Literal[4, 8]
    spans: list[tuple[str | None, int, int]]
    finish_reason: str
    message: str
    """The turn as the program was told it (JSON)."""
    dialect: str
    backend: str
    """`<engine> <backend id>` of who answered."""
    asked: dict[str, Any]
    """What the program asked for of sampling."""
    body: bytes
    """Digest of the request's body."""
    cached_tokens: int | None = None
    routed_experts: Any = None
    tokenizer: str = ""
    """Of a root: name and digest of what made its ids."""
    took_ms: int = 0
    """From the call's arrival to its answer."""
    at_ms: int = 0
    """When it was written, by Redis' clock. It stays the last field, which the store fills in."""


_DECODER = msgspec.msgpack.Decoder(Node)
_ENCODER = msgspec.msgpack.Encoder()


def encode(node: Node) -> bytes:
    """A node as it is given to the store, which adds the time."""
    return _ENCODER.encode(msgspec.structs.replace(node, at_ms=0))


def decode(stored: Iterable[bytes]) -> list[Node]:
    """The nodes of a session.

    Raises:
        ValueError: One is damaged, or a newer release wrote it.
    """
    return [_DECODER.decode(entry) for entry in stored]
