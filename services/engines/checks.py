"""What an engine answers is believed only as far as it can be held against what was requested.

Only what vLLM and SGLang guarantee is asked of an answer; all that a trajectory takes over is looked at.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rollout.schema import Backend
from services.engines.base import BrokenAnswer, CallAborted, Completion, SampleRequest
from services.engines.labels import MAX_LABEL, MAX_VERSION, is_shared, split

BEFORE_ITS_TIME = ("abort", "error")
"""Words of vLLM and SGLang for a call that the engine itself has ended."""
IMPOSSIBLE = -9999.0
"""What vLLM sends for the log-prob of a token of probability 0, which JSON cannot write; none is sampled."""
ROUNDING = 1e-4
"""A log-softmax in float32 may round the log-prob of a certain token to just above 0. What is above 0 by no
more than this is taken as 0, what is above by more is no log-prob."""
EXPERT_BYTES = 16_384
"""The most bytes of one token's record of expert choices: 128 layers, 16 experts, 8 bytes each."""

Span = tuple[str | None, int, int]


class Verdict:
    """Finds fault with one answer of one backend."""

    def __init__(self, backend: Backend, request: SampleRequest) -> None:
        self._backend = backend
        self._request = request

    def completion(
        self,
        *,
        token_ids: list[int],
        logprobs: list[float],
        finish_reason: str | None,
        stop_reason: Any,
        spans: list[Span] | None,
        cached_tokens: Any,
        usage: Mapping[str, Any],
        echoes: Iterable[tuple[str, Any]],
        logged: list[int] | None = None,
        routed_experts: Any = None,
        short_is_odd: bool = True,
    ) -> Completion:
        """A checked `Completion`; without spans all ids get the version that the backend had before the call.

        Args:
            finish_reason: None = a stream that broke off here. It has no end to check, and without spans its
                ids have no version.
            stop_reason: The id that ended the call, if the answer names it.
            usage: Counts of `prompt_tokens` and `completion_tokens`; what is None is not told.
            echoes: What the answer repeats of the call, as pairs of `id` or `prompt` and the value.
            logged: The ids that the log-probs are said to belong to; None = the format does not say.
            short_is_odd: `length` means that the call was given all it asked for, or the context is full.

        Raises:
            CallAborted: `finish_reason` says so.
            BrokenAnswer: Anything else that is wrong.
        """
        if finish_reason in BEFORE_ITS_TIME:
            raise CallAborted(f"backend {self._backend.id}: the call ended with {finish_reason!r}")
        if finish_reason not in ("stop", "length", None):
            self._broken(f"{finish_reason!r:.100} is no reason for which a call ends")
        if not token_ids:
            self._broken("no token was sampled")
        checked = self.part([], token_ids=token_ids, logprobs=logprobs, echoes=echoes, logged=logged)
        self._usage(usage, len(token_ids))
        if finish_reason is not None:
            self._end(token_ids, finish_reason, stop_reason, short_is_odd)
        self._experts(routed_experts, len(token_ids))
        return Completion(
            self._request.call_id,
            token_ids,
            checked,
            finish_reason or "cut",
            self._spans(spans, len(token_ids), finish_reason and self._backend.policy_version),
            self._cached(cached_tokens),
            routed_experts,
        )

    def part(
        self,
        before: list[int],
        *,
        token_ids: list[int],
        logprobs: list[float],
        echoes: Iterable[tuple[str, Any]],
        logged: list[int] | None = None,
    ) -> list[float]:
        """The log-probs of ids that follow those before, once nothing is wrong with them.

        Raises:
            BrokenAnswer: Something is.
        """
        self._echoes(echoes)
        self._ids(token_ids, before)
        if len(logprobs) != len(token_ids):
            self._broken(f"{len(token_ids)} ids with {len(logprobs)} log-probs")
        if logged is not None and logged != token_ids:
            self._broken("the log-probs are of other ids than those sampled")
        return checked_logprobs(self._backend, logprobs)

    def _broken(self, what: str) -> None:
        raise BrokenAnswer(f"backend {self._backend.id}: {what}")

    def _echoes(self, echoes: Iterable[tuple[str, Any]]) -> None:
        for name, value in echoes:
            if value is None:
                continue
            # Servers put their own words around the id that they were given.
            if name == "id" and not (isinstance(value, str) and self._request.call_id in value):
                self._broken(f"the answer is to call {value!r:.100}, not to {self._request.call_id!r}")
            if name == "prompt" and value != self._request.prompt:
                self._broken("the answer is to another prompt than was sent")

    def _ids(self, token_ids: list[int], before: list[int]) -> None:
        request = self._request
        most = min(request.max_tokens, self._backend.max_model_len - len(request.prompt))
        if len(before) + len(token_ids) > most:
            self._broken(f"{len(before) + len(token_ids)} ids were sampled where {most} had room")
        if request.vocab_size is not None and max(token_ids, default=0) >= request.vocab_size:
            self._broken(
                f"id {max(token_ids)} is outside the vocabulary of {request.vocab_size}; if the model has "
                "it, set the backend's `tokenizer` to the model's own directory, with its config.json"
            )
        stops = request.stops
        early = next((token for token in [*before[-1:], *token_ids][:-1] if token in stops), None)
        if early is not None:
            self._broken(f"ids follow the stop id {early}")

    def _usage(self, usage: Mapping[str, Any], sampled: int) -> None:
        for name, true in (("prompt_tokens", len(self._request.prompt)), ("completion_tokens", sampled)):
            count = usage.get(name)
            if count is not None and (type(count) is not int or count != true):
                self._broken(f"{name} is {count!r:.100}, and they are {true}")

    def _end(self, token_ids: list[int], reason: str, stop_reason: Any, short_is_odd: bool) -> None:
        request, last = self._request, token_ids[-1]
        if reason == "stop":
            ends = None if request.end_ids is None else request.end_ids | request.stops
            if ends is not None and last not in ends:
                self._broken(f"the call is said to have ended by itself, and its last id {last} ends no turn")
            if stop_reason is not None and (type(stop_reason) is not int or stop_reason != last):
                self._broken(
                    f"the call is said to have ended with {stop_reason!r:.100}; its last id is {last}"
                )
            return
        most = min(request.max_tokens, self._backend.max_model_len - len(request.prompt))
        if short_is_odd and len(token_ids) < most:
            self._broken(f"the call was cut at {len(token_ids)} ids, and {most} had room")

    def _spans(self, spans: list[Span] | None, length: int, untold: str | None) -> list[Span]:
        told = [span for span in spans or [] if span[2] != span[1]]
        spans = told or [(untold, 0, length)]
        edges = [0, *(end for _, _, end in spans)]
        ordered = all(start < end for _, start, end in spans)
        if not ordered or [start for _, start, _ in spans] != edges[:-1] or edges[-1] != length:
            self._broken(f"version spans {str(spans)[:200]} do not cover {length} ids")
        return self._of_policy(spans) if told else spans

    def _of_policy(self, spans: list[Span]) -> list[Span]:
        """Spans of the engine's labels as the policy's versions; CallAborted where an update has failed."""
        if not is_shared(self._backend):
            for label, _, _ in spans:
                if len(label) > MAX_VERSION:
                    self._broken(f"{label!r:.100} is no policy version")
            return spans
        policy = self._backend.policy
        versions = [(split(label).get(policy), start, end) for label, start, end in spans]
        if any(version == "" for version, _, _ in versions):
            raise CallAborted(f"backend {self._backend.id}: an update of policy {policy!r} failed there")
        # Where another policy was updated there is no border for this one.
        runs = ([*run] for _, run in groupby(versions, key=lambda span: span[0]))
        return [(run[0][0], run[0][1], run[-1][2]) for run in runs]

    def _cached(self, cached: Any) -> int | None:
        """A number that is for a metric alone: what cannot be is as if it had not been told."""
        return cached if type(cached) is int and 0 <= cached <= len(self._request.prompt) else None

    def _experts(self, experts: Any, sampled: int) -> None:
        """vLLM sends a base64 `.npy` with a row a token but the last, SGLang base64 of the numbers alone."""
        tokens = len(self._request.prompt) + sampled
        if experts is None:
            return
        if not isinstance(experts, str):
            self._broken(f"routed_experts is {type(experts).__name__}, not base64")
        try:
            raw = base64.b64decode(experts, validate=True)
            wrong = _wrong_array(raw, sampled, tokens) if raw.startswith(b"\x93NUMPY") else None
        except ValueError as error:
            wrong = str(error)
        else:
            wrong = wrong or (None if len(raw) <= tokens * EXPERT_BYTES else f"{len(raw)} bytes")
        if wrong:
            self._broken(f"routed_experts of {tokens} tokens: {wrong:.200}")


