"""The HTTP application: request bodies, the two generation routes, and what the server says of itself."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from importlib.metadata import version
from typing import Annotated, Any, Literal

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, Strict, ValidationError

from services.guard.engine_token import OPEN, REFUSAL, TokenFile
from services.inference import control
from services.inference.control import ENGINE, RequestError, read_object
from services.inference.engine import Engine, EngineError, Sequence
from services.inference.replies import CompletionReply, GenerateReply
from services.inference.sampling import SamplingParams

log = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""Bytes; a prompt of a million token ids is about 7 MB of JSON."""

COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; /inference/v1/generate defaults to the rest of the context."""

LOGPROBS_MODE = "processed_logprobs"

BACKEND = "rollout-embedded"

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

routes = web.RouteTableDef()


def create_app(engine: Engine, tokens: TokenFile | None = None) -> web.Application:
    """The application for one model; the engine must have been started.

    Args:
        tokens: Asked for on every route but /health; None = it answers whoever asks.
    """

    @web.middleware
    async def guard(request: web.Request, handler) -> web.StreamResponse:
        if tokens and request.path != OPEN and not tokens.permits(request.raw_headers):
            raise RequestError(REFUSAL, status=401)
        return await handler(request)

    app = web.Application(middlewares=[_errors, guard], client_max_size=MAX_BODY)
    app[ENGINE] = engine
    app.add_routes([*routes, *control.routes])
    return app


@web.middleware
async def _errors(request: web.Request, handler) -> web.StreamResponse:
    """Every error in vLLM's (OpenAI's) JSON shape."""
    try:
        return await handler(request)
    except RequestError as error:
        return _error(str(error), error.status, error.param)
    except EngineError as error:
        return _error(str(error), 500)
    except web.HTTPException as error:
        return _error(error.reason, error.status)
    except ConnectionResetError:
        raise  # the client has gone
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _error(f"{type(error).__name__}: {error}", 500)


def _error(message: str, status: int, param: str | None = None) -> web.Response:
    kind = ERROR_TYPES.get(status, "Error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return web.json_response(body, status=status)


class StreamOptions(BaseModel):
    """`stream_options` of both routes."""

    include_usage: bool | None = False


class Envelope(BaseModel):
    """What both routes take beside the prompt and how to sample."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int | None = Field(0, ge=-(2**63), lt=2**63)


Unserved = Annotated[list[Any] | dict[str, Any] | None, Field(max_length=0)]
"""What this backend does not do: nothing may be asked for."""


class GenerateBody(Envelope):
    """Body of POST /inference/v1/generate."""

    token_ids: list[NonNegativeInt] = Field(min_length=1)
    sampling_params: SamplingParams
    output_mode: Literal["tokens"] = "tokens"
    features: Unserved = None
    content_parts: Unserved = None
    kv_transfer_params: Unserved = None


class CompletionBody(Envelope, SamplingParams):
    """Body of POST /v1/completions with one prompt, as ids or text."""

    # JSON has no tuples: a strict one would refuse the list of one prompt.
    prompt: str | list[NonNegativeInt] | Annotated[tuple[list[NonNegativeInt]], Strict(False)]
    add_special_tokens: bool = True
    user: Any = None
    session_id: Any = None
    return_tokens_as_token_ids: Any = None


def _checked(kind: type[Envelope], body: dict[str, Any], served_name: str) -> Any:
    """`body` as a `kind`; RequestError names the first field at fault."""
    try:
        checked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        # Positions in a list, and the alternatives of a union, are no names of fields.
        names = [part for part in first["loc"][:2] if isinstance(part, str)]
        param = ".".join(names if names[:1] == ["sampling_params"] else names[:1]) or "body"
        if first["type"] == "extra_forbidden":
            fault = "is not supported by the embedded backend; remove it or use vLLM"
        else:
            fault = f"is refused: {first['msg']}"
        raise RequestError(f"{param} = {first['input']!r:.60} {fault}", param) from error
    if checked.model is not None and checked.model != served_name:
        raise RequestError(
            f"model {checked.model!r} is not served here; the one that is: {served_name}", "model", 404
        )
    params = checked if isinstance(checked, SamplingParams) else checked.sampling_params
    if checked.stream and params.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs come with a whole answer only; leave out stream", "prompt_logprobs"
        )
    return checked


def _check_prompt(token_ids: list[int], name: str, engine: Engine) -> None:
    """RequestError unless the ids are known and leave room for at least one token."""
    model = engine.model
    if not token_ids:
        raise RequestError(f"{name} must be a non-empty list of token ids", name)
    if max(token_ids) >= model.vocab_size:
        raise RequestError(
            f"{name} has {max(token_ids)}, but token ids go from 0 to {model.vocab_size - 1}", name
        )
    if len(token_ids) >= model.max_model_len:
        raise RequestError(
            f"{name} has {len(token_ids)} tokens and the context is {model.max_model_len}; "
            f"send at most {model.max_model_len - 1}",
            name,
        )


