"""The HTTP side of capture: routes, keys, bodies, streams."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import structlog
from aiohttp import web
from prometheus_client import generate_latest

from services.capture import metrics
from services.capture.call import ModelCall, Refusal
from services.capture.dialects.anthropic import Anthropic
from services.capture.dialects.chat import Chat
from services.capture.dialects.fields import Dialect, decoded
from services.capture.dialects.gemini import Gemini
from services.capture.dialects.responses import Responses
from services.capture.history import Histories
from services.capture.serving import Caller, Service, not_open, refusal_of
from services.capture.turn import Turn
from services.state.capture.session import MODEL, REWARD, read_key

log = structlog.get_logger("capture")

HEARTBEAT_S = 3.0
"""Between two signs of life on a stream: proxies and programs give up on silence."""
BEGIN_S = 10.0
"""After it a stream begins, whatever may come of the call: the first one of a process loads a tokenizer."""
STALLED_S = 120.0
"""For a program to take what it is sent; then it is as if it had gone."""
BODY_S = 60.0
"""For a whole body to come."""
MOST_HELD, MOST_HELD_OF_ONE = 1 << 30, 128 << 20
"""Bytes of bodies of the calls under way in a process, and of one attempt's: what is made of them is more."""
MODEL_NAME = "policy"
"""What the model is called where a program asks. No slash, no colon, no version to be parsed."""
CALL_HEADER = "X-Rollout-Call"
RETRY_HEADER = "X-Stainless-Retry-Count"
"""By which SDKs say that they repeat a call: a number above 0."""

_NAME = re.compile(r"[0-9A-Za-z-]{1,64}")
"""Of a call, as an engine and Redis may be told it."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answering = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]


class Posted(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a reward."""

    reward: float
    components: dict[str, float] = {}


def create_app(service: Service, secret: str, store: Any, send: Any, max_body_bytes: int) -> web.Application:
    """The application. `secret`: of the keys. `store`, `send`: how rewards are entered."""
    app = web.Application(client_max_size=max_body_bytes)
    routes = Routes(service, secret, store, send, max_body_bytes)
    chat, anthropic, gemini = Chat(), Anthropic(), Gemini()
    paths = {"chat/completions": chat, "responses": Responses(), "messages": anthropic}
    models, add = routes.to(chat, routes.models), app.router.add_post
    # A program that loses headers may have its key in the path; some leave out, or double, the version.
    for prefix in ("", "/s/{key}"):
        for version in ("", "/v1"):
            for path, dialect in paths.items():
                add(f"{prefix}{version}/{path}", routes.generates(dialect))
            add(f"{prefix}{version}/messages/count_tokens", routes.counts(anthropic))
            app.router.add_get(f"{prefix}{version}/models", models)
            app.router.add_get(f"{prefix}{version}/models/{{name}}", models)
        for version in ("v1beta", "v1", "v1alpha"):
            base = f"{prefix}/{version}/models/{{model:[^:]+}}"
            add(f"{base}:generateContent", routes.generates(gemini, stream=False))
            listed = routes.generates(gemini, stream=True), routes.generates(Gemini(sse=False), stream=True)
            add(f"{base}:streamGenerateContent", _by_alt(*listed))
            add(f"{base}:countTokens", routes.counts(gemini))
        add(f"{prefix}/v1/reward", routes.to(chat, routes.reward, REWARD))
        add(f"{prefix}/v1/finish", routes.to(chat, routes.finish, REWARD))
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    return app


