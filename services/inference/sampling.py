"""Sampling parameters, drawing a token for each row of a batch, and scoring a prompt.

Invariant: the reported log-prob is the one of the distribution that was sampled from (logits divided by the
temperature, after top-k and top-p, renormalised, in float32). vLLM calls this `processed_logprobs`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

GREEDY_BELOW = 1e-5
"""Temperatures below this pick the most likely token, and log-probs are those of temperature 1."""

MAX_LOGPROBS = 20
SCORED_POSITIONS = 256
"""Positions of a prompt scored at once: a table of 256 by 150,000 tokens is 150 MB."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ([], ""),
    "bad_words": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Values beside null that change nothing. Any other value is refused, so that nobody trains on samples from
another distribution than the one asked for."""

TEXT_ONLY = {
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
}
"""Accepted with any value: they concern text only."""

Entry = tuple[int, float, int]
"""A token id, its natural log-prob, and its rank (1 for the most likely)."""


class SamplingParams(BaseModel):
    """How to draw the tokens of one request; null is the default of each."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=1, le=2**31)
    """None: the default of the route."""
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=2**31)
    """-1 and 0: off."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """None: none returned; k: the sampled token's, and the k most likely."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """The same for the tokens of the prompt."""
    stop_token_ids: list[NonNegativeInt] = []
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=64)

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if value is not None and name not in TEXT_ONLY and value not in NEUTRAL.get(name, ())
        }

    @model_validator(mode="after")
    def _one_greedy_choice(self) -> SamplingParams:
        if self.greedy and self.n > 1:
            raise ValueError(f"n = {self.n} must be 1 at temperature 0")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def stop_reasons(self, eos_ids: tuple[int, ...]) -> dict[int, int | None]:
        """What ends a sequence: token id → its `stop_reason`.

        `eos_ids` are the model's own ids of an end of turn. As in vLLM, all of them end it, and only the
        first is not named as the reason.
        """
        reasons: dict[int, int | None] = {token: token for token in self.stop_token_ids}
        if not self.ignore_eos:
            reasons.update({token: token if i else None for i, token in enumerate(eos_ids)})
        return reasons


@dataclass(frozen=True)
class Draw:
    """The token sampled for one row, and the likeliest ones beside it."""

    sampled: Entry
    tops: list[Entry]


def processed_logprobs(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """(rows, vocabulary) logits → float32 log-probs after temperature, top-k and top-p."""
    logits = logits.float()
    if any(p.temperature != 1.0 and not p.greedy for p in params):
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        logits = logits / torch.tensor(temperatures).unsqueeze(1)
    rows = [i for i, p in enumerate(params) if not p.greedy and (p.top_p < 1.0 or p.top_k > 0)]
    if rows:
        logits = logits.clone()
        logits[rows] = _truncated(logits[rows], [params[i] for i in rows])
    return torch.log_softmax(logits, dim=-1)


def _truncated(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Set what top-k, then top-p, cuts off to minus infinity; the most likely token always stays."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[1]
    keep = torch.tensor([p.top_k if p.top_k > 0 else vocabulary for p in params]).unsqueeze(1)
    values = values.masked_fill(torch.arange(vocabulary) >= keep, float("-inf"))
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = torch.tensor([p.top_p for p in params]).unsqueeze(1)
    # Rounding must not cut the tail of a row that asked for no top-p.
    cut = (before >= top_p) & (top_p < 1.0)
    cut[:, 0] = False
    values = values.masked_fill(cut, float("-inf"))
    return torch.empty_like(values).scatter_(1, order, values)


def draw(logits: torch.Tensor, params: list[SamplingParams], rngs: list[random.Random]) -> list[Draw]:
    """Sample one token per row of (rows, vocabulary) `logits`; row i draws one number from `rngs[i]`.

    Inverse transform sampling: a request's draw depends on its own generator only, not on its neighbours.
    """
    logprobs = processed_logprobs(logits, params)
    # float64: the sum over a large vocabulary would otherwise misplace rare tokens.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    uniform = torch.tensor([[rng.random()] for rng in rngs], dtype=torch.float64)
    # Below the total, else the search would run past the last token that has a probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target, right=True)
    greedy = torch.tensor([[p.greedy] for p in params])
    ids = torch.where(greedy, logprobs.argmax(dim=-1, keepdim=True), ids)
    sampled = _entries(logprobs, ids)
    tops = _tops(logprobs, max(p.logprobs or 0 for p in params))
    return [Draw(entry, row[: p.logprobs or 0]) for entry, row, p in zip(sampled, tops, params, strict=True)]


def score_prompt(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, prompt_ids: list[int], most: int
) -> list[list[Entry]]:
    """For each token but the first: its own entry, then those of the `most` likely others at its place.

    They are the model's own, softmax(logits) in float32: temperature, top-k and top-p shape what is sampled
    and not what was given; vLLM does the same.

    Args:
        head: Hidden states (positions, width) → logits (positions, vocabulary).
        hidden: States of the prompt, (len(prompt_ids), width).
    """
    entries: list[list[Entry]] = []
    for start in range(0, len(prompt_ids) - 1, SCORED_POSITIONS):
        targets = torch.tensor(prompt_ids[start + 1 : start + 1 + SCORED_POSITIONS]).unsqueeze(1)
        logprobs = torch.log_softmax(head(hidden[start : start + len(targets)]).float(), dim=-1)
        for target, tops in zip(_entries(logprobs, targets), _tops(logprobs, most), strict=True):
            entries.append([target, *(entry for entry in tops if entry[0] != target[0])])
    return entries


def _entries(logprobs: torch.Tensor, ids: torch.Tensor) -> list[Entry]:
    """The entry of one given token in each row: `ids` is (rows, 1)."""
    chosen = logprobs.gather(1, ids)
    ranks = (logprobs >= chosen).sum(dim=-1)
    return list(zip(ids.squeeze(1).tolist(), chosen.squeeze(1).tolist(), ranks.tolist(), strict=True))


def _tops(logprobs: torch.Tensor, most: int) -> list[list[Entry]]:
    """The `most` likely entries of each row."""
    values, ids = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    return [
        list(zip(row_ids, row_values, range(1, most + 1), strict=False))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]
