"""The codec of a model: how its tokenizer's chat format is written and read, loaded once a process."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import threading
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from rollout.schema import Backend
from workers.agent.formats import Codec, CodecError, TemplateCodec, TokenizerMissing
from workers.agent.guard import TokenizerGuard
from workers.agent.renderer_codec import renderer_codec

MAX_LOADED = 16
"""Tokenizers kept in memory; a large vocabulary takes 100 MB."""


def _digest(codec: Codec, tokenizer: Any, path: str) -> str:
    """Name and digest of all that decides what text becomes: format, vocabulary, merges, template …"""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = json.loads(backend.to_str()) if backend is not None else sorted(tokenizer.get_vocab().items())
    if isinstance(body, dict):  # what is left out is state of calls, not of the tokenizer
        body = {key: value for key, value in body.items() if key not in ("padding", "truncation")}
    text = json.dumps([codec.name, body, tokenizer.chat_template], sort_keys=True, default=str)
    return f"{Path(path).name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def takeover_obstacle(before: Backend, after: Backend) -> str | None:
    """Why `after` cannot go on with a rollout's ids, in words; None = it can. May load a tokenizer: blocks.

    Ids mean the same where all that makes them is the same, whatever the tokenizers are called. A
    shorter context would refuse, or silently clip, what was budgeted for the longer one.
    """
    if after.api == "chat":
        return f"backend {after.id}: it is text only"
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


loaded: dict[str, Codec] = {}
"""By the paths of their tokenizers."""
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
    if codec := loaded.get(path):
        return codec
    # One at a time: the imports of transformers are lazy and not safe from several threads.
    with _loading:
        if path not in loaded:
            gc.disable()  # it would look through millions of new objects again and again: 40 % of the time
            try:
                codec = _load(path)
            finally:
                gc.enable()
            # A new checkpoint directory for every policy version mostly brings the tokenizer that is here.
            traits = attrgetter("digest", "vocab_size", "end_ids")
            same = (known for known in loaded.values() if traits(known) == traits(codec))
            loaded[path] = next(same, codec)
            if len(loaded) > MAX_LOADED:
                del loaded[next(iter(loaded))]
        return loaded[path]


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
    config, generation = _configs(path)
    codec = renderer_codec(guard, path, str(config.get("model_type") or "")) or TemplateCodec(guard)
    codec.digest = _digest(codec, tokenizer, path)
    # A model's output may have more rows than the tokenizer has ids, and a policy may sample them.
    rows = config.get("vocab_size")
    codec.vocab_size = max(len(tokenizer), rows if type(rows) is int else 0)
    ends = [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    codec.end_ids = guard.control_ids | frozenset(ends)
    return codec


def _ids(value: Any) -> list[int]:
    """One id or several, as configurations have them."""
    return [entry for entry in (value if isinstance(value, list) else [value]) if type(entry) is int]


def _configs(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations of the text model and of generation beside the tokenizer; empty where there are none."""
    from transformers import GenerationConfig, PretrainedConfig

    config: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        config, _ = PretrainedConfig.get_config_dict(path)
    with suppress(OSError, ValueError):  # what engines end a turn at by themselves may stand there alone
        generation = GenerationConfig.from_pretrained(path).to_dict()
    nested = config.get("text_config") or {}
    known = {name: value for name, value in nested.items() if value is not None and name != "model_type"}
    return config | known, generation
