"""Replies of the two generation routes, field by field as vLLM writes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from services.inference.schema import Generation
from services.inference.sequence import Sequence

LOWEST_LOGPROB = -9999.0
"""What vLLM sends for minus infinity, which JSON cannot."""


def usage(generation: Generation, completion_tokens: int) -> dict[str, Any]:
    """Token counts; cached_tokens is always 0, this backend has no prefix cache."""
    prompt = len(generation.prompt_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _clamp(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _prompt_logprobs(
    sequence: Sequence, decode: Callable[[int], str | None] = lambda _: None
) -> list[dict[str, Any] | None] | None:
    """Per prompt token an object with its own id first, and null for the first token."""
    if sequence.prompt_logprobs is None:
        return None
    return [
        None,
        *(
            {
                str(token): {"logprob": _clamp(logprob), "rank": rank, "decoded_token": decode(token)}
                for token, logprob, rank in entries
            }
            for entries in sequence.prompt_logprobs
        ),
    ]


def _entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": _clamp(logprob), "rank": rank}


class GenerateWire:
    """/inference/v1/generate: integers only."""

    def __init__(self, generation: Generation, served_name: str):
        self._generation = generation
        self._name = served_name

    def reply(self, sequences: list[Sequence]) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        generation = self._generation
        total = sum(len(s.token_ids) for s in sequences)
        return {
            "request_id": generation.request_id,
            "model": self._name,
            "created": int(time.time()),
            "output_mode": "tokens",
            "choices": [self._choice(s, 0, len(s.token_ids), last=True) for s in sequences],
            "usage": usage(generation, total),
            "prompt_token_ids": generation.prompt_ids if generation.return_token_ids else None,
            # The choices share their prompt, and vLLM sends this once as well.
            "prompt_logprobs": _prompt_logprobs(sequences[0]),
        }

    def chunk(self, sequence: Sequence, start: int, end: int, last: bool) -> dict[str, Any]:
        """Tokens start..end-1 of one choice; `last` adds why it ended, and its weight versions."""
        body = {
            "request_id": self._generation.request_id,
            "output_mode": "tokens",
            "choices": [self._choice(sequence, start, end, last)],
            "usage": None,
        }
        if start == 0 and self._generation.return_token_ids:
            body["prompt_token_ids"] = self._generation.prompt_ids
        return body

    def usage_chunk(self, completion_tokens: int) -> dict[str, Any]:
        """The last chunk when `stream_options.include_usage` is set."""
        return {
            "request_id": self._generation.request_id,
            "output_mode": "tokens",
            "choices": [],
            "usage": usage(self._generation, completion_tokens),
        }

    def _choice(self, sequence: Sequence, start: int, end: int, last: bool) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "token_ids": sequence.token_ids[start:end],
            "logprobs": self._logprobs(sequence, start, end),
            "finish_reason": sequence.finish_reason if last else None,
            "stop_reason": sequence.stop_reason if last else None,
            "weight_versions": sequence.weight_versions() if last else None,
            "routed_experts": None,
            "sampling_mask": None,
        }

    def _logprobs(self, sequence: Sequence, start: int, end: int) -> dict[str, Any] | None:
        if sequence.params.logprobs is None:
            return None
        content = []
        for i in range(start, end):
            sampled = _entry(sequence.token_ids[i], sequence.logprobs[i], sequence.ranks[i])
            others = [_entry(*top) for top in sequence.tops[i] if top[0] != sequence.token_ids[i]]
            limit = max(sequence.params.logprobs, 1)
            content.append({**sampled, "top_logprobs": [sampled, *others][:limit]})
        return {"content": content}


class CompletionWire:
    """/v1/completions: OpenAI's shape, with ids beside the text when `return_token_ids` is set."""

    def __init__(self, generation: Generation, served_name: str, tokenizer: Any | None):
        self._generation = generation
        self._name = served_name
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._shown: dict[int, int] = {}
        """Per choice the number of tokens whose text has been sent."""
        self._offset: dict[int, int] = {}
        """Per choice the characters that its log-prob entries have covered."""

    def reply(self, sequences: list[Sequence]) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        total = sum(len(s.token_ids) for s in sequences)
        choices = [self._choice(s, 0, len(s.token_ids), last=True) for s in sequences]
        for choice, sequence in zip(choices, sequences, strict=True):
            choice["prompt_logprobs"] = _prompt_logprobs(
                sequence, lambda token: self._decode([token], skip_special=False)
            )
            if self._generation.return_token_ids:
                choice["prompt_token_ids"] = self._generation.prompt_ids
        return {**self._envelope(), "choices": choices, "usage": usage(self._generation, total)}

    def chunk(self, sequence: Sequence, start: int, end: int, last: bool) -> dict[str, Any]:
        """Tokens start..end-1 of one choice."""
        choice = self._choice(sequence, start, end, last)
        if start == 0 and self._generation.return_token_ids:
            choice["prompt_token_ids"] = self._generation.prompt_ids
        return {**self._envelope(), "choices": [choice], "usage": None}

    def usage_chunk(self, completion_tokens: int) -> dict[str, Any]:
        """The last chunk when `stream_options.include_usage` is set."""
        return {**self._envelope(), "choices": [], "usage": usage(self._generation, completion_tokens)}

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._name,
        }

    def _choice(self, sequence: Sequence, start: int, end: int, last: bool) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "text": self._text(sequence, end, last),
            "logprobs": self._logprobs(sequence, start, end),
            "finish_reason": sequence.finish_reason if last else None,
            "stop_reason": sequence.stop_reason if last else None,
            "token_ids": sequence.token_ids[start:end] if self._generation.return_token_ids else None,
            "prompt_token_ids": None,
        }

    def _decode(self, ids: list[int], skip_special: bool = True) -> str:
        if self._tokenizer is None or not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def _text(self, sequence: Sequence, end: int, last: bool) -> str:
        """Text since the last chunk; a character that is still incomplete waits for its other bytes."""
        begin = self._shown.get(sequence.index, 0)
        text = self._decode(sequence.token_ids[begin:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        self._shown[sequence.index] = end
        return text

    def _logprobs(self, sequence: Sequence, start: int, end: int) -> dict[str, Any] | None:
        if sequence.params.logprobs is None:
            return None
        tokens = [self._decode([t], skip_special=False) for t in sequence.token_ids[start:end]]
        offset = self._offset.get(sequence.index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offset[sequence.index] = offset
        tops = [self._tops(sequence, i) for i in range(start, end)]
        return {
            "text_offset": offsets,
            "token_logprobs": [_clamp(value) for value in sequence.logprobs[start:end]],
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _tops(self, sequence: Sequence, i: int) -> dict[str, float]:
        """Token text → log-prob; the sampled token is always among them."""
        tops = {self._decode([t], skip_special=False): _clamp(value) for t, value, _ in sequence.tops[i]}
        sampled = self._decode([sequence.token_ids[i]], skip_special=False)
        return {sampled: _clamp(sequence.logprobs[i]), **tops}
