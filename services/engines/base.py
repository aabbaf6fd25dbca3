"""The protocol of an engine's model calls: token ids in, token ids and log-probs out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.schema import Backend, SamplingParams


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
class Completion:
    """One call's answer. `token_ids` and `logprobs` are parallel, and `spans` cover them."""

    call_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probabilities, finite, one per id."""
    finish_reason: str
    """`stop` or `length`."""
    spans: list[tuple[str | None, int, int]]
    """Policy version of the ids from start to end (exclusive), in order and without gaps."""
    cached_tokens: int | None = None
    """Prompt ids that came from the engine's prefix cache; None = not told."""
    routed_experts: Any = None
    """Expert choices of a mixture-of-experts model as the engine sent them (opaque); None = not sent."""


class Engine(Protocol):
    """One kind of wire format. Stateless: one instance serves all calls to its backend."""

    def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        seed: int | None,
        stop_token_ids: list[int],
        call_id: str,
        cache_salt: str | None,
    ) -> Call:
        """The request that samples a continuation of `prompt`."""

    def read(self, answer: Mapping[str, Any], call_id: str) -> Completion:
        """The answer to `generate`.

        Raises:
            CallAborted: The engine ended the call; there may be tokens, but they are not to be used.
            BrokenAnswer: Something that a trajectory needs is missing or contradicts itself.
        """

    def score(self, token_ids: list[int]) -> Call:
        """The request for the log-probs of given ids (the canary of a weight update)."""

    def read_score(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        """Log-prob of each id but the first, given those before it; length `len(token_ids) - 1`.

        Raises:
            BrokenAnswer: The engine did not answer with one finite number per id.
        """


IMPOSSIBLE = -9999.0
"""What vLLM sends for the log-prob of a token of probability 0, which JSON cannot write; none is sampled."""


def completion(
    *,
    backend: Backend,
    call_id: str,
    token_ids: list[int],
    logprobs: list[float],
    finish_reason: str,
    spans: list[tuple[str | None, int, int]] | None,
    cached_tokens: int | None,
    logged: list[int] | None = None,
    routed_experts: Any = None,
) -> Completion:
    """A checked `Completion`; without spans all ids get the version that the backend had before the call.

    Args:
        logged: The ids that the log-probs are said to belong to; None = the format does not say.

    Raises:
        CallAborted: `finish_reason` says so.
        BrokenAnswer: No ids, unequal lengths, log-probs of other ids, a log-prob that is not finite, spans
            with gaps.
    """
    if finish_reason not in ("stop", "length"):
        raise CallAborted(f"backend {backend.id}: the call ended with {finish_reason!r}")
    if not token_ids:
        raise BrokenAnswer(f"backend {backend.id}: no token was sampled")
    if len(logprobs) != len(token_ids):
        raise BrokenAnswer(f"backend {backend.id}: {len(token_ids)} ids with {len(logprobs)} log-probs")
    if logged is not None and logged != token_ids:
        raise BrokenAnswer(f"backend {backend.id}: the log-probs are of other ids than those sampled")
    if not all(math.isfinite(value) and value > IMPOSSIBLE for value in logprobs):
        raise BrokenAnswer(f"backend {backend.id}: a log-prob is not finite")
    spans = [span for span in spans or [] if span[2] > span[1]]
    spans = spans or [(backend.policy_version, 0, len(token_ids))]
    edges = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != edges[:-1] or edges[-1] != len(token_ids):
        raise BrokenAnswer(f"backend {backend.id}: version spans {spans} do not cover {len(token_ids)} ids")
    return Completion(call_id, token_ids, logprobs, finish_reason, spans, cached_tokens, routed_experts)


def scores(backend: Backend, values: list[float]) -> list[float]:
    """The log-probs of given ids, checked.

    Raises:
        BrokenAnswer: One is not finite.
    """
    if not all(math.isfinite(value) for value in values):
        raise BrokenAnswer(f"backend {backend.id}: a log-prob is not finite")
    return values


def as_ids(values: Iterable[Any]) -> list[int]:
    """Token ids exactly as they were sent.

    Raises:
        TypeError: One is no integer; nothing is converted, for 3.7 would become another token.
    """
    ids = list(values)
    for value in ids:
        if type(value) is not int or value < 0:
            raise TypeError(f"{value!r} is no token id")
    return ids


def unreadable(backend: Backend, error: Exception) -> BrokenAnswer:
    """The error for an answer that lacks a field or has another type there."""
    return BrokenAnswer(f"backend {backend.id}: unreadable answer: {type(error).__name__}: {error}")
