"""What the wire formats of engines share: how a call is asked for, and that its answer is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rollout.schema import Backend
from services.engines.base import BrokenAnswer, Call, Completion, SampleRequest
from services.engines.checks import Verdict, checked_logprobs

SCORE_SALT = "score"
"""An engine reads no cache for a request that asks for log-probs of its prompt, but it writes one. The salt
keeps that apart from the prefixes of rollouts."""

UNREADABLE = (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError)
"""What reading an answer of another shape raises."""


class Engine(ABC):
    """One kind of wire format. Stateless: one instance serves all calls to its backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @abstractmethod
    def generate(self, request: SampleRequest) -> Call:
        """The HTTP request that samples a continuation of the prompt."""

    @abstractmethod
    def score(self, token_ids: list[int]) -> Call:
        """The request for the log-probs of given ids (the canary of a weight update)."""

    def read(self, answer: Mapping[str, Any], request: SampleRequest) -> Completion:
        """The answer to `generate`, held against what was asked for.

        Raises:
            CallAborted: The engine ended the call; there may be tokens, but they are not to be used.
            BrokenAnswer: Something that a trajectory needs is missing, contradicts itself or is no answer to
                this call.
        """
        try:
            fields = self._fields(answer)
        except UNREADABLE as error:
            raise self._unreadable(error) from error
        return Verdict(self._backend, request).completion(**fields)

    def read_score(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        """Log-prob of each id but the first, given those before it; length `len(token_ids) - 1`.

        Raises:
            BrokenAnswer: The engine did not answer with one log-prob per id.
        """
        try:
            scores = self._scores(answer, token_ids)
        except UNREADABLE as error:
            raise self._unreadable(error) from error
        return checked_logprobs(self._backend, scores)

    @abstractmethod
    def _fields(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """What `Verdict.completion` is told; an answer of another shape raises one of `UNREADABLE`."""

    @abstractmethod
    def _scores(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`; an answer of another shape, or to other ids, raises the same."""

    def _sampling(self, request: SampleRequest, *, max_tokens: str, seed: str) -> dict[str, Any]:
        """How to sample, under the names that an engine has for the number of tokens and the seed."""
        sampling = request.sampling
        params: dict[str, Any] = {
            max_tokens: request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Some engines refuse 0.
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": sorted(request.stops),
        }
        return params if request.seed is None else {**params, seed: request.seed}

    def _unreadable(self, error: Exception) -> BrokenAnswer:
        reason = f"unreadable answer: {type(error).__name__}: {error!s:.300}"
        return BrokenAnswer(f"backend {self._backend.id}: {reason}")
