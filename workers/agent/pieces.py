"""An answer that is watched while it is sampled: its events, and its pieces where a call broke off."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import aiohttp

from rollout.schema import Backend
from services.engines.base import BrokenAnswer, Completion, SampleRequest

Watch = Callable[[list[int]], None]
"""Is told ids as they are sampled, in order, each once. It must not wait."""
EVENTS = "text/event-stream"
BASE_LINES = 10_000
"""Lines of a stream beside those of ids: heartbeats of a proxy."""
SAMPLED_LINES = 4
"""Lines of one sampled id; the wordiest engine sends two."""


async def events(stream: aiohttp.StreamReader, most: int, max_tokens: int) -> AsyncIterator[bytes]:
    """The data of server-sent events, up to the one that ends the stream.

    Args:
        most: Bytes; one line may have them all.
        max_tokens: How many ids were asked for.

    Raises:
        aiohttp.ClientPayloadError: The stream ended without its last event.
        BrokenAnswer: There are more bytes or lines than an honest engine sends.
    """
    rest, lines = bytearray(), BASE_LINES + SAMPLED_LINES * max_tokens
    async for chunk in stream.iter_any():
        most -= len(chunk)
        rest += chunk
        if b"\n" in chunk:
            *whole, rest = rest.split(b"\n")
            lines -= len(whole)
            for line in whole:
                # Other lines name the event, or are comments.
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield data
        if most < 0 or lines < 0:
            raise BrokenAnswer(
                f"the stream has too many {'bytes' if most < 0 else 'lines'} for what was asked for"
            )
    raise aiohttp.ClientPayloadError("the stream ended before its time")


class Pieces:
    """The pieces of one call. Where one broke off, the next one goes on from the ids."""

    def __init__(self, request: SampleRequest) -> None:
        self._request = request
        self._pieces: list[Completion] = []
        self.rest = request
        """What is still to be asked for."""

    def add(self, piece: Completion, backend: Backend) -> Completion | None:
        """Enter what a call to this backend gave before it broke off; the answer, if that was all of it."""
        asked, token_ids = self.rest, piece.token_ids
        if piece.finish_reason == "cut":
            # Not at `end_ids`: these only may end a turn, and an engine tells its own end with the last id.
            if token_ids[-1] in asked.stops:
                piece = replace(piece, finish_reason="stop")
            elif len(token_ids) == min(asked.max_tokens, backend.max_model_len - len(asked.prompt)):
                piece = replace(piece, finish_reason="length")
        if piece.finish_reason != "cut":
            return self.joined(piece)
        self._pieces.append(piece)
        self.rest = replace(
            asked,
            prompt=[*asked.prompt, *token_ids],
            max_tokens=asked.max_tokens - len(token_ids),
            seed=_next_seed(asked.seed, len(token_ids)),
        )
        return None

    def joined(self, last: Completion) -> Completion:
        """The answer whose last piece this is. In pieces it has no expert choices: each has but a part."""
        if not self._pieces:
            return last
        token_ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[str | None, int, int]] = []
        for piece in (*self._pieces, last):
            at = len(token_ids)
            for version, start, end in piece.spans:
                begin = at + start
                if spans and spans[-1][0] == version:
                    begin = spans.pop()[1]
                spans.append((version, begin, at + end))
            token_ids += piece.token_ids
            logprobs += piece.logprobs
        cached = self._pieces[0].cached_tokens
        return Completion(self._request.call_id, token_ids, logprobs, last.finish_reason, spans, cached)


def _next_seed(seed: int | None, sampled: int) -> int | None:
    """An engine begins its random numbers anew with each call: the first ones must not decide two ids."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}/{sampled}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