def _wrong_array(raw: bytes, sampled: int, tokens: int) -> str | None:
    """What is wrong with a `.npy`; None = it holds numbers of layers and experts for tokens of this call."""
    from numpy.lib import format as npy  # only mixture-of-experts models send any

    file = io.BytesIO(raw)
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        return f"a .npy of version {version}"
    shape, _, dtype = readers[version](file)
    # An array of objects is a pickle: code, for who loads it.
    if dtype.kind not in "iu" or len(shape) != 3 or not sampled - 1 <= shape[0] <= tokens:
        return f"an array of {dtype} and shape {shape}"
    if math.prod(shape) * dtype.itemsize != len(raw) - file.tell():
        return f"{len(raw) - file.tell()} bytes for {dtype} of shape {shape}"
    return None


def checked_logprobs(backend: Backend, values: Iterable[float]) -> list[float]:
    """Log-probs as they were sent, a tiny rounding above 0 taken off.

    Raises:
        BrokenAnswer: One is not finite, or above 0.
    """
    values = list(values)
    if not all(math.isfinite(value) and value > IMPOSSIBLE for value in values):
        raise BrokenAnswer(f"backend {backend.id}: a log-prob is not finite")
    if values and max(values) > ROUNDING:
        raise BrokenAnswer(f"backend {backend.id}: a log-prob is {max(values)}, the most is 0")
    return [min(value, 0.0) for value in values]


