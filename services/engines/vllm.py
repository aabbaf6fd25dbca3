"""vLLM's two wire formats in token ids; the embedded backend speaks them too.

`/inference/v1/generate` (server flag `--enable-scale-out`) is preferred: it says which weights each token
came from. `/v1/completions` is there in every vLLM. Both were checked against vLLM 0.32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from services.engines.base import Call, SampleRequest
from services.engines.checks import as_ids, as_numbers, as_spans, the_choice
from services.engines.wire import SCORE_SALT, Engine


class _Vllm(Engine):
    """What the two formats share."""

    path: str

    def generate(self, request: SampleRequest, *, stream: bool = False) -> Call:
        params = self._sampling(request, max_tokens="max_tokens", seed="seed")
        params["logprobs"] = 0  # of the sampled token alone
        body = self._body(request.prompt, params) | {"request_id": request.call_id}
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Call(self.path, body)

    def score(self, token_ids: list[int]) -> Call:
        # One token must be sampled. Log-probs of a prompt are the model's own, whatever the temperature.
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return Call(self.path, self._body(token_ids, params) | {"cache_salt": SCORE_SALT})

    def _fields(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        choice = the_choice(answer)
        return {
            "token_ids": as_ids(choice["token_ids"]),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice.get("stop_reason"),
            "routed_experts": choice.get("routed_experts"),
            **_counts(answer),
            **self._own_fields(answer, choice, choice.get("logprobs") or {}),
        }

    def _event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        # Each has the ids since the one before, with their log-probs. The one with the end also has the
        # weights of all ids; the counts come behind it, without a choice.
        return self._fields(event) if event["choices"] else _counts(event)

    def _scores(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        # Per id an object `{"<id>": {"logprob"}}`, and null for the first id.
        entries = self._prompt_logprobs(answer)[1:]
        if len(entries) != len(token_ids) - 1:
            raise ValueError(f"{len(entries)} log-probs after the first id, for {len(token_ids)} ids")
        pairs = zip(entries, token_ids[1:], strict=True)
        return as_numbers(entry[str(token)]["logprob"] for entry, token in pairs)

    @abstractmethod
    def _body(self, token_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """Where this format has the ids and the parameters of sampling."""

    @abstractmethod
    def _own_fields(
        self, answer: Mapping[str, Any], choice: Mapping[str, Any], logprobs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What this format says in words of its own."""

    @abstractmethod
    def _prompt_logprobs(self, answer: Mapping[str, Any]) -> list[Any]:
        """Where this format has the log-probs of the prompt."""


def _counts(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer says of its size."""
    usage = answer.get("usage") or {}
    # vLLM: only with `--enable-prompt-tokens-details`.
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {"usage": usage, "cached_tokens": cached}


class VllmGenerate(_Vllm):
    """`POST /inference/v1/generate`."""

    path = "/inference/v1/generate"

    def _body(self, token_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self._backend.model,
            "token_ids": token_ids,
            "sampling_params": {**params, "detokenize": False},
        }

    def _own_fields(
        self, answer: Mapping[str, Any], choice: Mapping[str, Any], logprobs: Mapping[str, Any]
    ) -> dict[str, Any]:
        entries = logprobs.get("content") or []
        return {
            "logged": as_ids(entry["token_id"] for entry in entries),
            "logprobs": as_numbers(entry["logprob"] for entry in entries),
            "spans": as_spans(choice.get("weight_versions") or []) or None,
            "echoes": [("id", answer.get("request_id")), ("prompt", answer.get("prompt_token_ids"))],
        }

    def _prompt_logprobs(self, answer: Mapping[str, Any]) -> list[Any]:
        return answer["prompt_logprobs"]


class VllmCompletions(_Vllm):
    """`POST /v1/completions` with ids for a prompt and `return_token_ids`. It names no weight versions."""

    path = "/v1/completions"

    def _body(self, token_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._backend.model, "prompt": token_ids, "return_token_ids": True, **params}

    def _own_fields(
        self, answer: Mapping[str, Any], choice: Mapping[str, Any], logprobs: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "logprobs": as_numbers(logprobs.get("token_logprobs") or []),
            "spans": None,
            "echoes": [("id", answer.get("id")), ("prompt", choice.get("prompt_token_ids"))],
        }

    def _prompt_logprobs(self, answer: Mapping[str, Any]) -> list[Any]:
        return the_choice(answer)["prompt_logprobs"]
