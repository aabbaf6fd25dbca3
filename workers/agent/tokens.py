"""One buffer a rollout: the ids the engine saw and sampled, in the order in which it did."""

from __future__ import annotations

from typing import Any

from rollout.trajectory import Chain, Message, Segment, Trajectory
from workers.agent.codec import Codec, ParsedTurn
from workers.agent.llm import Completion


class TokenBuffer:
    """Builds a trajectory. The canonical form is ids; messages are notes for readers."""

    def __init__(self, codec: Codec, trajectory: Trajectory) -> None:
        self._codec = codec
        self._trajectory = trajectory
        self._ids: list[int] = []
        self._prompt_len = 0
        """Ids before the last sampled turn."""

    @property
    def ids(self) -> list[int]:
        """Everything so far: the prompt of the next call."""
        return self._ids

    @property
    def chain(self) -> Chain:
        return self._trajectory.chain

    def start(self, messages: list[Message], tools: list[dict[str, Any]]) -> None:
        """Begin a chain with the rendered conversation."""
        if not messages:
            raise ValueError("a prompt needs at least one message")
        self._ids = self._codec.render(messages, tools)
        self._trajectory.chains.append(Chain())
        self.chain.append(Segment(role=messages[-1].role, token_ids=list(self._ids), messages=messages))

    def add_sampled(self, completion: Completion) -> ParsedTurn:
        """Append what a call sampled, exactly as it was returned, and parse it."""
        self._prompt_len = len(self._ids)
        turn = self._codec.parse(self._ids, completion.token_ids)
        spans = completion.spans
        for number, (version, start, end) in enumerate(spans):
            last = number == len(spans) - 1
            self.chain.append(
                Segment(
                    role="assistant",
                    token_ids=completion.token_ids[start:end],
                    sampled=True,
                    logprobs=completion.logprobs[start:end],
                    policy_version=version,
                    finish_reason=completion.finish_reason if last else None,
                    call_id=completion.call_id,
                    messages=[turn.message] if last else [],
                )
            )
        self._ids = self._ids + completion.token_ids
        return turn

    def add_observations(self, messages: list[Message]) -> None:
        """Append the environment's messages behind the last sampled turn.

        Raises:
            CodecError: The chat format cannot take them without rewriting what is there.
        """
        prompt, sampled = self._ids[: self._prompt_len], self._ids[self._prompt_len :]
        delta = self._codec.bridge(prompt, sampled, messages)
        self.chain.append(Segment(role=messages[-1].role, token_ids=delta, messages=messages))
        self._ids = self._ids + delta