def _by_alt(events: Handler, entries: Handler) -> Handler:
    """A stream of Gemini's, as its query asks: events, or the entries of one list."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await (events if request.query.get("alt") == "sse" else entries)(request)

    return handle


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")


class Routes:
    """What the routes do."""

    def __init__(self, service: Service, secret: str, store: Any, send: Any, most_bytes: int) -> None:
        self._service, self._secret, self._store, self._send = service, secret, store, send
        self._most_bytes = most_bytes
        self._histories = Histories()
        self._held: Counter[Caller] = Counter()

    def to(self, dialect: Dialect, answer: Answering, kind: str = MODEL) -> Handler:
        """A route for holders of a key of this kind, who are told errors in this dialect."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await answer(request, self._caller(request, kind))
            except Exception as error:
                refusal = refusal_of(error)
                if refusal.kind == "internal" and refusal is not error:
                    log.exception("a call failed", dialect=dialect.name)
                if self._service.ending and CALL_HEADER in request.headers and request.transport:
                    # The bridge leads a call that has no answer yet to another process, by itself.
                    request.transport.abort()
                headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else None
                return _json(dialect.refusal(refusal), status=refusal.status, headers=headers)

        return handle

    def generates(self, dialect: Dialect, stream: bool | None = None) -> Handler:
        """A route of model calls. `stream`: what its path says."""

        async def answer(request: web.Request, caller: Caller) -> web.StreamResponse:
            with metrics.IN_FLIGHT.track_inprogress(), self._holding(caller, request):
                call, digest = await self._read(request, caller, dialect, stream)
                name = request.headers.get(CALL_HEADER, "")
                turn = await self._service.turn(
                    caller,
                    dialect.name,
                    call,
                    digest,
                    name if _NAME.fullmatch(name) else None,
                    bool(request.headers.get(RETRY_HEADER, "").strip("0")),
                )
                return await self._tell(request, dialect, caller, call, turn)

        return self.to(dialect, answer)

    def counts(self, dialect: Anthropic | Gemini) -> Handler:
        """A route that counts the tokens of a prompt, of which nothing is entered."""

        async def answer(request: web.Request, caller: Caller) -> web.StreamResponse:
            with self._holding(caller, request):
                call, _ = await self._read(request, caller, dialect, False)
                return _json(dialect.count(await self._service.count(caller, call)))

        return self.to(dialect, answer)

    async def _tell(
        self, request: web.Request, dialect: Dialect, caller: Caller, call: ModelCall, turn: Turn
    ) -> web.StreamResponse:
        """The answer of a turn, to whoever listens."""
        try:
            # Errors of the call itself have their own status; who streams is not left in silence for them.
            await asyncio.wait([turn.begun], timeout=BEGIN_S if call.stream else None)
            if not call.stream or (turn.result.done() and turn.result.exception()):
                answer = await asyncio.shield(turn.result)
                response = _json(dialect.answer(call, answer))
                await response.prepare(request)
                await _patiently(response.write_eof())
            else:
                response = await self._stream(request, dialect, call, turn)
        except Refusal:
            raise
        except BaseException:
            # The program went away, or does not read: it may come again, and is then told the same.
            self._service.orphan(caller, turn)
            raise
        self._service.told(caller, turn)
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, call: ModelCall, turn: Turn
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": dialect.stream_type, "Cache-Control": "no-cache"}
        )
        stream = dialect.stream(call, turn.call_id, turn.created, turn.prompt_tokens)
        await response.prepare(request)
        text, reasoning = "", ""
        await _patiently(response.write(stream.begin()))
        while not turn.result.done():
            if not await turn.change(HEARTBEAT_S):
                await _patiently(response.write(stream.heartbeat()))
            elif not turn.result.done():
                piece = stream.delta(text=turn.text[len(text) :], reasoning=turn.reasoning[len(reasoning) :])
                text, reasoning = turn.text, turn.reasoning
                await _patiently(response.write(piece))
        try:
            last = stream.end(turn.result.result())
        except Refusal as refusal:
            last = stream.fail(refusal)
        await _patiently(response.write(last))
        await _patiently(response.write_eof())
        return response

    async def models(self, request: web.Request, caller: Caller) -> web.Response:
        """The one model that there is, in words that OpenAI's and Anthropic's clients take."""
        model = {
            "id": request.match_info.get("name", MODEL_NAME),
            "object": "model",
            "type": "model",
            "display_name": MODEL_NAME,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "rollout",
        }
        if "name" in request.match_info:
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def reward(self, request: web.Request, caller: Caller) -> web.Response:
        """The score that an external program gives its own rollout."""
        posted = decoded(await self._body(request), Posted, "body")
        if not all(map(math.isfinite, (posted.reward, *posted.components.values()))):
            raise Refusal("invalid", "reward: a number is not finite")
        return _entered(await self._send(self._store.reward(*caller, posted.reward, posted.components)))

    async def finish(self, request: web.Request, caller: Caller) -> web.Response:
        """An external program says that it is done; the handler scores, unless a reward was posted."""
        return _entered(await self._send(self._store.finish(*caller)))

    async def _read(
        self, request: web.Request, caller: Caller, dialect: Dialect, stream: bool | None
    ) -> tuple[ModelCall, bytes]:
        """A call, and the digest of its body, which is not kept."""
        body = await self._body(request)
        recent = self._histories.of((caller, dialect.name))
        model = request.match_info.get("model", "")
        call = dialect.read(body, model=model, stream=stream, recent=recent)
        self._histories.keep((caller, dialect.name), call.history, len(body))
        return call, _digest(dialect, request, body)

    @contextmanager
    def _holding(self, caller: Caller, request: web.Request) -> Iterator[None]:
        """Count a call's body among those that are held, one of unknown length as the largest; Refusal where
        there is no room for it now."""
        size = request.content_length
        size = self._most_bytes if size is None else min(size, self._most_bytes)
        if self._held[caller] + size > MOST_HELD_OF_ONE or self._held.total() + size > MOST_HELD:
            metrics.REFUSED.labels("held").inc()
            raise Refusal("busy", "the calls under way are too large for another one", retry_after_s=1)
        self._held[caller] += size
        try:
            yield
        finally:
            self._held[caller] -= size
            if not self._held[caller]:
                del self._held[caller]

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError:
            raise Refusal("invalid", f"the body did not come within {BODY_S:g} s") from None
        except web.HTTPRequestEntityTooLarge as error:
            metrics.REFUSED.labels("size").inc()
            raise Refusal("too_large", f"the body has more than {self._most_bytes} bytes") from error

    def _caller(self, request: web.Request, kind: str) -> Caller:
        """Whose call it is, by the key alone, whatever else a program sends; Refusal (401) without one."""
        found = read_key(self._secret, _key(request))
        if found is None or found[0] != kind:
            metrics.REFUSED.labels("key").inc()
            other = "" if found is None else f", but one for the {found[0]}"
            raise Refusal("unauthorized", f"this is no key for the {kind} of a rollout{other}")
        caller = Caller(*found[1:])
        structlog.contextvars.bind_contextvars(**caller._asdict())
        return caller


