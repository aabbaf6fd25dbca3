"""The two generation routes: whole replies and server-sent events, cancelled when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from services.inference.context import CONTEXT, Context
from services.inference.errors import EngineError, RequestError
from services.inference.schema import Generation, parse_completion, parse_generate
from services.inference.sequence import Sequence, TokenEvent
from services.inference.wire import CompletionWire, GenerateWire

Wire = GenerateWire | CompletionWire


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /inference/v1/generate."""
    context = request.app[CONTEXT]
    body = await read_json(request)
    generation = parse_generate(body, request.headers.get("X-Request-Id"), context.model, context.served_name)
    return await _serve(request, context, generation, GenerateWire(generation, context.served_name))


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    context = request.app[CONTEXT]
    body = await read_json(request)
    generation = parse_completion(
        body, request.headers.get("X-Request-Id"), context.model, context.served_name
    )
    wire = CompletionWire(generation, context.served_name, context.model.tokenizer)
    return await _serve(request, context, generation, wire)


async def abort_requests(request: web.Request) -> web.Response:
    """POST /inference/v1/abort_requests: `{"request_ids": [...]}`, wire ids; unknown ones are ignored."""
    body = await read_json(request)
    ids = body.get("request_ids") if isinstance(body, dict) else None
    if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
        raise RequestError(f"request_ids = {ids!r:.60} must be a list of request ids", "request_ids")
    request.app[CONTEXT].engine.abort_ids(ids)
    return web.Response(status=200)


async def read_json(request: web.Request) -> Any:
    """The body as JSON; RequestError when it is none."""
    try:
        return await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", "body") from error


async def _serve(
    request: web.Request, context: Context, generation: Generation, wire: Wire
) -> web.StreamResponse:
    """Queue the choices, answer, and abort whatever is left when this handler ends early.

    aiohttp cancels the handler when the client closes the connection (`handler_cancellation`).
    """
    events: asyncio.Queue[TokenEvent] = asyncio.Queue()
    sequences = [
        Sequence(
            request_id=generation.request_id,
            index=index,
            prompt_ids=generation.prompt_ids,
            params=generation.params,
            max_tokens=generation.max_tokens,
            listener=events.put_nowait,
            streaming=generation.stream,
            priority=generation.priority,
        )
        for index in range(generation.params.n)
    ]
    context.engine.submit(sequences)
    try:
        if generation.stream:
            return await _stream(request, generation, wire, _events(events, len(sequences)))
        async for event in _events(events, len(sequences)):
            _raise_error(event.sequence)
        return web.json_response(wire.reply(sequences))
    finally:
        if not all(s.finished for s in sequences):
            context.engine.abort(sequences)


async def _events(queue: asyncio.Queue[TokenEvent], open_choices: int) -> AsyncIterator[TokenEvent]:
    """Events until every choice has ended."""
    while open_choices:
        event = await queue.get()
        open_choices -= event.finished
        yield event


def _raise_error(sequence: Sequence) -> None:
    if sequence.error is not None:
        raise EngineError(sequence.error)


async def _stream(
    request: web.Request, generation: Generation, wire: Wire, events: AsyncIterator[TokenEvent]
) -> web.StreamResponse:
    """Server-sent events; the status is sent only with the first token, so early errors keep their code."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    sent = dict.fromkeys(range(generation.params.n), 0)
    async for event in events:
        sequence, start = event.sequence, sent[event.sequence.index]
        if not response.prepared:
            _raise_error(sequence)
            await response.prepare(request)
        if event.finished and sequence.error is not None:
            await _write(response, {"error": {"message": sequence.error, "type": "EngineError", "code": 500}})
            break
        sent[sequence.index] = event.length
        await _write(response, wire.chunk(sequence, start, event.length, event.finished))
    if generation.include_usage:
        await _write(response, wire.usage_chunk(sum(sent.values())))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
