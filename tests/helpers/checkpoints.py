"""Checkpoints made from the demo model for tests of weight updates."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from tests.helpers import llm_reference
from tests.helpers.lazy import Lazy
from tests.helpers.llm_servers import DEMO_MODEL

torch, tensors_of, transformers = Lazy("torch"), Lazy("safetensors.torch"), Lazy("transformers")

STOP_IDS = (319, 320, 321)
"""`<|endoftext|>`, `<|im_start|>` and `<|im_end|>` of the demo's tokenizer."""
CANARY_IDS = [18, 22, 311, 220, 23, 20, 5, 7, 9, 100, 120, 33, 44]


def endless_copy(target: Path, scale: float = 0.0, seed: int = 0) -> Path:
    """A copy of the demo model that never ends a turn, with noise on its weights.

    One dimension of the residual stream is made a constant that no layer reads or writes. The head sees it
    and lowers the stop tokens by it, so every call runs to its `max_tokens`.
    """
    shutil.copytree(DEMO_MODEL, target)
    tensors = tensors_of.load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        tensor += scale * torch.randn(tensor.shape, generator=generator)
        if name.endswith("layernorm.weight"):
            tensor[0] = 0.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0, :] = 0.0
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["model.norm.weight"][0] = 1.0
    tensors["lm_head.weight"][:, 0] = 0.0
    tensors["lm_head.weight"][list(STOP_IDS), 0] = -100.0
    tensors_of.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def random_qwen3(target: Path, rows: int = 151_936, often: dict[int, float] | None = None) -> Path:
    """A small random model of Qwen3's kind and vocabulary, beside whatever tokenizer lies at `target`.

    Args:
        often: Ids with about the probability that each is to have, whatever the context.
    """
    config = transformers.Qwen3Config(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the least that vLLM's kernel for CPUs takes
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=151_645,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        # One dimension of the residual stream is a constant, as in `endless_copy`.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        for token, share in (often or {}).items():
            # The final norm makes √64 of it, since the other dimensions are small.
            model.lm_head.weight[token, 0] = math.log(share * rows) / math.sqrt(config.hidden_size)
    model.save_pretrained(target)
    return target


def canary(checkpoint: Path) -> dict[str, list]:
    """Fields of a canary: fixed ids, and what a forward pass of the checkpoint says of them."""
    return {
        "token_ids": CANARY_IDS,
        "logprobs": llm_reference.logprobs(checkpoint, CANARY_IDS[:1], CANARY_IDS[1:]),
    }


def adapter(target: Path, seed: int, rank: int = 8, scale: float = 0.1) -> tuple[Path, Path]:
    """A random LoRA adapter of the demo model, as PEFT writes one, and the checkpoint that it amounts to."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors_of.load_file(DEMO_MODEL / "model.safetensors")
    added = {}
    for name in [
        name for name in tensors if name.endswith(("q_proj.weight", "v_proj.weight", "up_proj.weight"))
    ]:
        rows, columns = tensors[name].shape
        a = scale * torch.randn((rank, columns), generator=generator)
        b = scale * torch.randn((rows, rank), generator=generator)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        added |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        tensors[name] = tensors[name] + (b @ a).to(tensors[name].dtype)
    whole, alone = target / "whole", target / "adapter"
    shutil.copytree(DEMO_MODEL, whole)
    tensors_of.save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    alone.mkdir()
    tensors_of.save_file(added, alone / "adapter_model.safetensors")
    modules = ["q_proj", "v_proj", "up_proj"]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    settings |= {"target_modules": modules, "bias": "none", "base_model_name_or_path": str(DEMO_MODEL)}
    (alone / "adapter_config.json").write_text(json.dumps(settings))
    return alone, whole
