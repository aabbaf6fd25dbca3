"""Observations cut to what the context still has room for, with a note that says so."""

from __future__ import annotations

from collections.abc import Callable

from rollout.trajectory import Message, TextPart

LEAST_KEPT = 200
"""Characters of a long text that are worth a turn; with room for fewer the rollout ends instead."""

_TRIES = 12
_STEP = 0.8


def fit(
    messages: list[Message], encode: Callable[[list[Message]], list[int]], room: int
) -> tuple[list[Message], list[int]] | None:
    """Messages and their ids, their longest texts cut in the middle so that they take at most `room` ids.

    None: no cut that leaves `LEAST_KEPT` characters is short enough.
    """
    longest = max(len(message.text) for message in messages)
    limit = longest * room / max(1, len(encode(messages)))
    for _ in range(_TRIES):
        if limit < LEAST_KEPT:
            return None
        shorter = [_shorten(message, int(limit)) for message in messages]
        ids = encode(shorter)
        if len(ids) <= room:
            return shorter, ids
        limit *= _STEP
    return None


def _shorten(message: Message, limit: int) -> Message:
    """Beginning and end of a text of more than `limit` characters."""
    text = message.text
    if len(text) <= limit:
        return message
    head, tail = text[: limit - limit // 2], text[len(text) - limit // 2 :]
    note = f"\n[... {len(text) - limit} characters cut: the context has no room for them ...]\n"
    return message.model_copy(update={"content": [TextPart(text=head + note + tail)]})