def as_ids(values: Iterable[Any]) -> list[int]:
    """Token ids exactly as they were sent.

    Raises:
        TypeError: One is no integer; nothing is converted, for 3.7 would become another token.
    """
    ids = list(values)
    for value in ids:
        if type(value) is not int or value < 0:
            raise TypeError(f"{value!r:.100} is no token id")
    return ids


def as_numbers(values: Iterable[Any]) -> list[float]:
    """Numbers as they were sent.

    Raises:
        TypeError: One is no number: text, null or a truth value.
        OverflowError: An integer that is too large.
    """
    numbers = []
    for value in values:
        if type(value) not in (float, int):
            raise TypeError(f"{value!r:.100} is no number")
        numbers.append(float(value))
    return numbers


def as_spans(values: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Spans of policy versions.

    Raises:
        TypeError, KeyError: One has no version, or no place.
    """
    spans: list[Span] = []
    for value in values:
        start, end = as_ids((value["start"], value["end"]))
        spans.append((as_version(value["version"]), start, end))
    return spans


def as_version(value: Any) -> str:
    """The label of an engine's weights.

    Raises:
        TypeError: It is no text, empty, or too long.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_LABEL:
        raise TypeError(f"{value!r:.100} is no policy version")
    return value


def the_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one choice of an answer.

    Raises:
        ValueError, KeyError, TypeError: There is none, or more than the one that was asked for.
    """
    (choice,) = answer["choices"]
    if choice.get("index") not in (None, 0):
        raise ValueError(f"choice {choice['index']!r:.100} of the one that was asked for")
    return choice
