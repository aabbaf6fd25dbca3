"""The HTTP application: routes, errors, and what can be read about the server."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from services.inference import control, generation
from services.inference.context import CONTEXT, Context
from services.inference.errors import EngineError, RequestError, error_body
from services.inference.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""Bytes; a prompt of a million token ids is about 7 MB of JSON."""

LOGPROBS_MODE = "processed_logprobs"


def create_app(context: Context) -> web.Application:
    """The application for one model; the engine must have been started."""
    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY)
    app[CONTEXT] = context
    app.add_routes(
        [
            web.post("/inference/v1/generate", generation.generate),
            web.post("/inference/v1/abort_requests", generation.abort_requests),
            web.post("/v1/completions", generation.completions),
            web.get("/v1/models", models),
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/version", server_version),
            web.get("/server_info", server_info),
            web.post("/pause", control.pause),
            web.post("/resume", control.resume),
            web.get("/is_paused", control.is_paused),
            web.get("/weight_info", control.weight_info),
            web.post("/update_weight_version", control.update_weight_version),
            web.post("/reset_prefix_cache", control.reset_prefix_cache),
            web.post("/collective_rpc", control.collective_rpc),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler) -> web.StreamResponse:
    """Every error in vLLM's JSON shape."""
    try:
        return await handler(request)
    except RequestError as error:
        return web.json_response(error_body(error.message, error.status, error.param), status=error.status)
    except EngineError as error:
        return web.json_response(error_body(str(error), 500), status=500)
    except web.HTTPException as error:
        return web.json_response(error_body(error.reason, error.status), status=error.status)
    except (asyncio.CancelledError, ConnectionResetError):
        raise  # the client has gone
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return web.json_response(error_body(f"{type(error).__name__}: {error}", 500), status=500)


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 while the engine lives. The socket opens only after loading and warm-up."""
    return web.Response(status=200 if request.app[CONTEXT].engine.alive else 503)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics in Prometheus' text format."""
    return web.Response(body=request.app[CONTEXT].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def models(request: web.Request) -> web.Response:
    """GET /v1/models: one model, with what a trainer must know of its log-probs."""
    context = request.app[CONTEXT]
    card = {
        "id": context.served_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "rollout-embedded",
        "root": context.model_path,
        "parent": None,
        "max_model_len": context.model.max_model_len,
        "logprobs_mode": LOGPROBS_MODE,
    }
    return web.json_response({"object": "list", "data": [card]})


async def server_version(_: web.Request) -> web.Response:
    """GET /version."""
    try:
        number = version("rollout-service")
    except PackageNotFoundError:
        number = "unknown"
    return web.json_response({"version": number, "backend": "rollout-embedded"})


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: limits and semantics of this server."""
    context = request.app[CONTEXT]
    return web.json_response(
        {
            "backend": "rollout-embedded",
            "logprobs_mode": LOGPROBS_MODE,
            "dtype": "float32",
            "max_model_len": context.model.max_model_len,
            "max_num_seqs": context.max_sequences,
            "kv_cache_tokens": context.kv_capacity_tokens,
            "eos_token_ids": list(context.model.eos_ids),
            "prefix_cache": False,
        }
    )
