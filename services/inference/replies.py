"""Replies of the two generation routes, field by field as vLLM writes them."""

from __future__ import annotations

import time
from typing import Any

from services.inference.engine import Engine, Sequence
from services.inference.sampling import Entry

LOWEST_LOGPROB = -9999.0
"""What vLLM sends for minus infinity, which JSON cannot."""


def _clamp(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _entry(entry: Entry) -> dict[str, Any]:
    token_id, logprob, rank = entry
    return {"token_id": token_id, "logprob": _clamp(logprob), "rank": rank}


class GenerateReply:
    """/inference/v1/generate: integers only."""

    def __init__(self, engine: Engine, choices: list[Sequence], return_token_ids: bool):
        self.choices = choices
        self._model = engine.model
        self._name = engine.served_name
        self._created = int(time.time())
        self._return_token_ids = return_token_ids

    def whole(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        return {
            **self._envelope(),
            "model": self._name,
            "created": self._created,
            "choices": [self._choice(choice, 0) for choice in self.choices],
            "usage": self._usage(),
            "prompt_token_ids": self._prompt_ids(0),
            # The choices share their prompt, and vLLM sends this once as well.
            "prompt_logprobs": self._prompt_logprobs(self.choices[0]),
        }

    def chunk(self, sequence: Sequence, start: int) -> dict[str, Any]:
        """The tokens of one choice from `start`; the last chunk of a choice says why it ended."""
        body = {**self._envelope(), "choices": [self._choice(sequence, start)], "usage": None}
        return {**body, "prompt_token_ids": self._prompt_ids(start)}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk when `stream_options.include_usage` is set."""
        return {**self._envelope(), "choices": [], "usage": self._usage()}

    def _envelope(self) -> dict[str, Any]:
        return {"request_id": self.choices[0].request_id, "output_mode": "tokens"}

    def _choice(self, sequence: Sequence, start: int) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "token_ids": sequence.token_ids[start:],
            "logprobs": self._logprobs(sequence, start),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "weight_versions": sequence.weight_versions() if sequence.finished else None,
            "routed_experts": None,
            "sampling_mask": None,
        }

    def _logprobs(self, sequence: Sequence, start: int) -> dict[str, Any] | None:
        if sequence.params.logprobs is None:
            return None
        content = []
        for drawn in sequence.draws[start:]:
            tops = [top for top in drawn.tops if top[0] != drawn.sampled[0]]
            listed = [_entry(entry) for entry in (drawn.sampled, *tops)]
            content.append({**listed[0], "top_logprobs": listed[: max(sequence.params.logprobs, 1)]})
        return {"content": content}

    def _prompt_ids(self, start: int) -> list[int] | None:
        return self.choices[0].prompt_ids if start == 0 and self._return_token_ids else None

    def _prompt_logprobs(self, sequence: Sequence) -> list[dict[str, Any] | None] | None:
        """Per prompt token an object with its own id first, and null for the first token."""
        if sequence.prompt_logprobs is None:
            return None

        def described(token: int, logprob: float, rank: int) -> dict[str, Any]:
            return {"logprob": _clamp(logprob), "rank": rank, "decoded_token": self._decoded(token)}

        return [
            None,
            *({str(entry[0]): described(*entry) for entry in place} for place in sequence.prompt_logprobs),
        ]

    def _decoded(self, token: int) -> str | None:
        return None

    def _usage(self) -> dict[str, Any]:
        """Token counts; cached_tokens is always 0, this backend has no prefix cache."""
        prompt = len(self.choices[0].prompt_ids)
        sampled = sum(len(choice.draws) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


class CompletionReply(GenerateReply):
    """/v1/completions: OpenAI's shape, with ids beside the text when `return_token_ids` is set."""

    def __init__(self, engine: Engine, choices: list[Sequence], return_token_ids: bool):
        super().__init__(engine, choices, return_token_ids)
        self._shown = [0] * len(choices)
        """Per choice the number of tokens whose text has been sent."""
        self._offset = [0] * len(choices)
        """Per choice the characters that its log-prob entries have covered."""

    def whole(self) -> dict[str, Any]:
        choices = [
            {**self._choice(choice, 0), "prompt_logprobs": self._prompt_logprobs(choice)}
            for choice in self.choices
        ]
        return {**self._envelope(), "choices": choices, "usage": self._usage()}

    def chunk(self, sequence: Sequence, start: int) -> dict[str, Any]:
        return {**self._envelope(), "choices": [self._choice(sequence, start)], "usage": None}

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self.choices[0].request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._name,
        }

    def _choice(self, sequence: Sequence, start: int) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "text": self._text(sequence),
            "logprobs": self._logprobs(sequence, start),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.token_ids[start:] if self._return_token_ids else None,
            "prompt_token_ids": self._prompt_ids(start),
        }

    def _decoded(self, token: int) -> str:
        return self._model.decode([token])

    def _text(self, sequence: Sequence) -> str:
        """Text since the last chunk; a character that is still incomplete waits for its other bytes."""
        text = self._model.decode(sequence.token_ids[self._shown[sequence.index] :], skip_special=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not sequence.finished:
            return ""
        self._shown[sequence.index] = len(sequence.draws)
        return text

    def _logprobs(self, sequence: Sequence, start: int) -> dict[str, Any] | None:
        if sequence.params.logprobs is None:
            return None
        draws = sequence.draws[start:]
        tokens = [self._decoded(drawn.sampled[0]) for drawn in draws]
        offsets = []
        for token in tokens:
            offsets.append(self._offset[sequence.index])
            self._offset[sequence.index] += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [_clamp(drawn.sampled[1]) for drawn in draws],
            "tokens": tokens,
            # Token text → log-prob; the sampled token is always among them.
            "top_logprobs": [
                {self._decoded(token): _clamp(logprob) for token, logprob, _ in (drawn.sampled, *drawn.tops)}
                for drawn in draws
            ],
        }
