"""A service that answers calls in the four dialects by script: what the vendors' SDKs talk to in tests."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from rollout.trajectory import Message, ToolCall
from services.capture.call import Answer, ModelCall, Refusal
from services.capture.dialects.anthropic import Anthropic
from services.capture.dialects.chat import Chat
from services.capture.dialects.gemini import Gemini
from services.capture.dialects.responses import Responses


@dataclass
class Turn:
    """What the model says to the next call."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict]] = field(default_factory=list)
    finish: str = "stop"
    refused: Refusal | None = None
    breaks: Refusal | None = None
    """Told in the middle of a stream."""
    unsent: int = 4
    """Characters of the text that are left to the end of a stream."""

    def message(self) -> Message:
        """As the codec parses it."""
        calls = [
            ToolCall(id=f"call_{at}", name=name, arguments=args) for at, (name, args) in enumerate(self.calls)
        ]
        return Message(
            role="assistant", content=self.text, reasoning=self.reasoning or None, tool_calls=calls
        )


class Toy:
    """The service, in a thread of its own."""

    def __init__(self) -> None:
        self.script: list[Turn] = []
        self.calls: list[ModelCall] = []
        self.bodies: list[bytes] = []
        self.streams: list[bytearray] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", partial(self._answer, Chat()))
        app.router.add_post("/v1/responses", partial(self._answer, Responses()))
        app.router.add_post("/{version:v1|v1beta}/models/{model}:{verb}", self._gemini)
        app.router.add_post("/v1/messages", partial(self._answer, Anthropic()))
        app.router.add_post("/v1/messages/count_tokens", partial(self._count, Anthropic()))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def says(self, *turns: Turn) -> None:
        self.script += turns

    async def _gemini(self, request) -> web.StreamResponse:
        verb, model = request.match_info["verb"], request.match_info["model"]
        if verb == "countTokens":
            return await self._count(Gemini(), request, model=model)
        dialect = Gemini(sse=request.query.get("alt") == "sse")
        return await self._answer(dialect, request, model=model, stream=verb == "streamGenerateContent")

    async def _count(self, dialect, request, **path) -> web.Response:
        self.bodies.append(await request.read())
        try:
            self.calls.append(dialect.read(self.bodies[-1], **path))
        except Refusal as refusal:
            return self._refused(dialect, refusal)
        return web.Response(body=dialect.count(321), content_type="application/json")

    def _refused(self, dialect, refusal) -> web.Response:
        body = dialect.refusal(refusal)
        return web.Response(status=refusal.status, body=body, content_type="application/json")

    async def _answer(self, dialect, request, **path) -> web.StreamResponse:
        self.bodies.append(await request.read())
        try:
            call = dialect.read(self.bodies[-1], **path)
            self.calls.append(call)
            turn = self.script.pop(0)
            if turn.refused:
                raise turn.refused
        except Refusal as refusal:
            return self._refused(dialect, refusal)
        number = len(self.calls)
        answer = Answer(
            call_id=f"c{number}",
            message=turn.message(),
            finish="tool_calls" if turn.calls else turn.finish,
            prompt_tokens=100 + number,
            sampled_tokens=20,
            cached_tokens=60,
            created=1_790_000_000,
        )
        if not call.stream:
            return web.Response(body=dialect.answer(call, answer), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": dialect.stream_type})
        await response.prepare(request)
        sent = bytearray()
        self.streams.append(sent)  # at once: who read a stream to its end looks here before this goes on
        for piece in self._pieces(
            dialect.stream(call, answer.call_id, answer.created, 100 + number), turn, answer
        ):
            sent += piece
            if piece:
                await response.write(piece)
        await response.write_eof()
        return response

    def _pieces(self, stream, turn, answer):
        yield stream.begin()
        yield stream.heartbeat()
        for at in range(0, len(turn.reasoning), 5):
            yield stream.delta(reasoning=turn.reasoning[at : at + 5])
        yield stream.heartbeat()
        told = max(len(turn.text) - turn.unsent, 0)
        for at in range(0, told, 5):
            yield stream.delta(text=turn.text[at : min(at + 5, told)])
            yield stream.heartbeat()
        yield stream.fail(turn.breaks) if turn.breaks else stream.end(answer)
