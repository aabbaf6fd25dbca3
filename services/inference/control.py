"""Control routes for a trainer: pause, resume, weights and their version.

They carry no credentials, like vLLM's dev-mode routes: bind to loopback or to a private network.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

from aiohttp import web

from services.inference.context import CONTEXT
from services.inference.errors import EngineError, RequestError
from services.inference.generation import read_json
from services.inference.model import read_checkpoint

PAUSE_MODES = ("abort", "wait", "keep")


async def pause(request: web.Request) -> web.Response:
    """POST /pause?mode=abort|wait|keep; answers when nothing more will be sampled."""
    mode = request.query.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode = {mode!r} must be one of {', '.join(PAUSE_MODES)}", "mode")
    try:
        await _done(request.app[CONTEXT].engine.pause(mode))
    except EngineError as error:
        raise RequestError(str(error), status=409) from error
    return web.json_response({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    """POST /resume."""
    await _done(request.app[CONTEXT].engine.resume())
    return web.json_response({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    """GET /is_paused."""
    return web.json_response({"is_paused": request.app[CONTEXT].engine.paused})


async def weight_info(request: web.Request) -> web.Response:
    """GET /weight_info."""
    return web.json_response({"weight_version": request.app[CONTEXT].engine.weight_version})


async def update_weight_version(request: web.Request) -> web.Response:
    """POST /update_weight_version: `{"new_version": "step-7"}` labels all later tokens."""
    body = await read_json(request)
    version = body.get("new_version") if isinstance(body, dict) else None
    if not isinstance(version, str) or not version:
        raise RequestError(f"new_version = {version!r} must be a non-empty text", "new_version")
    await _done(request.app[CONTEXT].engine.set_version(version))
    return web.json_response({"success": True, "new_version": version})


async def reset_prefix_cache(_: web.Request) -> web.Response:
    """POST /reset_prefix_cache; there is none, so every prompt is already computed from current weights."""
    return web.Response(status=200)


async def collective_rpc(request: web.Request) -> web.Response:
    """POST /collective_rpc, `reload_weights` only: `{"method", "kwargs": {"weights_path": DIR}}`."""
    body = await read_json(request)
    method = body.get("method") if isinstance(body, dict) else None
    if method != "reload_weights":
        raise RequestError(f"method = {method!r} is not supported; the one that is: reload_weights", "method")
    kwargs = body.get("kwargs") or {}
    path = kwargs.get("weights_path") if isinstance(kwargs, dict) else None
    if not isinstance(path, str) or not path:
        raise RequestError(f"kwargs.weights_path = {path!r} must name a directory", "kwargs.weights_path")
    context = request.app[CONTEXT]
    # Reading takes seconds for a large model; the engine goes on sampling meanwhile.
    tensors = await asyncio.to_thread(read_checkpoint, context.model, Path(path))
    await _done(context.engine.swap_weights(tensors))
    return web.json_response({"results": [None]})


async def _done(step: Future[None]) -> None:
    """Wait for a step of the engine thread.

    Shielded: a client that goes away cancels this handler, and the thread would end over a cancelled future.
    """
    await asyncio.shield(asyncio.wrap_future(step))
