"""What the fake engine "samples": ids and log-probs that are a pure function of what stands before them.

Whichever backend serves a call, and however often it is tried, the answer to (prompt, seed) is the same, so a
test can say which tokens a trajectory must hold without having seen the calls.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Script = Callable[[list[int], int], list[int]]
"""(prompt ids, calls that the engine had before) → all ids of the answer, its stop id included."""


@dataclass(frozen=True)
class Answer:
    """One sampled answer; `token_ids` and `logprobs` are parallel."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | None


@dataclass(frozen=True)
class FakeLanguage:
    """Next id = hash(all ids before, seed); log-prob of an id = hash(all ids before and it).

    So an answer that is asked for in two parts, the second behind the ids of the first, is as in one,
    log-probs too, if the seed is the same and only the ids before decide the end: `ends`, or `max_tokens`.
    With `answer_tokens` the prompt decides how long an answer is, so the second part has a
    length of its own. A script sees the longer prompt and has to know itself what it has said.
    """

    first_id: int = 1000
    vocab_size: int = 32000
    """Sampled ids lie in [first_id, vocab_size): below may be control tokens that mean something."""
    answer_tokens: tuple[int, int] | None = None
    """Least and most ids of an answer, its stop id included; None = as many as the call allows."""
    ends: int | None = None
    """One id in so many is the stop id, by the hash of the ids before; None = none is."""
    script: Script | None = None

    def answer(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        call_number: int = 0,
    ) -> Answer:
        """What every engine with this language answers."""
        context = zlib.crc32(array("I", prompt).tobytes())
        if self.script is not None:
            tokens = self.script(list(prompt), call_number)
            if not tokens:
                raise ValueError(f"the script gave no ids for call {call_number}")
        else:
            tokens = self._sampled(context, seed or 0, max_tokens, stop_token_ids)
        token_ids: list[int] = []
        logprobs: list[float] = []
        for token in tokens[:max_tokens]:
            context = zlib.crc32(token.to_bytes(4, "little"), context)
            token_ids.append(token)
            logprobs.append(_logprob(context))
            if token in stop_token_ids:
                return Answer(token_ids, logprobs, "stop", token)
        ended = len(tokens) <= max_tokens and (self.script is not None or self.answer_tokens is not None)
        return Answer(token_ids, logprobs, "stop" if ended else "length", None)

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Log-prob of each id but the first; what `answer` gives for an id is what this gives for it."""
        context = zlib.crc32(array("I", prompt[:1]).tobytes())
        values = []
        for token in prompt[1:]:
            context = zlib.crc32(token.to_bytes(4, "little"), context)
            values.append(_logprob(context))
        return values

    def _sampled(self, context: int, seed: int, max_tokens: int, stop_token_ids: Sequence[int]) -> list[int]:
        length = max_tokens
        if self.answer_tokens is not None:
            low, high = self.answer_tokens
            length = low + _mixed(context ^ seed ^ 0x5EED) % (high - low + 1)
        ids = []
        for _ in range(length):
            token = self.first_id + _mixed(context + seed) % (self.vocab_size - self.first_id)
            if len(ids) == length - 1 and self.answer_tokens is not None and stop_token_ids:
                token = min(stop_token_ids)
            if self.ends is not None and stop_token_ids and _mixed(context ^ 0xE4D) % self.ends == 0:
                token = min(stop_token_ids)
            ids.append(token)
            context = zlib.crc32(token.to_bytes(4, "little"), context)
        return ids


def _mixed(value: int) -> int:
    """Spreads neighbouring values over 32 bits (the finalizer of MurmurHash3)."""
    value &= 0xFFFFFFFF
    value = (value ^ value >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ value >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


def _logprob(context: int) -> float:
    """-4 to 0, never 0."""
    return -(_mixed(context) + 1) / 2**30
