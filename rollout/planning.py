"""What a training run needs of a node, worked out before anything is started; `rollout plan` prints it.

A KV cache holds two vectors (K, V) a layer and token, of KV heads times head size (Kwon et al. 2023,
PagedAttention; Ainslie et al. 2023, grouped heads), one of DeepSeek-V2's kind a single latent vector. Sliding
windows are not taken off: for models that have them it is an upper bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from rollout.errors import RolloutError

GB = 1e9
ADMITTED = 0.75
"""Share of the caches that new rollouts may reserve (docs/backends.md); live ones grow by the rest."""
ENGINE_GB = 3.0
"""Of a GPU, for activations and CUDA graphs: an assumption, for vLLM measures it when it starts."""
SANDBOX_GB = 4.3
"""Memory that a sandbox may use by default (`ROLLOUT_SANDBOX_MEMORY_MB` is 4,096)."""
UNPACKED_GB = 2.7
"""One SWE-bench image: astropy-12907 has 2.69 (modelscope/evalscope, issue 1418), those of matplotlib have 8
(epoch-research/SWE-bench, issue 3)."""
PACKED = 128 / 404
"""A SIF against what it holds, of our base image (docs/images.md)."""
CACHE_GB = 50
"""What `ROLLOUT_IMAGE_CACHE_GB` is by default."""
CONTEXT, TURNS, PROMPT = 32_768, 50, 4_096
"""Of SWE tasks. The first two are the ProRL Agent paper's (arXiv 2603.18815)."""
TOOL_CALLS = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "<tool_call> with JSON"),
    **{"llama": "JSON", "gpt_oss": "Harmony"},
}


class PlanError(RolloutError, ValueError):
    """The plan cannot be made; the message says what is missing."""


@dataclass(frozen=True)
class Model:
    """What of a model decides how much memory it takes."""

    name: str
    weights_gb: float
    layers: int
    values: int
    """Numbers that a layer caches for a token."""
    kv_heads: int
    """GPUs over which one cache can be split; 1 where the layer caches a latent vector."""
    context: int
    kind: str
    """`model_type` of its configuration."""

    @property
    def token_bytes(self) -> int:
        """Of the cache, for one token in 16 bits."""
        return 2 * self.layers * self.values


PUBLISHED = {
    name: Model(name, 2 * billions, layers, 2 * heads * 128, heads, context, kind)
    for name, billions, layers, heads, context, kind in (
        ("Qwen/Qwen3-0.6B", 0.75, 28, 8, 40_960, "qwen3"),
        ("Qwen/Qwen3-1.7B", 2.03, 28, 8, 40_960, "qwen3"),
        ("Qwen/Qwen3-4B", 4.02, 36, 8, 40_960, "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", 4.02, 36, 8, 262_144, "qwen3"),
        ("Qwen/Qwen3-8B", 8.19, 36, 8, 40_960, "qwen3"),
        ("Qwen/Qwen3-14B", 14.8, 40, 8, 40_960, "qwen3"),
        ("Qwen/Qwen3-32B", 32.8, 64, 8, 40_960, "qwen3"),
        ("Qwen/Qwen3-30B-A3B", 30.5, 48, 4, 40_960, "qwen3_moe"),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03, 32, 8, 131_072, "llama"),
    )
}
"""By their cards and `config.json`: billions of parameters in 16 bits, layers, KV heads of 128, context."""


def model_of(name: str, billions: float | None = None) -> Model:
    """A published model, or a checkpoint's directory (or `config.json`) here.

    Args:
        billions: Parameters; None = as published, or by the size of the weights beside the configuration.

    Raises:
        PlanError: It is neither, or its configuration lacks something.
    """
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if name in PUBLISHED:
            return replace(PUBLISHED[name], **({"weights_gb": 2 * billions} if billions else {}))
        known = ", ".join(PUBLISHED)
        raise PlanError(f"no model {name!r}: give a directory with its config.json, or one of {known}")
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        layers = sum(kind != "linear_attention" for kind in kinds)
        if "kv_lora_rank" in config:
            kv_heads, values = 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            heads = config["num_attention_heads"]
            size = config.get("head_dim") or config["hidden_size"] // heads
            kv_heads = config.get("num_key_value_heads") or heads
            values = 2 * size * kv_heads
        context, kind = int(config["max_position_embeddings"]), str(config.get("model_type"))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"{path} is no model's configuration: {error!r}") from None
    size = sum(file.stat().st_size for file in path.parent.glob("*.safetensors")) / GB
    weights = 2 * billions if billions else size
    if not weights:
        raise PlanError(f"no *.safetensors beside {path}: give --params, billions of parameters")
    return Model(name, weights, layers, values, kv_heads, context, kind)


