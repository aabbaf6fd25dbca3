"""What a trainer computes: log-probs of sampled tokens, one sequence at a time, with plain transformers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from rollout.trajectory import Chain
from tests.helpers.lazy import Lazy

torch, transformers = Lazy("torch"), Lazy("transformers")


@lru_cache(maxsize=4)
def load(model_dir: Path) -> Any:
    """The model in float32 on one thread, loaded once per test run."""
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def logprobs(model_dir: Path, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of each sampled token under softmax(logits / temperature), without batch or cache."""
    with torch.inference_mode():
        logits = load(model_dir)(input_ids=torch.tensor([prompt + sampled])).logits[0].float() / temperature
        table = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        return table.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()


def chain_logprobs(chain: Chain, model_dir: Path) -> tuple[list[float], list[float]]:
    """Log-probs of a chain's sampled ids: as recorded, and as one forward pass over the chain gives them."""
    recomputed = logprobs(model_dir, chain.prompt_ids, chain.response_ids)
    pairs = zip(chain.logprobs, recomputed, chain.loss_mask, strict=True)
    sampled = [(ours, reference) for ours, reference, mask in pairs if mask]
    return [ours for ours, _ in sampled], [reference for _, reference in sampled]


def perturbed_copy(model_dir: Path, target: Path, scale: float = 0.05, seed: int = 0) -> Path:
    """A checkpoint of the same shapes with noise on every weight: a policy one update later."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(target)
    return target