def _key(request: web.Request) -> str:
    headers = request.headers
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return (
        request.match_info.get("key")
        or bearer
        or headers.get("x-api-key")
        or headers.get("x-goog-api-key")
        or request.query.get("key", "")
    )


def _digest(dialect: Dialect, request: web.Request, body: bytes) -> bytes:
    """Of a call: the same for a repetition, in whatever order headers come."""
    text = f"{dialect.name} {request.match_info.get('model', '')} {request.path.rpartition(':')[2]}\n"
    return hashlib.blake2b(text.encode() + body, digest_size=16).digest()


def _entered(answer: dict[str, Any]) -> web.Response:
    word = answer["word"]
    if word == "forbidden":
        raise Refusal("unauthorized", "only the harness `external` posts a reward")
    if word not in ("ok", "again"):
        raise not_open(word)
    return web.json_response({"accepted": word == "ok"})


def _json(body: bytes, **more: Any) -> web.Response:
    return web.Response(body=body, content_type="application/json", **more)


async def _patiently(writing: Awaitable[None]) -> None:
    """Write; ConnectionResetError where the program takes nothing for long, as if it had gone."""
    try:
        async with asyncio.timeout(STALLED_S):
            await writing
    except TimeoutError:
        raise ConnectionResetError("the program does not read its answer") from None
