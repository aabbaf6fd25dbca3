"""The model: loading it, computing many sequences at once, and exchanging its weights.

Invariant: the weights in use are either all old or all new; a checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

# Two checkpoints with equal shapes can still mean different models through these.
ARCHITECTURE_KEYS = (
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

BYTES_PER_NUMBER = 4


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded into the running model; the weights in use stay as they were."""


@dataclass(frozen=True)
class Model:
    """A loaded model and what the server needs to know of it."""

    module: torch.nn.Module
    path: str
    """Directory of the model, where a worker on the same file system finds the tokenizer."""
    tokenizer: Any | None
    """None when the directory has no loadable tokenizer; text fields are empty then."""
    eos_ids: tuple[int, ...]
    """Ids that end a turn; the first is the model's own end of turn."""
    vocab_size: int
    max_model_len: int
    """Tokens, prompt and completion together."""
    kv_bytes_per_token: int

    def decode(self, token_ids: list[int], skip_special: bool = False) -> str:
        """Text of the tokens; empty without a tokenizer."""
        if self.tokenizer is None or not token_ids:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special)


class Batch:
    """Forward passes over rows that join and leave; knows token ids and lengths, nothing of requests.

    Invariant: row i holds `lengths[i]` positions, padded on the left, so that all rows end in the same column
    of the cache.
    """

    def __init__(self, module: torch.nn.Module):
        self._body = module.base_model
        self.head = module.get_output_embeddings()
        """Hidden states (…, width) → logits (…, vocabulary)."""
        self._cache = DynamicCache()
        self.lengths: list[int] = []
        """Positions stored for each row."""

    @property
    def places(self) -> int:
        """Positions that the cache has memory for, padding and rows that have ended included."""
        return len(self.lengths) * self._cache.get_seq_length()

    def prefill(self, kept: list[int], prompts: list[list[int]]) -> list[torch.Tensor]:
        """Begin a row for each prompt behind the rows to keep, which are numbered anew; drop the others.

        Returns:
            The hidden states of each prompt, (tokens of the prompt, width).
        """
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        fresh = DynamicCache()
        hidden = self._forward(ids, lengths, fresh)
        self.lengths = [self.lengths[row] for row in kept] + lengths
        if kept:
            width = max(self.lengths)
            for layer in fresh.layers:
                # Dropped as soon as it is copied: two whole caches would take twice the memory allowed.
                old = self._cache.layers.pop(0)
                layer.keys = _joined(old.keys[kept], layer.keys, width)
                layer.values = _joined(old.values[kept], layer.values, width)
        self._cache = fresh
        return [row[longest - length :] for row, length in zip(hidden, lengths, strict=True)]

    def decode(self, token_ids: list[int | None]) -> torch.Tensor:
        """Feed each row its newest token, None to one that has ended; returns the next logits of the others.

        A row that has ended is computed for nothing until it is dropped: that would copy all the others.
        """
        # One position, its own newest, for a row that has ended: none at all would make it NaN.
        self.lengths = [
            1 if token is None else length + 1 for token, length in zip(token_ids, self.lengths, strict=True)
        ]
        hidden = self._forward(torch.tensor([[token or 0] for token in token_ids]), self.lengths, self._cache)
        return self.head(hidden[[row for row, token in enumerate(token_ids) if token is not None], 0])

    def keep(self, kept: list[int]) -> None:
        """Drop all rows but these, which are numbered anew, and the columns that only the others had."""
        self.lengths = [self.lengths[row] for row in kept]
        width = max(self.lengths)
        for layer in self._cache.layers:
            layer.keys = layer.keys[kept, :, -width:]
            layer.values = layer.values[kept, :, -width:]

    def _forward(self, ids: torch.Tensor, lengths: list[int], cache: DynamicCache) -> torch.Tensor:
        """Hidden states (rows, new columns, width); `lengths` counts the new tokens."""
        columns = torch.arange(cache.get_seq_length() + ids.shape[1])
        padding = (len(columns) - torch.tensor(lengths)).unsqueeze(1)
        return self._body(
            input_ids=ids,
            attention_mask=columns >= padding,
            position_ids=(columns[-ids.shape[1] :] - padding).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state


def _joined(old: torch.Tensor, new: torch.Tensor, width: int) -> torch.Tensor:
    """Old rows, then new ones, each with its last `width` columns, or with padding before what it has.

    All are keys or values of one layer, (rows, heads, columns, head dim).
    """
    # Zeros, not garbage: a masked place has weight 0, and 0 times a stray NaN would still be NaN.
    joined = new.new_zeros((len(old) + len(new), new.shape[1], width, new.shape[3]))
    columns = min(width, old.shape[2])
    joined[: len(old), :, width - columns :] = old[:, :, old.shape[2] - columns :]
    joined[len(old) :, :, width - new.shape[2] :] = new
    return joined


def load_model(directory: Path, max_model_len: int | None) -> Model:
    """Load in float32 for the CPU. ValueError when the directory or architecture cannot be served."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"--model {directory} has no config.json; name a directory in Hugging Face's format")
    config = AutoConfig.from_pretrained(directory)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "use_sliding_window", False) and config.sliding_window
    if layer_types != {"full_attention"} or sliding:
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
    keys_and_values = 2
    model = Model(
        module=module,
        path=str(directory),
        tokenizer=_load_tokenizer(directory),
        eos_ids=_eos_ids(config, module.generation_config),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or context,
        kv_bytes_per_token=(
            config.num_hidden_layers * kv_heads * head_dim * keys_and_values * BYTES_PER_NUMBER
        ),
    )
    self_check(model)
    return model


def _load_tokenizer(directory: Path) -> Any | None:
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError):
        return None


def _eos_ids(*configs: Any) -> tuple[int, ...]:
    """The model's own end of turn first, then the others that its generation config names."""
    ids: list[int] = []
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(dict.fromkeys(ids))


@torch.inference_mode()
def self_check(model: Model) -> None:
    """Compare the batched path with the model's own forward on rows that joined apart; also warms up.

    ValueError when they differ: an architecture that scales its logits or positions in a way of its own
    would be served wrong without a word.
    """
    long = [i % model.vocab_size for i in range(1, 8)]
    short = long[2:5]
    batch = Batch(model.module)
    batch.prefill([], [short[:-1], short])
    batch.prefill([0, 1], [long[:-1]])
    batch.keep([2, 1, 0])
    logits = batch.decode([long[-1], None, short[-1]])
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
    _check_config(model.module.config, directory)
    try:
        fresh, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=model.module.config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors raises its own, undocumented types
        raise CheckpointError(
            f"{directory}: model.safetensors, or its shards, cannot be read: {error}; "
            "write the checkpoint to a fresh directory and rename it"
        ) from error
    for fault in ("missing", "unexpected", "mismatched"):
        if names := sorted(info[f"{fault}_keys"], key=str):
            raise CheckpointError(
                f"{directory}: {len(names)} tensors are {fault}, the first is {names[0]}; save those of the "
                "running model, or start another backend"
            )
    return fresh.state_dict()


def apply_weights(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """Copy checked tensors over the running weights; only between two steps of the engine."""
    running = model.module.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            running[name].copy_(tensor)


def _check_config(running: Any, directory: Path) -> None:
    """Compare architecture keys when the checkpoint brings a config; one without is judged by its tensors."""
    if not directory.is_dir():
        raise CheckpointError(f"weights_path {str(directory)!r} is not a directory that this backend can see")
    if not (directory / "config.json").is_file():
        return
    try:
        config = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}/config.json cannot be read: {error}; save it again") from error
    for key in ARCHITECTURE_KEYS:
        value, expected = getattr(config, key, None), getattr(running, key, None)
        if value != expected:
            raise CheckpointError(
                f"{directory}: {key} is {value!r}, the running model has {expected!r}; start another backend"
            )
