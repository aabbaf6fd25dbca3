"""Calls to an LLM engine: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import aiohttp
import msgspec
from pydantic_core import from_json

from rollout.schema import Backend
from services.engines import credentials, engine_of
from services.engines.address import root
from services.engines.base import BrokenAnswer, CallAborted, Completion, SampleRequest
from services.engines.wire import Partial
from services.logs import masked
from workers.agent.pieces import EVENTS, Watch, events
from workers.errors import ModelError

MAX_ANSWER_BYTES = 256 << 20
"""The most bytes of any answer. A million sampled tokens are about 150 MB in the wordiest format."""
BASE_BYTES = 1 << 20
SAMPLED_BYTES = 1024
"""Bytes of one sampled id with its log-prob; the wordiest format takes 150."""
CONTEXT_BYTES = 8192
"""Bytes of one id of prompt or answer: an echo, and the expert choices of the largest mixtures in base64."""
MAX_AFTER_S = 60.0
TRY_ELSEWHERE = credentials.REFUSED | {408, 429}
"""Beside 5xx: a key, a proxy or a full queue is at fault, which says nothing about the request itself."""


_encode = msgspec.json.Encoder().encode
"""Of 70,000 ids in a third of a millisecond; by `json` it takes five, and the event loop stands still."""


class BackendUnavailable(Exception):
    """The backend is away, overloaded or broken; another one may serve the same call."""

    def __init__(self, message: str, aborted: bool = False, after: str | None = None) -> None:
        super().__init__(masked(message))
        self.aborted = aborted
        """True: the backend lives and ended the call itself (a weight update), so it may take it again."""
        self.after_s = min(float(after), MAX_AFTER_S) if after and after.isdecimal() else 0.0
        """Not at fault, and to be left alone for these seconds (`Retry-After`); 0 = it said nothing."""


class BrokenCall(BackendUnavailable):
    """The answer cannot be trained on. Another backend may be whole; if all do so, it is the model."""


def session() -> aiohttp.ClientSession:
    """The HTTP session of a worker process. Closing a response cancels the call in the engine."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        # What is small on the wire may be without end when it is unpacked.
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )


class EngineClient:
    """One backend."""

    def __init__(self, http: aiohttp.ClientSession, backend: Backend) -> None:
        self._http = http
        self.backend = backend
        self._engine = engine_of(backend)
        self.partial: Partial | None = None

    async def generate(
        self, request: SampleRequest, timeout_s: float, watch: Watch | None = None
    ) -> Completion:
        """Sample a continuation. Cancelling it cancels the call in the engine.

        Args:
            watch: Is told the ids of a streamed answer as they come, checked as far as they can be by then.
                An engine that answers whole (it sends no event stream) tells it nothing.

        Raises:
            BackendUnavailable: No usable answer: connection, time-out, 401, 403, 408, 429, 5xx, an aborted
                call, a body that is cut off, too long or no JSON.
            BrokenCall: The answer breaks the contract, or is none to this call.
            ModelError: The engine refused the call (other 4xx).
        """
        partial = self.partial = self._engine.partial(request)
        async with aclosing(self._answers(request, timeout_s, watch is not None)) as answers:
            async for whole, answer in answers:
                with self._blamed():
                    if whole:
                        return self._engine.read(answer, request)
                    token_ids = partial.add(answer)
                if token_ids:
                    watch(token_ids)
        with self._blamed():
            return partial.whole()

    def cut(self) -> Completion | None:
        """What the last call was streamed, or None; a `BrokenCall` where it contradicts itself."""
        with self._blamed():
            return self.partial and self.partial.cut()

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except CallAborted as error:
            raise BackendUnavailable(str(error), aborted=True) from error
        except BrokenAnswer as error:
            raise BrokenCall(str(error)) from error
        except Exception as error:
            # Whatever else an answer brings about: it is the backend's fault and nobody else's.
            raise BrokenCall(f"backend {self.backend.id}: unreadable answer: {error!r:.300}") from error

    async def _answers(
        self, request: SampleRequest, timeout_s: float, stream: bool
    ) -> AsyncIterator[tuple[bool, Any]]:
        """True and the JSON of the whole answer; or false and that of each event of a stream."""
        call = self._engine.generate(request, stream=stream)
        url = root(self.backend.url) + call.path
        where = f"backend {self.backend.id} ({url})"
        most = _most_bytes(request)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.post(
                    url,
                    data=_encode(call.body),
                    # vLLM takes the id from here where a proxy would else write one of its own.
                    headers={"Content-Type": "application/json", "X-Request-Id": request.call_id}
                    | credentials.headers(self.backend.key),
                    allow_redirects=False,
                ) as response,
            ):
                if stream and response.status < 300 and response.content_type == EVENTS:
                    async for data in events(response.content, most, request.max_tokens):
                        event = _json(masked(data), where)
                        if isinstance(event, dict) and event.get("error"):
                            raise BackendUnavailable(f"{where}: the stream failed: {event['error']!s:.500}")
                        yield False, event
                    return
                body = masked(await _read(response.content, most))
        except BrokenAnswer as error:
            raise BrokenCall(f"{where}: {error}") from error
        except credentials.EngineKeyProblem as error:
            # This node has not got it, which says nothing of the backend: it must not be put away for all.
            raise BackendUnavailable(f"{where}: {error}", after="1") from error
        except (aiohttp.ClientError, OSError) as error:
            if type(error) is TimeoutError:  # aiohttp has further ones
                raise BackendUnavailable(f"{where}: no answer within {timeout_s:g} s") from None
            raise BackendUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if response.status >= 300:
            text = f"{where}: HTTP {response.status}: {body[:500].decode(errors='replace')}"
            text += credentials.refusal(response.status, self.backend.key)
            if not 400 <= response.status < 500 or response.status in TRY_ELSEWHERE:
                raise BackendUnavailable(text, after=response.headers.get("Retry-After"))
            raise ModelError(text)
        if len(body) > most:
            asked = request.max_tokens
            raise BrokenCall(f"{where}: the answer has more than {most} bytes, for {asked} ids asked for")
        yield True, _json(body, where)


def _json(body: bytes | bytearray, where: str) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        raise BackendUnavailable(f"{where}: the answer is no JSON: {error}") from error


def _most_bytes(request: SampleRequest) -> int:
    """What an honest answer stays below."""
    context = len(request.prompt) + request.max_tokens
    return min(BASE_BYTES + SAMPLED_BYTES * request.max_tokens + CONTEXT_BYTES * context, MAX_ANSWER_BYTES)


async def _read(stream: aiohttp.StreamReader, most: int) -> bytearray:
    """The body, or as much of it as passes the limit."""
    body = bytearray()
    async for chunk in stream.iter_any():
        body += chunk
        if len(body) > most:
            break
    return body
