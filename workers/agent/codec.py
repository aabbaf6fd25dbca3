"""The codec of a model: how its tokenizer's chat format is written and read, loaded once a process."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from pathlib import Path
from typing import Any

import structlog

from rollout.schema import Backend
from workers.agent.formats import Codec, CodecError, RendererCodec, TemplateCodec
from workers.agent.guard import TokenizerGuard

log = structlog.get_logger("codec")

MAX_LOADED = 16
"""Tokenizers kept in memory; a large vocabulary takes 100 MB."""

_CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "It is.", "parameters": {"type": "object", "properties": {}}},
}
_ASKED = {"role": "user", "content": "Hi 12."}
_CALLED = {"role": "assistant", "content": "So.", "tool_calls": [_CALL]}
_ANSWERED = {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"}
_PROBE: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([_ASKED], []),
    ([{"role": "system", "content": "Be brief."}, _ASKED], []),
    ([_ASKED], [_TOOL]),
    ([{"role": "system", "content": "Be brief."}, _ASKED], [_TOOL]),
    ([_ASKED, _CALLED, _ANSWERED, _ANSWERED], [_TOOL]),
    ([_ASKED, {"role": "assistant", "content": "So."}, _ASKED], []),
]
"""Conversations, with their tools, on which a renderer must agree with the tokenizer's own template."""


def _renderer_codec(guard: TokenizerGuard, path: str) -> RendererCodec | None:
    """The codec by a renderer of the library, or None where none fits this tokenizer.

    The library maps hub names; a fine-tune in a local directory has none. There, the renderer of the
    model's architecture is taken if it renders some conversations exactly as the template does.
    """
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    name = MODEL_RENDERER_MAP.get(path)
    if name is None:
        config = Path(path) / "config.json"
        model_type = json.loads(config.read_text()).get("model_type", "") if config.is_file() else ""
        name = model_type if model_type in set(MODEL_RENDERER_MAP.values()) else None
    if name is None:
        return None
    config = config_from_name(name)
    if "thinking_retention" in type(config).model_fields:
        # Dropping old reasoning from the history would rewrite ids that were sampled.
        config = config.model_copy(update={"thinking_retention": "all"})
    known = path in MODEL_RENDERER_MAP
    try:
        codec = RendererCodec(guard, create_renderer(guard, config))
        agreed = known or all(_agree(codec, guard, *probe) for probe in _PROBE)
        reason = "it disagrees with the tokenizer's chat template"
    except Exception as error:
        # Such as a token that the renderer writes and this tokenizer lacks, or text that can forge a turn.
        agreed, reason = False, str(error)[:200]
    if not agreed:
        log.warning("renderer not usable; using the template", renderer=name, tokenizer=path, reason=reason)
    return codec if agreed else None


def _agree(
    codec: RendererCodec, guard: TokenizerGuard, chat: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> bool:
    ids = guard.apply_chat_template(chat, tools=tools or None, add_generation_prompt=True)
    return codec.render_chat(chat, tools) == ids


def _digest(tokenizer: Any, path: str) -> str:
    """Name and digest of all that decides what text becomes: vocabulary, merges, normaliser, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = json.loads(backend.to_str()) if backend is not None else sorted(tokenizer.get_vocab().items())
    if isinstance(body, dict):
        # State of calls, not of the tokenizer.
        body = {key: value for key, value in body.items() if key not in ("padding", "truncation")}
    text = json.dumps([body, tokenizer.chat_template], sort_keys=True, default=str)
    return f"{Path(path).name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def takeover_obstacle(before: Backend, after: Backend) -> str | None:
    """Why `after` cannot go on with a rollout's ids, in words; None = it can. May load a tokenizer: blocks.

    Ids mean the same where all that makes them is the same, whatever the tokenizers are called. A
    shorter context would refuse, or silently clip, what was budgeted for the longer one.
    """
    if after.max_model_len < before.max_model_len:
        return f"backend {after.id}: its context of {after.max_model_len} ids is below {before.max_model_len}"
    if after.tokenizer == before.tokenizer:
        return None
    try:
        known, new = (load_codec(backend.tokenizer).digest for backend in (before, after))
    except CodecError as error:
        return f"backend {after.id}: {error}"
    if known.rpartition("@")[2] != new.rpartition("@")[2]:
        return f"backend {after.id}: its tokenizer {new} is not {known}"
    return None


_codecs: dict[str, Codec] = {}
_loading = threading.Lock()


def preload() -> None:
    """Import what loading a codec takes: seconds, which the first rollouts need not wait for."""
    with _loading:
        importlib.import_module("renderers.qwen3")
        importlib.import_module("transformers").AutoTokenizer  # noqa: B018 (the access is the import)


def load_codec(path: str) -> Codec:
    """The codec of a tokenizer (directory or hub name); loaded once a process.

    Raises:
        CodecError: It cannot be loaded, or its template cannot be continued token by token.
    """
    # Without the lock, so that one that is here need not wait for another that loads.
    if codec := _codecs.get(path):
        return codec
    # One at a time: the imports of transformers are lazy and not safe from several threads.
    with _loading:
        if path not in _codecs:
            codec = _load(path)
            # A new checkpoint directory for every policy version mostly brings the tokenizer that is here.
            same = (
                known
                for known in _codecs.values()
                if (known.digest, known.vocab_size, known.end_ids)
                == (codec.digest, codec.vocab_size, codec.end_ids)
            )
            _codecs[path] = next(same, codec)
            if len(_codecs) > MAX_LOADED:
                del _codecs[next(iter(_codecs))]
        return _codecs[path]


def _load(path: str) -> Codec:
    try:
        from transformers import AutoTokenizer

        # The path may be a server's word: nothing that lies there is run.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise CodecError(
            f"tokenizer {path!r} cannot be loaded on this node ({reason}); register the backend with "
            "`tokenizer` set to a path that the RUN workers see"
        ) from error
    guard = TokenizerGuard(tokenizer)
    codec = _renderer_codec(guard, path) or TemplateCodec(guard)
    codec.digest = _digest(tokenizer, path)
    config = _model_config(path)
    generation = _generation_config(path)
    # A model's output may have more rows than the tokenizer has ids, and a policy may sample them.
    rows = config.get("vocab_size")
    codec.vocab_size = max(len(tokenizer), rows if type(rows) is int else 0)
    ends = [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    codec.end_ids = guard.control_ids | frozenset(ends)
    return codec


def _ids(value: Any) -> list[int]:
    """One id or several, as configurations have them."""
    return [entry for entry in (value if isinstance(value, list) else [value]) if type(entry) is int]


def _model_config(path: str) -> dict[str, Any]:
    """The text model's configuration beside the tokenizer; empty where there is none."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return {}
    nested = config.get("text_config") or {}
    return {**config, **{name: value for name, value in nested.items() if value is not None}}


def _generation_config(path: str) -> dict[str, Any]:
    """What engines end a turn at by themselves may stand there alone; empty where there is none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path).to_dict()
    except (OSError, ValueError):
        return {}
