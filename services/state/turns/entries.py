"""The entries of a turn log, and the trajectory that they are.

A log says in order what RUN did and learnt: prompts, what engines sampled, what tools answered, what was
appended. Each entry is a msgpack array that begins with its kind; ids are packed int32, log-probs float32
where that is exact. Messages are JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from pydantic import TypeAdapter

from rollout.arrays import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from rollout.schema import Backend
from rollout.schema.agents import CallRecord
from rollout.trajectory import Chain, Message, Segment, Trajectory
from services.engines.base import Completion
from services.state.rollouts.payloads import with_whole_characters

_MESSAGES = TypeAdapter(list[Message])


class Begun(Struct, tag="begun", array_like=True):
    """A chain begins with this prompt: the first, or one that a compaction made."""

    ids: bytes
    messages: str
    backend: str = ""
    """Of the first chain: the backend that it was made for (JSON)."""
    tokenizer: str = ""
    """Of the first chain: name and digest of what made the ids."""


class Sampled(Struct, tag="sampled", array_like=True):
    """A model call was answered."""

    call_id: str
    ids: bytes
    logprobs: bytes
    width: Literal[4, 8]
    spans: list[tuple[str | None, int, int]]
    finish_reason: str
    message: str
    """What the ids say (JSON)."""
    malformed: list[tuple[int, str]]
    """Place among the turn's attempts at a call, and reason, of those that are none."""
    spent_s: float
    """Of RUN's time limit, when the answer had come."""
    cached_tokens: int | None = None
    routed_experts: Any = None
    backend: str = ""
    """Who answered (JSON), where it is another one than before."""
    call: dict[str, Any] | None = None
    """Its `CallRecord`."""

    @classmethod
    def of(
        cls, completion: Completion, message: Message, malformed: list[tuple[int, str]], **more: Any
    ) -> Sampled:
        """The entry of an answer, and what it was parsed into."""
        return cls(
            completion.call_id,
            pack_ids(completion.token_ids),
            *pack_logprobs(completion.logprobs),
            completion.spans,
            completion.finish_reason,
            message.model_dump_json(exclude_defaults=True),
            malformed,
            cached_tokens=completion.cached_tokens,
            routed_experts=completion.routed_experts,
            **more,
        )

    @property
    def completion(self) -> Completion:
        """The answer as the engine gave it."""
        return Completion(
            self.call_id,
            unpack_ids(self.ids),
            unpack_logprobs(self.logprobs, self.width),
            self.finish_reason,
            self.spans,
            self.cached_tokens,
            self.routed_experts,
        )


class Answered(Struct, tag="answered", array_like=True):
    """A tool answered a call of the turn."""

    text: str | None
    """None: it is the text of the message in the `Appended` that follows, at the same place."""
    finished: bool
    known: int
    """Operations of the sandbox whose outcomes are in it, or in what is before."""
    call: dict[str, Any] | None = None
    """Its `CallRecord`, if it was one of a tool."""


class Appended(Struct, tag="appended", array_like=True):
    """The environment's messages came behind the last turn."""

    ids: bytes
    """Empty: there was no room for them."""
    messages: str
    cut: bool = False
    """They are shortened."""


class Operated(Struct, tag="operated", array_like=True):
    """The handler did something in the sandbox itself, outside of a tool."""

    known: int
    reply: dict[str, Any]
    """The frame that the sandbox answered with."""


Entry = Begun | Sampled | Answered | Appended | Operated
_DECODER = msgspec.msgpack.Decoder(Entry)
_ENCODER = msgspec.msgpack.Encoder()


def encode(entry: Entry) -> bytes:
    """An entry as it is stored. Half a character, which a handler may have written, becomes `?`."""
    try:
        return _ENCODER.encode(entry)
    except UnicodeEncodeError:
        return _ENCODER.encode(with_whole_characters(msgspec.to_builtins(entry)))


def decode(stored: Iterable[bytes]) -> list[Entry]:
    """The entries of a log.

    Raises:
        ValueError: One is damaged, or a newer release wrote it.
    """
    return [_DECODER.decode(entry) for entry in stored]


def to_json(messages: Sequence[Message]) -> str:
    """Messages as entries have them."""
    return _MESSAGES.dump_json(list(messages), exclude_defaults=True).decode()


def from_json(messages: str) -> list[Message]:
    """What `to_json` made."""
    return _MESSAGES.validate_json(messages)


def sampled_segments(completion: Completion, message: Message) -> list[Segment]:
    """What a call sampled as segments, one for each policy version."""
    segments = [
        Segment(
            role="assistant",
            token_ids=completion.token_ids[start:end],
            sampled=True,
            logprobs=completion.logprobs[start:end],
            policy_version=version,
            call_id=completion.call_id,
        )
        for version, start, end in completion.spans
    ]
    segments[-1].finish_reason = completion.finish_reason
    segments[-1].routed_experts = completion.routed_experts
    segments[-1].messages = [message]
    return segments


def trajectory_of(entries: Iterable[Entry]) -> Trajectory:
    """The trajectory as far as a log has it. How it ended, artifacts and warnings come with RUN's end."""
    trajectory = Trajectory()
    waiting: Segment | None = None
    chain: Chain | None = None
    for entry in entries:
        if isinstance(entry, Sampled | Answered) and entry.call:
            trajectory.calls.append(CallRecord(**entry.call))
        if isinstance(entry, Begun):
            messages = from_json(entry.messages)
            waiting, chain = None, Chain()
            chain.append(Segment(role=messages[-1].role, token_ids=unpack_ids(entry.ids), messages=messages))
            if not trajectory.chains:
                trajectory.chains.append(chain)
                backend = Backend.model_validate_json(entry.backend)
                trajectory.model, trajectory.logprobs_mode = backend.model, backend.logprobs_mode
                trajectory.tokenizer = entry.tokenizer
        elif isinstance(entry, Sampled):
            if trajectory.chains[-1] is not chain:
                trajectory.chains.append(chain)
            pieces = sampled_segments(entry.completion, Message.model_validate_json(entry.message))
            for segment in (waiting, *pieces) if waiting else pieces:
                chain.append(segment)
            waiting, trajectory.unread = None, []
        elif isinstance(entry, Appended):
            trajectory.unread = messages = from_json(entry.messages)
            if entry.ids:
                ids = unpack_ids(entry.ids)
                waiting = Segment(role=messages[-1].role, token_ids=ids, messages=messages)
    return trajectory
