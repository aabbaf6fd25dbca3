"""SGLang's native `/generate`, as `GenerateReqInput` and the tokenizer manager of its source define it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.schema import Backend
from services.engines.base import BrokenAnswer, Call, Completion, SampleRequest
from services.engines.checks import (
    UNREADABLE,
    Span,
    Verdict,
    as_ids,
    as_numbers,
    as_spans,
    as_version,
    checked_logprobs,
    unreadable,
)
from services.engines.vllm import SCORE_SALT


class SGLang:
    """`POST /generate` with `input_ids`.

    A seed takes effect only in a server started with `--enable-deterministic-inference`. Log-probs are of the
    logits divided by the temperature, before top-p and top-k.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def generate(self, request: SampleRequest) -> Call:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": sorted(request.stops),
        }
        if request.seed is not None:
            params["sampling_seed"] = request.seed
        body = {
            "rid": request.call_id,
            "input_ids": request.prompt,
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }
        if self._backend.routed_experts:
            body["return_routed_experts"] = True
        if request.cache_salt:
            # Newer servers have `cache_salt` as well; this one keeps prefixes apart in all of them.
            body["extra_key"] = request.cache_salt
        return Call("/generate", body)

    def read(self, answer: Mapping[str, Any], request: SampleRequest) -> Completion:
        try:
            meta = answer["meta_info"]
            end = meta["finish_reason"] or {"type": "abort"}
            entries = meta.get("output_token_logprobs") or []
            logged = as_ids(entry[1] for entry in entries)
            # Old servers send ids only in this list, newer ones also beside it.
            token_ids = as_ids(answer.get("output_ids") or logged)
            fields = {
                "token_ids": token_ids,
                "logged": logged,
                "logprobs": as_numbers(entry[0] for entry in entries),
                "finish_reason": end["type"],
                # Text here is a stop string, of which none was asked for, or SGLang's word for NaN logits.
                "stop_reason": end.get("matched"),
                "spans": self._spans(meta, len(token_ids)),
                # Its count of sampled ids may hold some that were drafted behind the last one.
                "usage": {"prompt_tokens": meta.get("prompt_tokens")},
                "cached_tokens": meta.get("cached_tokens"),
                "routed_experts": meta.get("routed_experts"),
                "echoes": [("id", meta.get("id"))],
            }
        except UNREADABLE as error:
            raise unreadable(self._backend, error) from error
        # SGLang cuts a call a few ids before the context is full, and where its cache has no room for more.
        return Verdict(self._backend, request).completion(**fields, short_is_odd=False)

    def score(self, token_ids: list[int]) -> Call:
        # Positions from `logprob_start_len` on are always computed, never taken from the cache.
        return Call(
            "/generate",
            {
                "input_ids": token_ids,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "extra_key": SCORE_SALT,
                "stream": False,
            },
        )

    def read_score(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        try:
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            values = as_numbers(entry[0] for entry in entries)
            logged = as_ids(entry[1] for entry in entries)
        except UNREADABLE as error:
            raise unreadable(self._backend, error) from error
        if logged != token_ids[1:]:
            raise BrokenAnswer(f"backend {self._backend.id}: the log-probs are of other ids than those sent")
        return checked_logprobs(self._backend, values)

    @staticmethod
    def _spans(meta: Mapping[str, Any], length: int) -> list[Span] | None:
        """`weight_versions` where the server sends spans, else one span with its `weight_version`.

        Older servers send the latter alone: the last weights of a call within which they were exchanged.
        """
        if meta.get("weight_versions"):
            return as_spans(meta["weight_versions"])
        version = meta.get("weight_version")
        return None if version is None else [(as_version(version), 0, length)]
