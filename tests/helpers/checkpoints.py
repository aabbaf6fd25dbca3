"""Checkpoints made from the demo model for tests of weight updates."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.helpers import llm_reference
from tests.helpers.lazy import Lazy
from tests.helpers.llm_servers import DEMO_MODEL

torch, tensors_of = Lazy("torch"), Lazy("safetensors.torch")

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


def canary(checkpoint: Path) -> dict[str, list]:
    """Fields of a canary: fixed ids, and what a forward pass of the checkpoint says of them."""
    return {
        "token_ids": CANARY_IDS,
        "logprobs": llm_reference.logprobs(checkpoint, CANARY_IDS[:1], CANARY_IDS[1:]),
    }
