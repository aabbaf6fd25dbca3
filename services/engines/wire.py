"""What the wire formats of engines share: how a call is asked for, and that its answer is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from rollout.schema import Backend
from services.engines.base import BrokenAnswer, Call, Completion, SampleRequest
from services.engines.checks import Verdict, checked_logprobs

SCORE_SALT = "score"
"""An engine reads no cache for a request that asks for log-probs of its prompt, but it writes one. The salt
keeps that apart from the prefixes of rollouts."""

ABORTED = "abort"
"""What an answer without a reason for its end means."""

UNREADABLE = (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError)
"""What reading an answer of another shape raises."""


class Engine(ABC):
    """One kind of wire format. Stateless: one instance serves all calls to its backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @abstractmethod
    def generate(self, request: SampleRequest, *, stream: bool = False) -> Call:
        """The HTTP request that samples a continuation of the prompt.

        Args:
            stream: The answer may come as server-sent events, for a `Partial`. Who cannot, answers whole.
        """

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
        fields["finish_reason"] = fields["finish_reason"] or ABORTED
        return Verdict(self._backend, request).completion(**fields)

    def partial(self, request: SampleRequest) -> Partial:
        """A streamed answer to `generate`, before its first event."""
        return Partial(self.event, Verdict(self._backend, request))

    def event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """What an event of a stream adds, as `Verdict.completion` is told it; each field may be missing.

        Raises:
            BrokenAnswer: It has another shape.
        """
        try:
            return self._event(event)
        except UNREADABLE as error:
            raise self._unreadable(error) from error

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

    def _event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """`_fields` of an event, as far as it has them."""
        raise ValueError("this engine was not asked for a stream")

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


class Partial:
    """A streamed answer, as far as it has come. What was added was checked: the ids may be shown."""

    def __init__(self, read: Callable[[Mapping[str, Any]], dict[str, Any]], verdict: Verdict) -> None:
        self._read = read
        self._verdict = verdict
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._told: dict[str, Any] = {"finish_reason": None, "stop_reason": None, "spans": None}
        self._told |= {"usage": {}, "cached_tokens": None, "routed_experts": None}

    def add(self, event: Mapping[str, Any]) -> list[int]:
        """Take in the next event; its ids.

        Raises:
            BrokenAnswer: Something is wrong with it, and it was not taken in.
        """
        fields = self._read(event)
        token_ids, told = fields.pop("token_ids", []), self._told
        part = {name: fields.pop(name, None) for name in ("logprobs", "logged", "echoes")}
        if part["logprobs"] is not None:
            if told["finish_reason"] is not None:
                raise BrokenAnswer(f"the stream went on behind its end ({told['finish_reason']!r:.100})")
            self._logprobs += self._verdict.part(self.token_ids, token_ids=token_ids, **part)
            self.token_ids += token_ids
        told |= {name: value for name, value in fields.items() if value is not None}
        return token_ids

    def whole(self) -> Completion:
        """The answer at the end of its stream; raises as `Engine.read` does."""
        return self._completion(self._told | {"finish_reason": self._told["finish_reason"] or ABORTED})

    def cut(self) -> Completion | None:
        """What is there of an answer whose stream broke off; None = nothing.

        It has its end where that had been told; else ids without told weights have no version.

        Raises:
            BrokenAnswer: What was told of the ids at the end contradicts them.
        """
        if not self.token_ids:
            return None
        if self._told["finish_reason"] in ("stop", "length"):
            return self.whole()
        return self._completion(self._told | {"finish_reason": None, "usage": {}, "routed_experts": None})

    def _completion(self, told: dict[str, Any]) -> Completion:
        return self._verdict.completion(token_ids=self.token_ids, logprobs=self._logprobs, echoes=[], **told)
