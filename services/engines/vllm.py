"""vLLM's two wire formats in token ids; the embedded backend speaks them too.

`/inference/v1/generate` (server flag `--enable-scale-out`) is preferred: it says which weights each token
came from. `/v1/completions` is there in every vLLM. Both were checked against vLLM 0.32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rollout.schema import Backend
from services.engines.base import Call, Completion, SampleRequest
from services.engines.checks import (
    UNREADABLE,
    Verdict,
    as_ids,
    as_numbers,
    as_spans,
    checked_logprobs,
    the_choice,
    unreadable,
)

SCORE_SALT = "score"
"""An engine reads no cache for a request that asks for log-probs of its prompt, but it writes one. The salt
keeps that apart from the prefixes of rollouts."""


class _Vllm(ABC):
    """What the two formats share."""

    path: str

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def generate(self, request: SampleRequest) -> Call:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": sorted(request.stops),
            "logprobs": 0,  # of the sampled token alone
        }
        if request.seed is not None:
            params["seed"] = request.seed
        body = self._body(request.prompt, params) | {"request_id": request.call_id}
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        return Call(self.path, body)

    def score(self, token_ids: list[int]) -> Call:
        # One token must be sampled. Log-probs of a prompt are the model's own, whatever the temperature.
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return Call(self.path, self._body(token_ids, params) | {"cache_salt": SCORE_SALT})

    @abstractmethod
    def _body(self, token_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """Where this format has the ids and the parameters of sampling."""


class VllmGenerate(_Vllm):
    """`POST /inference/v1/generate`."""

    path = "/inference/v1/generate"

    def read(self, answer: Mapping[str, Any], request: SampleRequest) -> Completion:
        try:
            choice = the_choice(answer)
            entries = (choice.get("logprobs") or {}).get("content") or []
            fields = {
                **_common(answer, choice),
                "logged": as_ids(entry["token_id"] for entry in entries),
                "logprobs": as_numbers(entry["logprob"] for entry in entries),
                "spans": as_spans(choice.get("weight_versions") or []),
                "echoes": [("id", answer.get("request_id")), ("prompt", answer.get("prompt_token_ids"))],
            }
        except UNREADABLE as error:
            raise unreadable(self._backend, error) from error
        return Verdict(self._backend, request).completion(**fields)

    def read_score(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        try:
            values = _prompt_logprobs(answer, token_ids)
        except UNREADABLE as error:
            raise unreadable(self._backend, error) from error
        return checked_logprobs(self._backend, values)

    def _body(self, token_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self._backend.model,
            "token_ids": token_ids,
            "sampling_params": {**params, "detokenize": False},
        }


class VllmCompletions(_Vllm):
    """`POST /v1/completions` with ids for a prompt and `return_token_ids`. It names no weight versions."""

    path = "/v1/completions"

    def read(self, answer: Mapping[str, Any], request: SampleRequest) -> Completion:
        try:
            choice = the_choice(answer)
            fields = {
                **_common(answer, choice),
                "logprobs": as_numbers((choice.get("logprobs") or {}).get("token_logprobs") or []),
                "spans": None,
                "echoes": [("id", answer.get("id")), ("prompt", choice.get("prompt_token_ids"))],
            }
        except UNREADABLE as error:
            raise unreadable(self._backend, error) from error
        return Verdict(self._backend, request).completion(**fields)

    def read_score(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        try:
            values = _prompt_logprobs(the_choice(answer), token_ids)
        except UNREADABLE as error:
            raise unreadable(self._backend, error) from error
        return checked_logprobs(self._backend, values)

    def _body(self, token_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._backend.model, "prompt": token_ids, "return_token_ids": True, **params}


def _common(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """What both formats say in the same words."""
    usage = answer.get("usage") or {}
    return {
        "token_ids": as_ids(choice["token_ids"]),
        "finish_reason": choice["finish_reason"] or "abort",
        "stop_reason": choice.get("stop_reason"),
        "usage": usage,
        # vLLM: only with `--enable-prompt-tokens-details`.
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "routed_experts": choice.get("routed_experts"),
    }


def _prompt_logprobs(holder: Mapping[str, Any], token_ids: list[int]) -> list[float]:
    """`prompt_logprobs`: per id an object `{"<id>": {"logprob"}}`, and null for the first id.

    Raises:
        ValueError: They are not one for each id (and what a value of another type raises).
    """
    entries = holder["prompt_logprobs"][1:]
    if len(entries) != len(token_ids) - 1:
        raise ValueError(f"{len(entries)} log-probs after the first id, for {len(token_ids)} ids")
    pairs = zip(entries, token_ids[1:], strict=True)
    return as_numbers(entry[str(token)]["logprob"] for entry, token in pairs)
