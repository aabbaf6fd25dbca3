"""Sampling parameters, and drawing a token for each row of a batch.

Invariant: the reported log-prob is the one of the distribution that was sampled from (logits divided by the
temperature, after top-k and top-p, renormalised, in float32). vLLM calls this `processed_logprobs`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.inference.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this pick the most likely token, and log-probs are those of temperature 1."""

MAX_TEMPERATURE = 2.0
MAX_LOGPROBS = 20
MAX_CHOICES = 64

# Accepted with the values that change nothing; any other value is refused, so that nobody trains on samples
# from another distribution than the one asked for.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, 0.0, None),
    "min_tokens": (0, None),
    "presence_penalty": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "stop": (None, [], ""),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}

IGNORED = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
"""Accepted with any value: they concern text only."""


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the tokens of one request."""

    max_tokens: int | None = None
    """None: up to the end of the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 and 0: off."""
    logprobs: int | None = None
    """None: none returned; k: the sampled token's, and the k most likely."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    end_of_turn_id: int | None = None
    """The model's first end-of-turn id; None when `ignore_eos` was asked for."""
    seed: int | None = None
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_json(cls, data: Mapping[str, Any], eos_ids: tuple[int, ...], prefix: str = "") -> SamplingParams:
        """Check and convert JSON; `prefix` names the enclosing object in errors.

        `eos_ids` are the model's end-of-turn ids; all of them stop, and only those after the first are
        named in `stop_reason`, as vLLM does. Raises RequestError naming the field.
        """
        for name, value in data.items():
            if name in _FIELDS or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise RequestError(f"{prefix}{name} is not a known parameter; remove it", f"{prefix}{name}")
            if value not in NEUTRAL[name]:
                raise RequestError(
                    f"{prefix}{name} = {value!r} is not supported by the embedded backend; "
                    "remove it or use vLLM",
                    f"{prefix}{name}",
                )

        def number(name: str, default: Any, low: float, high: float, kinds: tuple[type, ...]) -> Any:
            value = data.get(name)
            if value is None:
                return default
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                kind = "an integer" if kinds == (int,) else "a number"
                raise RequestError(
                    f"{prefix}{name} = {value!r} must be {kind} from {low} to {high}", f"{prefix}{name}"
                )
            return value

        stops = data.get("stop_token_ids") or []
        if not isinstance(stops, list) or not all(type(s) is int and s >= 0 for s in stops):
            raise RequestError(
                f"{prefix}stop_token_ids = {stops!r} must be a list of token ids", f"{prefix}stop_token_ids"
            )
        ignore_eos = data.get("ignore_eos") or False
        if not isinstance(ignore_eos, bool):
            raise RequestError(
                f"{prefix}ignore_eos = {ignore_eos!r} must be true or false", f"{prefix}ignore_eos"
            )
        top_p = number("top_p", 1.0, 0.0, 1.0, (int, float))
        if top_p == 0:
            raise RequestError(f"{prefix}top_p = 0 must be above 0; 1 turns it off", f"{prefix}top_p")
        params = cls(
            max_tokens=number("max_tokens", None, 1, 2**31, (int,)),
            temperature=float(number("temperature", 1.0, 0.0, MAX_TEMPERATURE, (int, float))),
            top_p=float(top_p),
            top_k=number("top_k", -1, -1, 2**31, (int,)),
            logprobs=number("logprobs", None, 0, MAX_LOGPROBS, (int,)),
            prompt_logprobs=number("prompt_logprobs", None, 0, MAX_LOGPROBS, (int,)),
            stop_token_ids=frozenset(stops) | (frozenset() if ignore_eos else frozenset(eos_ids[1:])),
            end_of_turn_id=None if ignore_eos or not eos_ids else eos_ids[0],
            seed=number("seed", None, -(2**63), 2**63 - 1, (int,)),
            n=number("n", 1, 1, MAX_CHOICES, (int,)),
        )
        if params.greedy and params.n > 1:
            raise RequestError(f"{prefix}n must be 1 at temperature 0, got {params.n}", f"{prefix}n")
        return params


_FIELDS = {
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "logprobs",
    "prompt_logprobs",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "n",
}


@dataclass(frozen=True)
class Draw:
    """One sampled token per row; parallel lists."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    tops: list[list[tuple[int, float, int]]]


def processed_logprobs(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """(rows, vocabulary) logits → float32 log-probs after temperature, top-k and top-p."""
    logits = logits.float()
    if any(p.temperature != 1.0 and not p.greedy for p in params):
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        logits = logits / torch.tensor(temperatures).unsqueeze(1)
    rows = [
        i for i, p in enumerate(params) if not p.greedy and (p.top_p < 1.0 or 0 < p.top_k < logits.shape[1])
    ]
    if rows:
        logits = logits.clone()
        logits[rows] = _truncate(logits[rows], [params[i] for i in rows])
    return torch.log_softmax(logits, dim=-1)


def _truncate(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
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


def draw(logits: torch.Tensor, params: list[SamplingParams], rngs: list[random.Random]) -> Draw:
    """Sample one token per row of (rows, vocabulary) `logits`; row i draws one number from `rngs[i]`.

    Inverse transform sampling: a request's draw depends on its own generator only, not on its neighbours.
    """
    logprobs = processed_logprobs(logits, params)
    if all(p.greedy for p in params):
        ids = logprobs.argmax(dim=-1, keepdim=True)
    else:
        # float64: the sum over a large vocabulary would otherwise misplace rare tokens.
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        total = cumulative[:, -1:]
        uniform = torch.tensor([[rng.random()] for rng in rngs], dtype=torch.float64)
        # Below the total, else the search would run past the last token that has a probability.
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        ids = torch.searchsorted(cumulative, target, right=True)
        if any(p.greedy for p in params):
            greedy = torch.tensor([[p.greedy] for p in params])
            ids = torch.where(greedy, logprobs.argmax(dim=-1, keepdim=True), ids)
    chosen = logprobs.gather(1, ids)
    ranks = (logprobs >= chosen).sum(dim=-1)
    return Draw(ids.squeeze(1).tolist(), chosen.squeeze(1).tolist(), ranks.tolist(), _tops(logprobs, params))


def _tops(logprobs: torch.Tensor, params: list[SamplingParams]) -> list[list[tuple[int, float, int]]]:
    """Per row the `logprobs` most likely `(id, log-prob, rank)`, none for rows that asked for none."""
    most = max((p.logprobs or 0) for p in params)
    if most == 0:
        return [[] for _ in params]
    values, ids = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    return [
        [(i, v, r + 1) for r, (i, v) in enumerate(zip(row_ids, row_values, strict=True))][: p.logprobs or 0]
        for p, row_ids, row_values in zip(params, ids.tolist(), values.tolist(), strict=True)
    ]
