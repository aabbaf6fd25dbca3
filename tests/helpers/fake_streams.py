"""Streamed answers of the fake engine: an event as soon as there are ids, and what may befall it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from aiohttp import web

from tests.helpers.engine_faults import Fault
from tests.helpers.engine_model import EngineModel, Sequence
from tests.helpers.fake_wire import DONE, Call, answer, chunk, event_line, usage_chunk

LIE_IDS = 4
"""Ids of an event in a stream of lies: some are told before the lie."""


class Cut(Exception):
    """The stream is to end here."""

    def __init__(self, half: bytes = b"") -> None:
        super().__init__("a fault of the fake engine")
        self.half = half
        """What is still sent, the connection then being closed properly; empty = it breaks."""


@dataclass(frozen=True)
class Events:
    """A streamed answer: its lines, as they come.

    Their iteration raises `EngineDied` or `Cut` in the middle, and is to be closed when the caller goes away.
    """

    lines: AsyncIterator[bytes]


async def sampled(sequence: Sequence, tokens: int) -> None:
    """Wait until a call has so many ids, or has ended."""
    while sequence.sampled < tokens and sequence.finish_reason is None:
        sequence.progress.clear()
        await sequence.progress.wait()


async def lines_of(
    call: Call, sequence: Sequence, model: EngineModel, name: str, faults: dict[str, Fault | None]
) -> AsyncIterator[bytes]:
    """The events with ids, each as soon as they are sampled.

    Raises:
        Cut: A fault has it so.
    """
    told, ended = 0, False

    def reached(kind: str) -> bool:
        return faults[kind] is not None and told >= faults[kind].tokens

    while not ended:
        await sampled(sequence, told + 1)
        if reached("hang"):
            await asyncio.Event().wait()
        if reached("abort"):
            model.abort(sequence)
        if reached("cut"):
            raise Cut
        if reached("truncated"):
            raise Cut(b'data: {"choices": [{"index": 0, "token_\n\n')
        ended = sequence.finish_reason is not None
        body = answer(call, sequence, None, name, start=told)
        # Who is about to die has not told the end.
        last = ended and faults["die"] is None
        yield event_line(chunk(call, body, slice(None), first=not told, last=last))
        told += len(body["choices"][0]["token_ids"])


async def end_of(call: Call, sequence: Sequence, name: str) -> AsyncIterator[bytes]:
    """What comes behind the last id."""
    if call.include_usage:
        yield event_line(usage_chunk(call, answer(call, sequence, None, name)))
    yield DONE


async def lines_of_lies(call: Call, body: Any) -> AsyncIterator[bytes]:
    """A whole body as events; one that cannot be parted is one event."""
    try:
        ids = len(body["choices"][0]["token_ids"])
        parts = [
            chunk(call, body, slice(start, end), first=not start, last=end == ids)
            for start, end in pairwise([*range(0, ids, LIE_IDS), ids])
        ]
        parts.append(usage_chunk(call, body))
    except (TypeError, KeyError, IndexError, AttributeError):
        parts = [body]
    for part in parts:
        yield event_line(part)
    yield DONE


async def send(request: web.Request, events: Events) -> web.StreamResponse:
    """Server-sent events.

    Raises:
        EngineDied: In the middle; what came before has been sent.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    try:
        async with aclosing(events.lines) as lines:
            async for line in lines:
                await response.write(line)
    except Cut as cut:
        if not cut.half:
            request.transport.close()
        else:
            await response.write(cut.half)
    return response
