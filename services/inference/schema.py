"""Request bodies of the two generation routes, checked before anything is queued."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.inference.errors import RequestError
from services.inference.model import Model
from services.inference.sampling import SamplingParams

COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; /inference/v1/generate defaults to the rest of the context."""

MAX_CACHE_SALT = 1024
"""Characters."""

_ENVELOPE_KEYS = {
    "model",
    "prompt",
    "stream",
    "stream_options",
    "return_token_ids",
    "request_id",
    "cache_salt",
    "priority",
    "user",
    "add_special_tokens",
    "session_id",
    "return_tokens_as_token_ids",
}


@dataclass(frozen=True)
class Generation:
    """What both routes come down to."""

    request_id: str
    """The wire id, prefix included."""
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Clipped to what the prompt leaves of the context."""
    stream: bool
    include_usage: bool
    return_token_ids: bool
    priority: int


def parse_generate(body: Any, header_id: str | None, model: Model, served_name: str) -> Generation:
    """Body of POST /inference/v1/generate; RequestError names the field at fault."""
    body = _mapping(body, "body")
    _check_model(body, served_name)
    sampling = _mapping(body.get("sampling_params"), "sampling_params")
    params = SamplingParams.from_json(sampling, model.eos_ids, prefix="sampling_params.")
    prompt = _token_ids(body.get("token_ids"), "token_ids", model)
    room = model.max_model_len - len(prompt)
    if body.get("output_mode", "tokens") != "tokens":
        raise RequestError(
            f"output_mode = {body['output_mode']!r} is not supported; use tokens, or /v1/completions",
            "output_mode",
        )
    for name in ("features", "content_parts", "kv_transfer_params"):
        if body.get(name):
            raise RequestError(f"{name} is not supported by the embedded backend; use vLLM", name)
    base_id = header_id or _string(body.get("request_id"), "request_id") or uuid.uuid4().hex
    return Generation(
        request_id=f"generate-tokens-{base_id}",
        prompt_ids=prompt,
        params=params,
        max_tokens=min(params.max_tokens or room, room),
        **_envelope(body, params),
    )


def parse_completion(body: Any, header_id: str | None, model: Model, served_name: str) -> Generation:
    """Body of POST /v1/completions with one prompt, as ids or text; RequestError names the field at fault."""
    body = _mapping(body, "body")
    _check_model(body, served_name)
    sampling = {name: value for name, value in body.items() if name not in _ENVELOPE_KEYS}
    params = SamplingParams.from_json(sampling, model.eos_ids)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise RequestError("prompt is text, but the model has no tokenizer; send token ids", "prompt")
        prompt = model.tokenizer.encode(prompt, add_special_tokens=bool(body.get("add_special_tokens", True)))
    elif isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    prompt = _token_ids(prompt, "prompt", model)
    max_tokens = params.max_tokens or COMPLETIONS_MAX_TOKENS
    # As vLLM: more than the whole context is refused, more than what the prompt leaves is clipped.
    if max_tokens > model.max_model_len:
        raise RequestError(
            f"max_tokens = {max_tokens} exceeds the context of {model.max_model_len}; with this prompt of "
            f"{len(prompt)} tokens ask for at most {model.max_model_len - len(prompt)}",
            "max_tokens",
        )
    base_id = header_id or _string(body.get("request_id"), "request_id") or uuid.uuid4().hex
    return Generation(
        request_id=f"cmpl-{base_id}",
        prompt_ids=prompt,
        params=params,
        max_tokens=min(max_tokens, model.max_model_len - len(prompt)),
        **_envelope(body, params),
    )


def _envelope(body: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
    """The fields that both routes share."""
    stream = _boolean(body, "stream")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT):
        raise RequestError(
            f"cache_salt must be a text of 1 to {MAX_CACHE_SALT} characters, got {salt!r:.60}", "cache_salt"
        )
    if stream and params.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs come with a whole answer only; leave out stream", "prompt_logprobs"
        )
    priority = body.get("priority") or 0
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority = {priority!r} must be an integer", "priority")
    options = _mapping(body.get("stream_options") or {}, "stream_options")
    return {
        "stream": stream,
        "include_usage": _boolean(options, "include_usage"),
        "return_token_ids": _boolean(body, "return_token_ids"),
        "priority": priority,
    }


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {type(value).__name__}", name)
    return value


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise RequestError(f"{name} = {value!r} must be true or false", name)
    return value


def _string(value: Any, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} = {value!r} must be a text", name)
    return value


def _check_model(body: Mapping[str, Any], served_name: str) -> None:
    model = body.get("model")
    if model is not None and model != served_name:
        raise RequestError(
            f"model {model!r} is not served here; the one that is: {served_name}", "model", 404
        )


def _token_ids(value: Any, name: str, model: Model) -> list[int]:
    """Ids of a prompt that leaves room for at least one token."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"{name} must be a non-empty list of token ids, got {value!r:.60}", name)
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token < model.vocab_size:
            raise RequestError(
                f"{name}[{position}] = {token!r} must be a token id from 0 to {model.vocab_size - 1}", name
            )
    if len(value) >= model.max_model_len:
        raise RequestError(
            f"{name} has {len(value)} tokens and the context is {model.max_model_len}; "
            f"send at most {model.max_model_len - 1}",
            name,
        )
    return value