@routes.post("/inference/v1/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    """POST /inference/v1/generate; `max_tokens` is clipped to the context."""
    engine = request.app[ENGINE]
    body = _checked(GenerateBody, await read_object(request), engine.served_name)
    _check_prompt(body.token_ids, "token_ids", engine)
    room = engine.model.max_model_len - len(body.token_ids)
    max_tokens = min(body.sampling_params.max_tokens or room, room)
    choices = _choices(request, body, "generate-tokens", body.token_ids, body.sampling_params, max_tokens)
    return await _serve(request, body, GenerateReply(engine, choices, bool(body.return_token_ids)))


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions; as in vLLM, `max_tokens` above the whole context is refused, else clipped."""
    engine = request.app[ENGINE]
    body = _checked(CompletionBody, await read_object(request), engine.served_name)
    prompt = body.prompt[0] if isinstance(body.prompt, tuple) else body.prompt
    if isinstance(prompt, str):
        if engine.model.tokenizer is None:
            raise RequestError("prompt is text, but the model has no tokenizer; send token ids", "prompt")
        prompt = engine.model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    _check_prompt(prompt, "prompt", engine)
    context = engine.model.max_model_len
    max_tokens = body.max_tokens or COMPLETIONS_MAX_TOKENS
    if max_tokens > context:
        raise RequestError(
            f"max_tokens = {max_tokens} exceeds the context of {context}; with this prompt of "
            f"{len(prompt)} tokens ask for at most {context - len(prompt)}",
            "max_tokens",
        )
    choices = _choices(request, body, "cmpl", prompt, body, min(max_tokens, context - len(prompt)))
    return await _serve(request, body, CompletionReply(engine, choices, bool(body.return_token_ids)))


def _choices(
    request: web.Request,
    body: Envelope,
    prefix: str,
    prompt_ids: list[int],
    params: SamplingParams,
    max_tokens: int,
) -> list[Sequence]:
    base_id = request.headers.get("X-Request-Id") or body.request_id or uuid.uuid4().hex
    progress = asyncio.Event()
    return [
        Sequence(
            request_id=f"{prefix}-{base_id}",
            index=index,
            prompt_ids=prompt_ids,
            params=params,
            max_tokens=max_tokens,
            stop_reasons=params.stop_reasons(request.app[ENGINE].model.eos_ids),
            progress=progress,
            streaming=bool(body.stream),
            priority=body.priority or 0,
        )
        for index in range(params.n)
    ]


async def _serve(request: web.Request, body: Envelope, reply: GenerateReply) -> web.StreamResponse:
    """Queue the choices, answer, and abort whatever is left when this handler ends early.

    aiohttp cancels the handler when the client closes the connection (`handler_cancellation`).
    """
    engine, choices = request.app[ENGINE], reply.choices
    engine.submit(choices)
    try:
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return await _stream(request, reply, include_usage)
        while not all(choice.finished for choice in choices):
            await _progress(choices)
        for choice in choices:
            _raise_error(choice)
        return web.json_response(reply.whole())
    finally:
        engine.abort(choices)


async def _progress(choices: list[Sequence]) -> None:
    """Wait until one of a request's choices has a token to send, or has ended."""
    await choices[0].progress.wait()
    choices[0].progress.clear()


def _raise_error(choice: Sequence) -> None:
    if choice.error is not None:
        raise EngineError(choice.error)


async def _stream(request: web.Request, reply: GenerateReply, include_usage: bool) -> web.StreamResponse:
    """Server-sent events; the status is sent only with the first token, so early errors keep their code."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    sent = [0] * len(reply.choices)
    unfinished = list(reply.choices)
    while unfinished:
        await _progress(reply.choices)
        for choice in list(unfinished):
            if not response.prepared:
                _raise_error(choice)
                await response.prepare(request)
            if choice.error is not None:
                error = {"message": choice.error, "type": "EngineError", "code": 500}
                await _write(response, {"error": error})
                unfinished = []
                break
            start, sent[choice.index] = sent[choice.index], len(choice.draws)
            if choice.finished:
                unfinished.remove(choice)
            if choice.finished or len(choice.draws) > start:
                await _write(response, reply.chunk(choice, start))
    if include_usage:
        await _write(response, reply.usage_chunk())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")


@routes.post("/inference/v1/abort_requests")
async def abort_requests(request: web.Request) -> web.Response:
    """POST /inference/v1/abort_requests: `{"request_ids": [...]}`, wire ids; unknown ones are ignored."""
    ids = (await read_object(request)).get("request_ids")
    if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
        raise RequestError(f"request_ids = {ids!r:.60} must be a list of request ids", "request_ids")
    engine = request.app[ENGINE]
    engine.abort([sequence for sequence in engine.live() if sequence.request_id in set(ids)])
    return web.Response()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """GET /health: 200 while the engine lives. The socket opens only after loading and warm-up."""
    return web.Response(status=200 if request.app[ENGINE].alive else 503)


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """GET /metrics in Prometheus' text format."""
    text = generate_latest(request.app[ENGINE].metrics.registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """GET /v1/models: one model, with what a trainer must know of its log-probs."""
    engine = request.app[ENGINE]
    card = {
        "id": engine.served_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": BACKEND,
        "root": engine.model.path,
        "parent": None,
        "max_model_len": engine.model.max_model_len,
        "logprobs_mode": LOGPROBS_MODE,
    }
    return web.json_response({"object": "list", "data": [card]})


@routes.get("/version")
async def server_version(_: web.Request) -> web.Response:
    """GET /version."""
    return web.json_response({"version": version("rollout-service"), "backend": BACKEND})


@routes.get("/server_info")
async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: limits and semantics of this server."""
    engine = request.app[ENGINE]
    return web.json_response(
        {
            "backend": BACKEND,
            "logprobs_mode": LOGPROBS_MODE,
            "dtype": "float32",
            "max_model_len": engine.model.max_model_len,
            "max_num_seqs": engine.max_sequences,
            "kv_cache_tokens": engine.kv_capacity_tokens,
            "eos_token_ids": list(engine.model.eos_ids),
            "prefix_cache": False,
        }
    )
