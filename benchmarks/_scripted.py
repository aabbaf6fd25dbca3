"""An engine that costs next to nothing: it answers every call at once with the same ids, or holds streams.

`python -m benchmarks._scripted --turn IDS --port N` speaks vLLM's format of `/inference/v1/generate`. `POST
/hold {"every_s": S}`: from now on streams begin, get an id each S seconds, and end at `POST /hold {}`. `GET
/prompts`: the SHA-256 of each call's prompt as packed int32, by the call's id.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from rollout.arrays import pack_ids

MAX_BODY = 64 << 20


class _Asked(Struct):
    request_id: str
    token_ids: list[int]
    stream: bool = False


class Scripted:
    """The engine's state."""

    def __init__(self, turn: list[int]) -> None:
        self._turn = turn
        self._prompts: dict[str, str] = {}
        self._every_s: float | None = None
        self._released = asyncio.Event()
        self._held = 0

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/prompts", self._told)
        app.router.add_post("/hold", self._hold)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _told(self, request: web.Request) -> web.Response:
        return web.json_response({"prompts": self._prompts, "held": self._held})

    async def _hold(self, request: web.Request) -> web.Response:
        self._every_s = (await request.json()).get("every_s")
        if self._every_s is None:
            self._released.set()
        else:
            self._released.clear()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=_Asked)
        self._prompts[asked.request_id] = hashlib.sha256(pack_ids(asked.token_ids)).hexdigest()
        if not asked.stream:
            body = msgspec.json.encode(self._answer(asked, 0, len(self._turn)) | self._usage(asked))
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begun = 0
        if self._every_s is not None:
            begun = await self._slowly(response, asked)
        rest = [self._answer(asked, begun, len(self._turn)), {"choices": []} | self._usage(asked)]
        lines = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in rest]
        await response.write(b"".join([*lines, b"data: [DONE]\n\n"]))
        return response

    async def _slowly(self, response: web.StreamResponse, asked: _Asked) -> int:
        """Tell ids one by one until streams are let go; how many were told."""
        self._held += 1
        told = 0
        while not self._released.is_set():
            if told < len(self._turn) - 1:
                event = self._answer(asked, told, told + 1)
                await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
                told += 1
            try:
                async with asyncio.timeout(self._every_s):
                    await self._released.wait()
            except TimeoutError:
                pass
        self._held -= 1
        return told

    def _answer(self, asked: _Asked, start: int, end: int) -> dict[str, Any]:
        ids, whole = self._turn[start:end], end == len(self._turn)
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in ids]},
            "finish_reason": "stop" if whole else None,
            "weight_versions": [{"version": "1", "start": 0, "end": end}] if whole else None,
        }
        return {"request_id": f"generate-tokens-{asked.request_id}", "choices": [choice]}

    def _usage(self, asked: _Asked) -> dict[str, Any]:
        counts = {"prompt_tokens": len(asked.token_ids), "completion_tokens": len(self._turn)}
        return {"usage": counts}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._scripted", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--turn", required=True, help="ids, with commas")
    options = parser.parse_args()

    async def app() -> web.Application:
        return Scripted([int(token) for token in options.turn.split(",")]).app()

    web.run_app(app(), host=options.host, port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
