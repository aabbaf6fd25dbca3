"""One buffer a rollout: the ids the engine saw and sampled, in the order in which it did."""

from __future__ import annotations

from collections.abc import Callable

from rollout.trajectory import Chain, Message, Segment, TextPart, Trajectory
from services.engines.base import Completion
from services.state.turns.entries import sampled_segments
from workers.agent.formats import Codec
from workers.agent.parsing import ParsedTurn


class TokenBuffer:
    """Builds a trajectory. The canonical form is ids; messages are notes for readers.

    An observation joins the chain together with the turn that read it, and so does the prompt of a
    further chain: a chain is always the prompt of its last call plus what that call sampled,
    whatever ends the rollout.
    """

    def __init__(self, codec: Codec, trajectory: Trajectory) -> None:
        self._codec = codec
        self._trajectory = trajectory
        self.ids: list[int] = []
        """Everything so far: the prompt of the next call."""
        self._prompt_len = 0
        """Ids before the last sampled turn."""
        self._pending: Segment | None = None
        """The observation that the next call will read."""
        self._next: Chain | None = None
        """The chain that the next call begins."""

    def start(self, messages: list[Message], ids: list[int]) -> None:
        """Begin a chain with a rendered conversation; it joins those before with its first sampled turn."""
        if not messages:
            raise ValueError("a prompt needs at least one message")
        self._next = Chain()
        self._next.append(Segment(role=messages[-1].role, token_ids=list(ids), messages=messages))
        if not self._trajectory.chains:
            self._begin()
        self.ids, self._prompt_len, self._pending = list(ids), 0, None

    def _begin(self) -> None:
        self._trajectory.chains.append(self._next)
        self._trajectory.unread, self._next = [], None

    def add_sampled(self, completion: Completion, turn: ParsedTurn) -> None:
        """Append what a call sampled, exactly as it was returned."""
        if self._next is not None:
            self._begin()
        if self._pending is not None:
            self._trajectory.chain.append(self._pending)
            self._pending, self._trajectory.unread = None, []
        for segment in sampled_segments(completion, turn.message):
            self._trajectory.chain.append(segment)
        self._prompt_len = len(self.ids)
        self.ids = self.ids + completion.token_ids

    def bridge(self, messages: list[Message]) -> list[int]:
        """The ids that the environment's messages take behind the last sampled turn.

        Raises:
            CodecError: The chat format cannot take them without rewriting what is there.
            ValueError: There is no sampled turn that they could answer.
        """
        if self._prompt_len == 0 or self._pending is not None:
            raise ValueError("a sampled turn is answered once: pass all messages that follow it together")
        return self._codec.bridge(self.ids[: self._prompt_len], self.ids[self._prompt_len :], messages)

    def add_observations(self, messages: list[Message], ids: list[int]) -> None:
        """Append messages with the ids that `bridge` gave for them."""
        self._pending = Segment(role=messages[-1].role, token_ids=ids, messages=messages)
        self._trajectory.unread = messages
        self.ids = self.ids + ids


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
