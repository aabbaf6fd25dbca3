"""A model call and its answer: token ids in, token ids and log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.schema import SamplingParams


class BrokenAnswer(ValueError):
    """The engine's answer breaks its contract, so nothing of it may be trained on."""


class CallAborted(Exception):
    """The engine ended the call before its time (a weight update, a shutdown). Its tokens are discarded."""


@dataclass(frozen=True)
class Call:
    """One HTTP request to an engine (POST, JSON)."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class SampleRequest:
    """One model call: what to continue and how, and what its answer is held against."""

    call_id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How to sample; its `seed` and `max_tokens` are the whole rollout's and not looked at."""
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end a turn in the chat format."""
    cache_salt: str | None = None
    """Keeps what the engine caches apart from that of calls with another one."""
    end_ids: frozenset[int] | None = None
    """Further ids that may end a turn (a model's own); None = not known, so that any may."""
    vocab_size: int | None = None
    """Ids are below it; None = not known."""

    @property
    def stops(self) -> frozenset[int]:
        """The engine ends the call at the first of these."""
        return self.stop_token_ids.union(self.sampling.stop_token_ids)


@dataclass(frozen=True)
class Completion:
    """One call's answer. `token_ids` and `logprobs` are parallel, and `spans` cover them."""

    call_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probabilities, finite and at most 0, one per id."""
    finish_reason: str
    """`stop` or `length`; `cut` of a piece behind which the stream broke off."""
    spans: list[tuple[str | None, int, int]]
    """Policy version of the ids from start to end (exclusive), in order and without gaps."""
    cached_tokens: int | None = None
    """Prompt ids that came from the engine's prefix cache; None = not told."""
    routed_experts: Any = None
    """Expert choices of a mixture-of-experts model as the engine sent them (opaque); None = not sent."""
