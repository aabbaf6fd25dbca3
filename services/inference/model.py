"""Loading a model, checking that this backend computes it right, and swapping its weights.

Invariant: the weights in use are either all old or all new; a checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from services.inference.batch import Batch
from services.inference.errors import CheckpointError

# Two checkpoints with equal shapes can still mean different models through these.
_ARCHITECTURE_KEYS = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
)

SELF_CHECK_TOLERANCE = 1e-3
"""Largest difference of a logit between the batched path and the model's own forward, at start-up."""


@dataclass(frozen=True)
class Model:
    """A loaded model and what the server needs to know of it."""

    module: torch.nn.Module
    tokenizer: Any | None
    """None when the directory has no loadable tokenizer; text fields are empty then."""
    eos_ids: tuple[int, ...]
    """Ids that end a turn; the first is the model's own end of turn."""
    vocab_size: int
    max_model_len: int
    """Tokens, prompt and completion together."""
    kv_bytes_per_token: int


def load_model(directory: Path, max_model_len: int | None) -> Model:
    """Load in float32 for the CPU. ValueError when the directory or architecture cannot be served."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"--model {directory} has no config.json; name a directory in Hugging Face's format")
    config = AutoConfig.from_pretrained(directory)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or (
        getattr(config, "use_sliding_window", False) and config.sliding_window
    ):
        raise ValueError(
            f"{directory} uses {sorted(layer_types)} layers; the embedded backend serves "
            "full attention only, use vLLM"
        )
    context = config.max_position_embeddings
    if max_model_len is not None and max_model_len > context:
        raise ValueError(
            f"--max-model-len {max_model_len} is above the model's {context} positions; lower it"
        )
    module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    module.requires_grad_(False)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    keys_and_values, bytes_per_number = 2, 4
    model = Model(
        module=module,
        tokenizer=_load_tokenizer(directory),
        eos_ids=_eos_ids(module, config),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or context,
        kv_bytes_per_token=config.num_hidden_layers
        * kv_heads
        * head_dim
        * keys_and_values
        * bytes_per_number,
    )
    self_check(model)
    return model


def _load_tokenizer(directory: Path) -> Any | None:
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError):
        return None


def _eos_ids(module: torch.nn.Module, config: Any) -> tuple[int, ...]:
    """The model's own end of turn first, then the others that its generation config names."""
    ids: list[int] = []
    for source in (config, getattr(module, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(dict.fromkeys(ids))


@torch.inference_mode()
def self_check(model: Model) -> None:
    """Compare the batched path with the model's own forward on two short rows; also warms up.

    ValueError when they differ: an architecture that scales its logits or positions in a way of its own
    would be served wrong without a word.
    """
    long = [i % model.vocab_size for i in range(1, 8)]
    short = long[2:5]
    batch = Batch(model.module, capacity=0)
    batch.prefill([long[:-1], short[:-1]], len(long))
    logits = batch.decode([long[-1], short[-1]])
    for row, ids in enumerate((long, short)):
        expected = model.module(input_ids=torch.tensor([ids])).logits[0, -1].float()
        difference = (logits[row].float() - expected).abs().max().item()
        if not difference <= SELF_CHECK_TOLERANCE:
            raise ValueError(
                f"{model.module.config.model_type}: batched logits differ from the model's own by "
                f"{difference:.3g}; the embedded backend cannot serve this architecture, use vLLM"
            )


def read_checkpoint(model: Model, directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, checked against the running model.

    CheckpointError names the first difference in architecture, tensor names or shapes. Touches no weights,
    so it may run while the engine works.
    """
    _check_config(model, directory)
    running = model.module.state_dict()
    tied = set(getattr(model.module, "_tied_weights_keys", None) or ())
    is_tied = bool(model.module.config.tie_word_embeddings)
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[name] = opened.get_tensor(name)
        except Exception as error:  # safetensors raises its own, undocumented types
            raise CheckpointError(
                f"{file} cannot be read: {error}; write the checkpoint to a fresh directory and rename it"
            ) from error
    for name, tensor in tensors.items():
        if name not in running:
            raise CheckpointError(
                f"{directory}: tensor {name} is not in the running model; start another backend"
            )
        if tensor.shape != running[name].shape:
            raise CheckpointError(
                f"{directory}: tensor {name} has shape {list(tensor.shape)}, the running model has "
                f"{list(running[name].shape)}; start another backend for this model"
            )
    missing = [name for name in running if name not in tensors and not (is_tied and name in tied)]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} tensors are missing, the first is {missing[0]}; save all of them"
        )
    return tensors


def apply_weights(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """Copy checked tensors over the running weights; only between two steps of the engine."""
    running = model.module.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            running[name].copy_(tensor)


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [directory / name for name in names]
    raise CheckpointError(
        f"weights_path {directory} has no model.safetensors and no index; "
        "name a directory in Hugging Face's format"
    )


def _check_config(model: Model, directory: Path) -> None:
    """Compare architecture keys when the checkpoint brings a config; one without is judged by its tensors."""
    if not directory.is_dir():
        raise CheckpointError(f"weights_path {str(directory)!r} is not a directory that this backend can see")
    if not (directory / "config.json").is_file():
        return
    try:
        theirs = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}/config.json cannot be read: {error}; save it again") from error
    ours = model.module.config
    for key in _ARCHITECTURE_KEYS:
        their, our = getattr(theirs, key, None), getattr(ours, key, None)
        if their != our:
            raise CheckpointError(
                f"{directory}: {key} is {their!r}, the running model has {our!r}; start another backend"
            )
