"""When a request repeats a conversation: digests of messages, by what they say and not by how it is spelt.

Ignored are ids of calls, reasoning (programs leave it out), names, spaces around an assistant's text, order
and spacing of arguments in JSON, and what JavaScript does to their numbers. All other text counts to the last
character, and so do the tools and the order of messages.

A turn is hashed as what it consists of: its text, then each call. So a program that sends text and calls as
two messages, or each call as one of its own, repeats the same turn, with nothing merged and nothing guessed:
texts are never joined, and a turn that said nothing is one all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from rollout.trajectory import Message
from services.capture.history import History
from services.state.rollouts.payloads import with_whole_characters

DIGEST_BYTES = 16
_EXACT = 2**53
"""Integers up to it survive a program that knows doubles alone."""
_encode = msgspec.json.Encoder(order="sorted").encode


def _plain(value: Any) -> Any:
    """A JSON value with one spelling for each number."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if type(value) is float and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if type(value) is int and abs(value) > _EXACT:
        try:
            return float(value)
        except OverflowError:
            return value
    return value


def _json(value: Any) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:  # half a character, in whose place `?` is stored
        return _json(with_whole_characters(value))
    except OverflowError:  # an integer beyond all doubles
        return json.dumps(with_whole_characters(value), sort_keys=True).encode()


def _hash(path: bytes, part: bytes) -> bytes:
    return blake2b(path + part, digest_size=DIGEST_BYTES).digest()


def after(path: bytes, message: Message) -> bytes:
    """The digest of a conversation that goes on with this message."""
    text = message.text
    if message.role != "assistant":
        return _hash(path, f"{message.role}\n{text}".encode(errors="replace"))
    text = text.strip()
    if text or not message.tool_calls:
        path = _hash(path, f"assistant\n{text}".encode(errors="replace"))
    for call in message.tool_calls:
        arguments = call.arguments
        if not all(type(value) is str for value in arguments.values()):
            arguments = _plain(arguments)
        path = _hash(path, b"call\n" + _json([call.name, arguments]))
    return path


def paths(
    tools: Sequence[dict[str, Any]], messages: Sequence[Message], history: History | None = None
) -> list[bytes]:
    """Digests: [0] is that of the tools, [i] that of them and the first i messages.

    Args:
        history: That of these messages, whose digests are taken, and then are these.
    """
    known = history.digests if history is not None and history.tools == tools else []
    # Where a turn begins, nothing else of what comes before it counts.
    turns = (at for at in range(len(known) - 1, 0, -1) if _begins(messages, at))
    if (at := next(turns, None)) is None:
        path = _hash(b"", b"tools\n" + _json(list(tools)))
        digests = [path, *onward(path, messages)]
    else:
        digests = [*known[: at + 1], *onward(known[at], messages[at:])]
    if history is not None:
        history.tools, history.digests = tools, digests
    return digests


def _begins(messages: Sequence[Message], at: int) -> bool:
    """Whether a turn of the model begins at a place that is not the first."""
    return at < len(messages) and messages[at].role == "assistant" != messages[at - 1].role


def onward(path: bytes, messages: Sequence[Message], turn: Message | None = None) -> Iterator[bytes]:
    """The digest after each of the messages that follow what `path` is of, whose last message is `turn`.

    An answer of a tool also tells which of the calls it answers, where that is another one than its own place
    says: ids are ignored, but answers that were exchanged are not the same conversation.
    """
    called = [call.id for call in turn.tool_calls] if turn else []
    answers, last = 0, "assistant" if turn else ""
    for message in messages:
        if message.role == "assistant":
            # Calls that were sent as several messages are those of one turn.
            called = called if last == "assistant" else []
            called += [call.id for call in message.tool_calls]
            answers = 0
        elif message.role == "tool":
            known = called.count(message.tool_call_id or "") == 1
            place = called.index(message.tool_call_id or "") if known else answers
            if place != answers:
                path = _hash(path, b"answers\n%d" % place)
            answers += 1
        last = message.role
        path = after(path, message)
        yield path
