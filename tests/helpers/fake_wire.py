"""vLLM's wire format as the fake engine reads and writes it."""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import dataclass
from typing import Any

from tests.helpers.engine_cache import BLOCK
from tests.helpers.engine_model import EngineModel, Sequence

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

_serial = iter(range(1 << 62))


class Refused(Exception):
    """A request that vLLM refuses."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Call:
    """What both generation routes come down to."""

    path: str
    model: str | None
    call_id: str | None
    """As the caller named it."""
    wire_id: str
    """As the server names it: abort needs this one."""
    prompt: list[int]
    max_tokens: int
    seed: int | None
    stop_token_ids: list[int]
    cache_salt: str | None
    logprobs: bool
    prompt_logprobs: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool


def parse(path: str, body: Any, max_model_len: int) -> Call:
    """The fields that matter, checked as vLLM does.

    Raises:
        Refused: 400.
    """
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    params = body.get("sampling_params") if path == GENERATE else body
    prompt = body.get("token_ids" if path == GENERATE else "prompt")
    if not isinstance(params, dict) or not isinstance(prompt, list) or not prompt:
        raise Refused("sampling_params and a prompt of token ids are required")
    try:
        array("I", prompt)
    except (TypeError, OverflowError) as error:
        raise Refused(f"the prompt holds something that is no token id: {error}") from None
    room = max_model_len - len(prompt)
    max_tokens = params.get("max_tokens") or (room if path == GENERATE else 16)
    if room < 1:
        raise Refused(f"the prompt has {len(prompt)} tokens and the context is {max_model_len}")
    if path == COMPLETIONS and max_tokens > max_model_len:
        raise Refused(f"max_tokens = {max_tokens} is more than the context of {max_model_len}")
    if not 0 <= params.get("temperature", 1.0) <= 2:
        raise Refused(f"temperature = {params['temperature']!r} is not from 0 to 2")
    call_id = body.get("request_id")
    prefix = "generate-tokens" if path == GENERATE else "cmpl"
    return Call(
        path=path,
        model=body.get("model"),
        call_id=call_id,
        wire_id=f"{prefix}-{call_id or next(_serial)}",
        prompt=prompt,
        max_tokens=min(max_tokens, room),
        seed=params.get("seed"),
        stop_token_ids=params.get("stop_token_ids") or [],
        cache_salt=body.get("cache_salt"),
        logprobs=params.get("logprobs") is not None,
        prompt_logprobs=params.get("prompt_logprobs") is not None,
        return_token_ids=bool(body.get("return_token_ids")),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def answer(
    call: Call, sequence: Sequence, scores: list[float] | None, model: str, *, start: int = 0
) -> dict[str, Any]:
    """The body of a whole reply, or of one with the ids from `start` on; `scores` = log-probs of the prompt's
    ids but the first."""
    ids, logprobs = sequence.token_ids[start:], sequence.logprobs[start:]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.answer.stop_reason if sequence.finish_reason == "stop" else None,
    }
    prompt_logprobs = None
    if scores is not None:
        entries = zip(call.prompt[1:], scores, strict=True)
        prompt_logprobs = [None, *({str(token): _logprob(value)} for token, value in entries)]
    head: dict[str, Any] = {"model": model, "created": int(time.time())}
    if call.path == GENERATE:
        content = [
            {"token_id": token, **_logprob(value)} for token, value in zip(ids, logprobs, strict=False)
        ]
        choice["logprobs"] = {"content": content} if call.logprobs else None
        choice["routed_experts"] = choice["sampling_mask"] = None
        choice["weight_versions"] = [
            {"version": version, "start": start, "end": end} for version, start, end in sequence.spans
        ]
        head |= {"request_id": call.wire_id, "output_mode": "tokens", "prompt_logprobs": prompt_logprobs}
    else:
        texts = {"tokens": [""] * len(ids), "text_offset": [0] * len(ids), "top_logprobs": None}
        choice["text"] = ""
        choice["prompt_logprobs"] = prompt_logprobs
        choice["logprobs"] = {**texts, "token_logprobs": logprobs} if call.logprobs else None
        if not call.return_token_ids:
            choice["token_ids"] = None
        head |= {"id": call.wire_id, "object": "text_completion"}
    usage = {
        "prompt_tokens": len(call.prompt),
        "completion_tokens": sequence.sampled,
        "total_tokens": len(call.prompt) + sequence.sampled,
        "prompt_tokens_details": {"cached_tokens": sequence.cached_tokens or 0},
    }
    return {**head, "choices": [choice], "usage": usage}


def chunk(call: Call, body: dict[str, Any], part: slice, *, first: bool, last: bool) -> dict[str, Any]:
    """The event of a stream with a part of a whole body's ids; the last one tells what the end tells."""
    event = _envelope(call, body)
    choice = {name: value for name, value in body["choices"][0].items() if name != "prompt_logprobs"}
    choice["token_ids"] = choice["token_ids"][part]
    if choice["logprobs"] is not None:
        parted = ("content", "tokens", "text_offset", "token_logprobs")
        choice["logprobs"] = {
            name: value[part] if name in parted else value for name, value in choice["logprobs"].items()
        }
    if not last:
        told = ("finish_reason", "stop_reason", "weight_versions", "routed_experts")
        choice |= {name: None for name in told if name in choice}
    if call.path == COMPLETIONS and call.return_token_ids:
        choice["prompt_token_ids"] = call.prompt if first else None
    return event | {"choices": [choice, *body["choices"][1:]]}


def usage_chunk(call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """The event behind the last one with a choice."""
    return _envelope(call, body) | {"choices": [], "usage": body["usage"]}


def _envelope(call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """What of a body is in every event; vLLM names the model on one route only."""
    without = {"usage", "prompt_logprobs"} | ({"model", "created"} if call.path == GENERATE else set())
    return {name: value for name, value in body.items() if name not in without}


def event_line(event: Any) -> bytes:
    """An event as it is sent."""
    return b"data: " + json.dumps(event).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def _logprob(value: float) -> dict[str, Any]:
    return {"logprob": value, "rank": 1}


def metrics(model: EngineModel, served_name: str) -> str:
    """Prometheus text with what a router reads."""
    labels = f'{{engine="0",model_name="{served_name}"}}'
    values = {
        "num_requests_running": ("gauge", model.running),
        "num_requests_waiting": ("gauge", model.waiting),
        "kv_cache_usage_perc": ("gauge", model.kv_usage),
        "prefix_cache_queries_total": ("counter", model.prompt_tokens),
        "prefix_cache_hits_total": ("counter", model.cached_tokens),
        "generation_tokens_total": ("counter", model.generated_tokens),
        "num_preemptions_total": ("counter", model.preemptions),
    }
    lines = []
    for name, (kind, value) in values.items():
        lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{labels} {float(value)}"]
    info = f'block_size="{BLOCK}",engine="0",num_gpu_blocks="{model.cache.blocks}"'
    lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{info}}} 1.0"]
    return "\n".join(lines) + "\n"
