"""The codec of a model: how its tokenizer's chat format is written and read, loaded once a process."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import operator
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from rollout.schema import Backend
from workers.agent.formats import Codec, CodecError, RendererCodec, TemplateCodec, TokenizerMissing
from workers.agent.guard import TokenizerGuard

log = structlog.get_logger("codec")

MAX_LOADED = 16
"""Tokenizers kept in memory; a large vocabulary takes 100 MB."""

HARMONY = "gpt-oss"
"""The renderer that brings an encoder of its own."""

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


def _renderer_codec(guard: TokenizerGuard, path: str, model_type: str) -> RendererCodec | None:
    """The codec by a renderer of the library, or None where none fits this tokenizer and it has a template.

    The library maps hub names. Of any other model, the renderers of its architecture are tried, and one is
    taken that renders some conversations exactly as the template does.

    Raises:
        CodecError: There is no template either.
    """
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(path)
    kind = model_type.replace("_", "-")
    reasons = []
    for name in [known] if known else _named_like(kind, set(MODEL_RENDERER_MAP.values())):
        # Nothing says more of gpt-oss than its own encoder: the template is but near to it.
        trusted = known or name == HARMONY or (not guard.chat_template and kind.startswith(name))
        try:
            config = _renderer_config(name)
            codec = _create(guard, config)
            if trusted or all(_agree(codec, guard, config, *probe) for probe in _PROBE):
                return codec
            reasons.append(f"renderer {name} disagrees with the tokenizer's chat template")
        except Exception as error:
            # Such as a token that the renderer writes and this tokenizer lacks, or text that can forge.
            reasons.append(f"renderer {name} cannot be used: {str(error)[:200]}")
            if name == HARMONY and kind == name:
                raise CodecError(
                    f"{reasons[-1]} (do its tokenizer's ids differ from o200k_harmony?)"
                ) from error
    if not guard.chat_template:
        raise CodecError("; ".join(["the tokenizer has no chat template", *reasons]))
    if reasons:
        log.warning("no renderer fits; using the chat template", tokenizer=path, reasons=reasons)
    return None


def _named_like(kind: str, names: set[str]) -> list[str]:
    """Renderers of an architecture, the most specific first; `llama-3` is one of `llama`, too."""
    plain = {name: name.replace(".", "-") for name in names}
    fitting = [name for name in names if kind and (kind.startswith(plain[name]) or name.startswith(kind))]
    return sorted(fitting, key=lambda name: (not kind.startswith(plain[name]), -len(name), name))


def _renderer_config(name: str) -> Any:
    from renderers import config_from_name

    config = config_from_name(name)
    if "thinking_retention" in type(config).model_fields:
        # Dropping old reasoning from the history would rewrite ids that were sampled.
        config = config.model_copy(update={"thinking_retention": "all"})
    return config


def _create(guard: TokenizerGuard, config: Any) -> RendererCodec:
    from renderers import create_renderer

    if config.name != HARMONY:
        return RendererCodec(guard, create_renderer(guard, config))
    # This encoder wants a vocabulary file, else downloads it, and holds it against a digest. So a file
    # that is made of the tokenizer also proves that both mean the same by an id.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    added = guard.get_added_vocab()
    lines = [
        f"{base64.b64encode(bytes(byte_of[char] for char in text)).decode()} {rank}\n"
        for text, rank in sorted(guard.get_vocab().items(), key=operator.itemgetter(1))
        if text not in added
    ]
    with tempfile.TemporaryDirectory() as directory, _environment("TIKTOKEN_ENCODINGS_BASE", directory):
        (Path(directory) / "o200k_base.tiktoken").write_text("".join(lines))
        return RendererCodec(guard, create_renderer(guard, config))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _agree(
    codec: RendererCodec,
    guard: TokenizerGuard,
    config: Any,
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> bool:
    # What a renderer holds fixed, such as the date, a template may take from the clock.
    fixed = {name: getattr(config, name) for name in config.template_field_names()}
    fixed = {name: value for name, value in fixed.items() if value is not None}
    ids = guard.apply_chat_template(chat, tools=tools or None, add_generation_prompt=True, **fixed)
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
        TokenizerMissing: It cannot be loaded on this node.
        CodecError: Its format cannot be continued token by token.
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
        raise TokenizerMissing(
            f"tokenizer {path!r} cannot be loaded on this node ({reason}); register the backend with "
            "`tokenizer` set to a path that the RUN workers see"
        ) from error
    guard = TokenizerGuard(tokenizer)
    config = _model_config(path)
    codec = _renderer_codec(guard, path, str(config.get("model_type") or "")) or TemplateCodec(guard)
    codec.digest = _digest(tokenizer, path)
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
    known = {name: value for name, value in nested.items() if value is not None and name != "model_type"}
    return {**config, **known}


def _generation_config(path: str) -> dict[str, Any]:
    """What engines end a turn at by themselves may stand there alone; empty where there is none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path).to_dict()
    except (OSError, ValueError):
        return {}