def plan(
    model: Model,
    *,
    gpus: int,
    gpu_gb: float,
    share: float,
    cores: int,
    memory_gb: float,
    tasks: int,
    n: int,
    images: int,
    unpacked_gb: float,
    context: int | None = None,
) -> dict[str, Any]:
    """Engines, slots, disk and settings of one node.

    Args:
        share: Of each GPU's memory that engines may take; what is left is the trainer's.
        tasks: Of one training step, each rolled out `n` times.
        images: Different ones that the data set needs, each of `unpacked_gb`.
        context: Tokens; None = 32,768, or what the model has.

    Raises:
        PlanError: The model does not fit on the GPUs or has less context, or three sandboxes do not fit.
    """
    if context and context > model.context:
        raise PlanError(f"--context {context}: {model.name} has a context of {model.context}")
    context = context or min(CONTEXT, model.context)
    usable = share * gpu_gb - ENGINE_GB
    ways = [2**k for k in range(gpus.bit_length()) if gpus % 2**k == 0]
    # At least half of what an engine has is for its cache.
    tensor = next((k for k in ways if k * usable >= 2 * model.weights_gb), ways[-1])
    # Where there are more GPUs than KV heads, each head's cache lies on several.
    token_bytes = model.token_bytes * max(1, tensor / model.kv_heads)
    cache = int((tensor * usable - model.weights_gb) * GB / token_bytes)
    if cache < context:
        raise PlanError(
            f"{model.name} leaves {max(cache, 0)} tokens of cache on {tensor} GPUs, fewer than a context "
            f"of {context}: more GPUs, a --share above {share:g}, or a smaller --context"
        )
    engines = gpus // tensor
    # A rollout grows from its prompt to the context, so live ones hold half of it on average.
    live = int(ADMITTED * cache * engines / (context / 2))
    # The trainer has half of the memory.
    sandboxes = int(memory_gb / 2 / SANDBOX_GB)
    if sandboxes < 3:
        raise PlanError(
            f"--memory-gb {memory_gb:g}: half of it must hold 3 sandboxes of {SANDBOX_GB} GB: give 26"
        )
    for run in range(max(1, min(live, sandboxes, tasks * n)), 0, -1):
        init, scored = (min(ceil(run / part), max(1, cores // part)) for part in (4, 2))
        slots = {"init": init, "run": run, "eval": scored}
        # A rollout has its sandbox in each of the stages.
        if sum(slots.values()) <= sandboxes:
            break
    prompt = min(PROMPT, context // 2)
    unpacked_all = ceil(images * unpacked_gb)
    limits = {"max_turns": TURNS, "run_timeout_s": 1800, "eval_timeout_s": 1200}
    return {
        "model": {
            "name": model.name,
            "weights_gb": round(model.weights_gb, 1),
            "cache_bytes_per_token": model.token_bytes,
            "context": model.context,
            "tool_calls": TOOL_CALLS.get(model.kind, "as its chat template has them"),
        },
        "engines": {"count": engines, "gpus_each": tensor, "cache_tokens_each": cache},
        "rollouts": {"by_caches": live, "by_memory": sandboxes, "in_a_step": tasks * n},
        "slots": slots,
        "disk_gb": {
            "images": images,
            "files": round(images * unpacked_gb * PACKED),
            "unpacked_in_use": ceil(min(ceil(sum(slots.values()) / n) + 1, images) * unpacked_gb),
            "unpacked_all": unpacked_all,
        },
        "limits": limits,
        "commands": {
            "service": f"ROLLOUT_IMAGE_CACHE_GB={max(CACHE_GB, unpacked_all)} rollout up --no-backend "
            + " ".join(f"--slots-{stage} {number}" for stage, number in slots.items()),
            "engine": f"vllm serve {model.name} --max-model-len {context} "
            f"--gpu-memory-utilization {share:g} --tensor-parallel-size {tensor} --enable-scale-out "
            "--logprobs-mode processed_logprobs --enable-prompt-tokens-details",
            "rows": "rollout tasks convert ROWS --handler swe --verl train.parquet "
            f"--limits '{json.dumps(limits)}'",
            "verl": f"data.train_batch_size={tasks} actor_rollout_ref.rollout.n={n} "
            f"data.max_prompt_length={prompt} data.max_response_length={context - prompt} "
            f"actor_rollout_ref.rollout.gpu_memory_utilization={share:g} "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor}",
        },
    }
