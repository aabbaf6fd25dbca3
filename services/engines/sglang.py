"""SGLang's native `/generate`, as `GenerateReqInput` and the tokenizer manager of its source define it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.engines.base import Call, SampleRequest
from services.engines.checks import Span, as_ids, as_numbers, as_spans, as_version
from services.engines.wire import SCORE_SALT, Engine


class SGLang(Engine):
    """`POST /generate` with `input_ids`.

    A seed takes effect only in a server started with `--enable-deterministic-inference`. Log-probs are of the
    logits divided by the temperature, before top-p and top-k. It is never asked for a stream: whether an
    event repeats what came before depends on how the server was started.
    """

    def generate(self, request: SampleRequest, *, stream: bool = False) -> Call:
        body = {
            "rid": request.call_id,
            "input_ids": request.prompt,
            "sampling_params": self._sampling(request, max_tokens="max_new_tokens", seed="sampling_seed"),
            "return_logprob": True,
            "stream": False,
        }
        if self._backend.routed_experts:
            body["return_routed_experts"] = True
        if request.cache_salt:
            # Newer servers have `cache_salt` as well; this one keeps prefixes apart in all of them.
            body["extra_key"] = request.cache_salt
        return Call("/generate", body)

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

    def _fields(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        meta = answer["meta_info"]
        end = meta["finish_reason"] or {"type": "abort"}
        entries = meta.get("output_token_logprobs") or []
        logged = as_ids(entry[1] for entry in entries)
        # Old servers send ids only in this list, newer ones also beside it.
        token_ids = as_ids(answer.get("output_ids") or logged)
        return {
            "token_ids": token_ids,
            "logged": logged,
            "logprobs": as_numbers(entry[0] for entry in entries),
            "finish_reason": end["type"],
            # Text here is a stop string, of which none was asked for, or SGLang's word for NaN logits.
            "stop_reason": end.get("matched"),
            "spans": _spans(meta, len(token_ids)),
            # Its count of sampled ids may hold some that were drafted behind the last one.
            "usage": {"prompt_tokens": meta.get("prompt_tokens")},
            "cached_tokens": meta.get("cached_tokens"),
            "routed_experts": meta.get("routed_experts"),
            "echoes": [("id", meta.get("id"))],
            # SGLang cuts a call a few ids before the context is full, and where its cache has no room.
            "short_is_odd": False,
        }

    def _scores(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        if as_ids(entry[1] for entry in entries) != token_ids[1:]:
            raise ValueError("the log-probs are of other ids than those sent")
        return as_numbers(entry[0] for entry in entries)


def _spans(meta: Mapping[str, Any], length: int) -> list[Span] | None:
    """`weight_versions` where the server sends spans, else one span with its `weight_version`.

    Older servers send the latter alone: the last weights of a call within which they were exchanged.
    """
    if meta.get("weight_versions"):
        return as_spans(meta["weight_versions"])
    version = meta.get("weight_version")
    return None if version is None else [(as_version(version), 0, length)]
