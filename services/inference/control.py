"""Control routes for a trainer: pause, resume, weights and their version.

Without a token they answer whoever asks, like vLLM's dev-mode routes: loopback or a private network.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

from aiohttp import web

from services.inference.engine import Engine, OvertakenError, PauseMode
from services.inference.model import CheckpointError, read_checkpoint

ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)

routes = web.RouteTableDef()


class RequestError(Exception):
    """The request is at fault; answered with `status` and never queued."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        """Name of the offending field, None when no single field is at fault."""
        self.status = status


async def read_object(request: web.Request) -> dict:
    """The body as a JSON object; RequestError when it is none."""
    try:
        body = await request.json()
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", "body") from error
    if not isinstance(body, dict):
        raise RequestError(f"body must be a JSON object, got {type(body).__name__}", "body")
    return body


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} = {value!r} must be a non-empty text", name)
    return value


@routes.post("/pause")
async def pause(request: web.Request) -> web.Response:
    """POST /pause?mode=abort|wait|keep; answers when nothing more will be sampled."""
    mode = request.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode = {mode!r} must be one of {', '.join(get_args(PauseMode))}", "mode")
    try:
        await request.app[ENGINE].pause(mode)
    except OvertakenError as error:
        raise RequestError(str(error), status=409) from error
    return web.json_response({"status": "paused"})


@routes.post("/resume")
async def resume(request: web.Request) -> web.Response:
    """POST /resume."""
    request.app[ENGINE].resume()
    return web.json_response({"status": "resumed"})


@routes.get("/is_paused")
async def is_paused(request: web.Request) -> web.Response:
    """GET /is_paused."""
    return web.json_response({"is_paused": request.app[ENGINE].paused})


@routes.get("/weight_info")
async def weight_info(request: web.Request) -> web.Response:
    """GET /weight_info."""
    return web.json_response({"weight_version": request.app[ENGINE].weight_version})


@routes.post("/update_weight_version")
async def update_weight_version(request: web.Request) -> web.Response:
    """POST /update_weight_version: `{"new_version": "step-7"}` labels all later tokens."""
    version = _text((await read_object(request)).get("new_version"), "new_version")
    await request.app[ENGINE].set_version(version)
    return web.json_response({"success": True, "new_version": version})


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(_: web.Request) -> web.Response:
    """POST /reset_prefix_cache; there is none, so every prompt is already computed from current weights."""
    return web.Response()


@routes.post("/collective_rpc")
async def collective_rpc(request: web.Request) -> web.Response:
    """POST /collective_rpc, `reload_weights` only: `{"method", "kwargs": {"weights_path": DIR}}`."""
    body = await read_object(request)
    method, kwargs = body.get("method"), body.get("kwargs")
    if method != "reload_weights":
        raise RequestError(f"method = {method!r} is not supported; the one that is: reload_weights", "method")
    path = _text(isinstance(kwargs, dict) and kwargs.get("weights_path"), "kwargs.weights_path")
    engine = request.app[ENGINE]
    try:
        # Reading takes seconds for a large model; the engine goes on sampling meanwhile.
        tensors = await asyncio.to_thread(read_checkpoint, engine.model, Path(path))
    except CheckpointError as error:
        raise RequestError(str(error), "weights_path") from error
    await engine.swap_weights(tensors)
    return web.json_response({"results": [None]})
