"""Log-probs of a prompt's own tokens: what `prompt_logprobs` asks for.

Invariant: they are of the model itself, softmax(logits) in float32. Temperature, top-k and top-p shape what
is sampled, not what was given; vLLM does the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

POSITIONS = 256
"""Scored at once: a table of 256 positions by 150,000 tokens is 150 MB."""

Entry = tuple[int, float, int]
"""A token id, its natural log-prob, and its rank (1 for the most likely)."""


def score_prompt(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, prompt_ids: list[int], most: int
) -> list[list[Entry]]:
    """For each token but the first: its own entry, then those of the `most` likely others at its place.

    Args:
        head: Hidden states (positions, width) → logits (positions, vocabulary).
        hidden: States of the prompt, (at least len(prompt_ids), width).
    """
    entries: list[list[Entry]] = []
    for start in range(0, len(prompt_ids) - 1, POSITIONS):
        targets = torch.tensor(prompt_ids[start + 1 : start + 1 + POSITIONS]).unsqueeze(1)
        logprobs = torch.log_softmax(head(hidden[start : start + len(targets)]).float(), dim=-1)
        chosen = logprobs.gather(1, targets)
        ranks = (logprobs >= chosen).sum(dim=-1).tolist()
        values, ids = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
        tops = zip(ids.tolist(), values.tolist(), strict=True)
        own = zip(targets.squeeze(1).tolist(), chosen.squeeze(1).tolist(), ranks, strict=True)
        for entry, (top_ids, top_values) in zip(own, tops, strict=True):
            others = zip(top_ids, top_values, range(1, most + 1), strict=False)
            entries.append([entry, *(other for other in others if other[0] != entry[0])])
    return entries
