"""The one fake of an LLM engine: vLLM's wire format over the timing model of `engine_model`, with faults.

In a process of its own, for tests with real workers:

    with fake_engine(answer_tokens=(5, 40)) as server:
        httpx.post(f"{server.url}/fault", json={"kind": "die", "tokens": 10})

`python -m tests.helpers.fake_engine --port 9000` is the same by hand. Without sockets, for simulations: an
object with the same requests and answers.

    engine = FakeEngine(EngineModel())
    status, answer = await engine.request("POST", "/inference/v1/generate", body)

With `--adapters`, it serves LoRA adapters beside its own model, each loaded by `/v1/load_lora_adapter` from a
directory that exists. Weights sample alike, with log-probs of their own: of those from a directory `a@3` each
is 0.3 less than from the engine's first ones.

Beside vLLM's routes there are `POST /fault {"kind": KIND, ...}` (`engine_faults.KINDS`) and `GET /calls`:
what became of every call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from aiohttp import web

from services.guard.engine_token import OPEN, VARIABLE, TokenFile
from tests.helpers.engine_faults import EngineDied, Fault, Faults
from tests.helpers.engine_lies import LIES, Raw, tell
from tests.helpers.engine_model import EngineModel, PromptTooLong, Sequence, Timing
from tests.helpers.fake_language import FakeLanguage
from tests.helpers.fake_streams import Cut, Events, end_of, lines_of, lines_of_lies, sampled, send
from tests.helpers.fake_wire import COMPLETIONS, GENERATE, Call, Refused, answer, metrics, parse
from tests.helpers.llm_servers import DEMO_MODEL, LLMServer, running_server

EXIT_OF_THE_DEAD = 70
MAX_BODY = 64 * 2**20
START_TIMEOUT = 240.0

Reply = tuple[int, Any]
"""Status and JSON body; None = an empty body, a str = text, a `Raw` = as it is, an `Events` = a stream."""


@dataclass
class CallRecord:
    """What became of one call."""

    call_id: str | None
    """As the caller named it."""
    path: str
    prompt_tokens: int
    cache_salt: str | None = None
    sampled: int = 0
    cached_tokens: int | None = None
    params: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """With `--keep`: what was asked for, read and sampled."""
    state: str = "running"
    """`running`, `done`, `aborted`, `cancelled` (the caller went away), `failed` (by a fault)."""


class FakeEngine:
    """Requests in, replies out; what a socket adds is in `create_app`."""

    def __init__(
        self,
        model: EngineModel,
        *,
        served_name: str = "fake",
        tokenizer: str = str(DEMO_MODEL),
        max_model_len: int = 32768,
        completions_only: bool = False,
        keep: bool = False,
        adapters: bool = False,
    ) -> None:
        """`completions_only`: as vLLM without --enable-scale-out, 403 on the generate route. `adapters`: as
        with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""
        self.model = model
        self.served_name = served_name
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.completions_only = completions_only
        self.keep = keep
        self.weights: dict[str, str] = {served_name: ""}
        """Model → the directory that it was loaded from."""
        self.adapters = adapters
        self.faults = Faults()
        self.calls: list[CallRecord] = []
        self.reloads: list[dict[str, Any]] = []
        """Arguments of every /collective_rpc."""
        self.dead = False
        self.lies_told = 0
        self._sequences: dict[str, Sequence] = {}

    def fault(self, kind: str, **options: Any) -> Fault:
        """Switch a fault on; see `engine_faults.Faults.set`."""
        fault = self.faults.set(kind, **options)
        slow = self.faults.peek("slow")
        self.model.slowdown = slow.factor if slow else 1.0
        return fault

    async def request(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None
    ) -> Reply:
        """Answer a request as the server would.

        Raises:
            EngineDied: It has died, before or in the middle of this call.
        """
        if self.dead:
            raise EngineDied("connection refused: the fake engine has died")
        try:
            return await self._route(method, path, body, query or {})
        except Refused as error:
            kind = "BadRequestError" if error.status == 400 else "Error"
            return error.status, {"error": {"message": str(error), "type": kind, "code": error.status}}

    async def _route(self, method: str, path: str, body: Any, query: dict[str, str]) -> Reply:
        model = self.model
        match method, path:
            case "POST", ("/inference/v1/generate" | "/v1/completions"):
                return await self._call(path, body)
            case "GET", "/health":
                if (hang := self.faults.peek("hang")) and hang.health:
                    await asyncio.Event().wait()
                return 503 if self.faults.peek("unhealthy") else 200, None
            case "GET", "/v1/models":
                return 200, {"object": "list", "data": [self._card(name) for name in self.weights]}
            case "GET", "/metrics":
                return 200, metrics(model, self.served_name)
            case "GET", "/version":
                return 200, {"version": "0.32.0+fake"}
            case "POST", "/inference/v1/abort_requests":
                for wire_id in body["request_ids"]:
                    if wire_id in self._sequences:
                        model.abort(self._sequences[wire_id])
                return 200, None
            case "POST", "/pause":
                mode = query.get("mode", "abort")
                if mode not in ("abort", "wait", "keep"):
                    raise Refused(f"mode = {mode!r}")
                await model.pause(mode)
                return 200, {"status": "paused"}
            case "POST", "/resume":
                model.resume()
                return 200, {"status": "resumed"}
            case "GET", "/is_paused":
                return 200, {"is_paused": model.paused}
            case "GET", "/weight_info":
                return 200, {"weight_version": model.version}
            case "POST", "/update_weight_version":
                model.version = body["new_version"]
                return 200, {"success": True, "new_version": model.version}
            case "POST", "/collective_rpc":
                self.reloads.append(body)
                self.weights[self.served_name] = body.get("kwargs", {}).get("weights_path", "")
                return 200, {"results": [None]}
            case "POST", "/v1/load_lora_adapter" if self.adapters:
                return 200, self._load_adapter(**body)
            case "POST", "/reset_prefix_cache":
                model.cache.reset()
                return 200, None
            case "POST", "/fault":
                try:
                    return 200, asdict(self.fault(**body))
                except (TypeError, ValueError) as error:
                    raise Refused(str(error)) from None
            case "GET", "/calls":
                # Tests ask for it all the time, and `asdict` would copy the lists id by id.
                return 200, [dict(vars(record)) for record in self.calls]
        raise Refused(f"{method} {path} is not known to the fake engine", 404)

    def _card(self, name: str) -> dict[str, Any]:
        own = name == self.served_name
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": self.tokenizer if own else self.weights[name],
            "parent": None if own else self.served_name,
            "max_model_len": self.max_model_len if own else None,
        }

    def _load_adapter(self, lora_name: str = "", lora_path: str = "", load_inplace: bool = False) -> str:
        if not (lora_name and lora_path):
            raise Refused("Both 'lora_name' and 'lora_path' must be provided.")
        if lora_name in self.weights and not load_inplace:
            raise Refused(f"The lora adapter {lora_name!r} has already been loaded.")
        if not Path(lora_path).is_dir():
            raise Refused(f"No adapter found for {lora_path!r}", 404)
        self.weights[lora_name] = lora_path
        return f"Success: LoRA adapter '{lora_name}' added successfully."

    def _weights_of(self, call: Call) -> Callable[[], float]:
        """How much less likely the call's model finds each id than the engine's first weights."""
        model = call.model or self.served_name
        if self.adapters and model not in self.weights:
            raise Refused(f"The model `{model}` does not exist.", 404)
        return lambda: shift_of(self.weights.get(model, ""))

    async def _call(self, path: str, body: Any) -> Reply:
        if path == GENERATE and self.completions_only:
            raise Refused("start the server with --enable-scale-out", 403)
        call = parse(path, body, self.max_model_len)
        shift = self._weights_of(call)
        record = CallRecord(call.call_id, path, len(call.prompt), call.cache_salt, state="failed")
        self.calls.append(record)
        if self.keep:
            ids = ("token_ids", "prompt")
            given = {**body, **body.get("sampling_params", {})}
            record.params = {name: value for name, value in given.items() if name not in ids}
        if fault := self.faults.take("error"):
            raise Refused("a fault of the fake engine", fault.status)
        record.state = "running"
        dying = self.faults.take("die")
        if dying:
            call = replace(call, max_tokens=min(call.max_tokens, dying.tokens))
        hanging, aborting = self.faults.take("hang"), self.faults.take("abort")
        if hanging and not call.stream:
            with self._entered(record):
                await asyncio.Event().wait()
        sequence = self._submitted(call, shift)
        if call.stream:
            faults = {"die": dying, "hang": hanging, "abort": aborting}
            faults |= {kind: self.faults.take(kind) for kind in ("truncated", "cut")}
            if lie := self.faults.take("lie"):
                return 200, await self._lied(call, sequence, record, lie)
            return 200, Events(self._stream(call, sequence, record, faults))
        with self._entered(record, call, sequence):
            if aborting:
                await sampled(sequence, aborting.tokens)
                self.model.abort(sequence)
            await self.model.wait(sequence)
        self._end(record, sequence, dying)
        return 200, self._answer(call, sequence)

    def _end(self, record: CallRecord, sequence: Sequence, dying: Fault | None) -> None:
        if dying or self.dead:
            record.state, self.dead = "failed", True
            for neighbour in self._sequences.values():
                self.model.abort(neighbour)
            raise EngineDied("connection reset: the fake engine has died")
        record.state = "aborted" if sequence.finish_reason == "abort" else "done"

    @contextmanager
    def _entered(
        self, record: CallRecord, call: Call | None = None, sequence: Sequence | None = None
    ) -> Iterator[None]:
        """A call while it is served; whoever goes away takes it out of the engine."""
        if call is not None:
            self._sequences[call.wire_id] = sequence
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            record.state = "cancelled"
            if sequence is not None:
                self.model.abort(sequence)
            raise
        finally:
            if sequence is not None:
                self._sequences.pop(call.wire_id, None)
                record.sampled, record.cached_tokens = sequence.sampled, sequence.cached_tokens
                if self.keep:
                    record.prompt_ids, record.token_ids = call.prompt, sequence.token_ids

    async def _stream(
        self, call: Call, sequence: Sequence, record: CallRecord, faults: dict[str, Fault | None]
    ) -> AsyncIterator[bytes]:
        """The events of a call, each as soon as it has ids, and what befalls them."""
        with self._entered(record, call, sequence):
            try:
                async for line in lines_of(call, sequence, self.model, self.served_name, faults):
                    yield line
            except Cut:
                record.state = "failed"
                self.model.abort(sequence)
                raise
        self._end(record, sequence, faults["die"])
        async for line in end_of(call, sequence, self.served_name):
            yield line

    async def _lied(self, call: Call, sequence: Sequence, record: CallRecord, fault: Fault) -> Any:
        """The lie of a whole answer, as a stream where it can be told in events."""
        with self._entered(record, call, sequence):
            await self.model.wait(sequence)
        self._end(record, sequence, None)
        body = self._lie(call, answer(call, sequence, None, self.served_name), fault)
        return body if isinstance(body, Raw) else Events(lines_of_lies(call, body))

    def _submitted(self, call: Call, shift: Callable[[], float]) -> Sequence:
        try:
            return self.model.submit(
                call.prompt,
                max_tokens=call.max_tokens,
                seed=call.seed,
                stop_token_ids=call.stop_token_ids,
                cache_salt=call.cache_salt,
                streaming=call.stream,
                shift=shift,
            )
        except PromptTooLong as error:
            raise Refused(str(error)) from None

    def _answer(self, call: Call, sequence: Sequence) -> Any:
        scores = self.model.language.prompt_logprobs(call.prompt) if call.prompt_logprobs else None
        if scores:
            scores = [score - sequence.shift() for score in scores]
        honest = answer(call, sequence, scores, self.served_name)
        fault = self.faults.take("lie")
        return self._lie(call, honest, fault) if fault else honest

    def _lie(self, call: Call, honest: dict[str, Any], fault: Fault) -> Any:
        name = fault.name if fault.name != "*" else [*LIES][self.lies_told % len(LIES)]
        self.lies_told += 1
        return tell(name, honest, call)


def shift_of(path: str) -> float:
    """What weights take off a log-prob, by the name of their directory."""
    number = re.search(r"@(\d+)$", path)
    return int(number[1]) / 10 if number else 0.0


def create_app(engine: FakeEngine, tokens: TokenFile | None = None) -> web.Application:
    """The HTTP server of an engine. An engine that dies takes the process along.

    One that has tokens asks for one, and is indiscreet: its errors repeat the headers that it was sent.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        if tokens and request.path != OPEN and not tokens.permits(request.raw_headers):
            return web.json_response(_indiscreet(request), status=401)
        body = None
        if request.can_read_body:
            try:
                body = await request.json()
            except ValueError:
                return web.json_response(
                    {"error": {"message": "the body is not JSON", "code": 400}}, status=400
                )
        try:
            status, reply = await engine.request(request.method, request.path, body, dict(request.query))
        except EngineDied:
            os._exit(EXIT_OF_THE_DEAD)
        if tokens and status >= 400:
            reply = _indiscreet(request)
        if reply is None or isinstance(reply, str):
            return web.Response(status=status, text=reply, content_type="text/plain")
        if isinstance(reply, Events):
            try:
                return await send(request, reply)
            except EngineDied:
                os._exit(EXIT_OF_THE_DEAD)
        if isinstance(reply, Raw):
            return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
        payload = json.dumps(reply).encode()
        if request.path in (GENERATE, COMPLETIONS) and status == 200:
            if engine.faults.take("truncated"):
                payload = payload[: len(payload) // 2]
            if engine.faults.take("cut"):
                return await _cut(request, payload)
        return web.Response(status=status, body=payload, content_type="application/json")

    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


def _indiscreet(request: web.Request) -> dict[str, Any]:
    return {"error": {"message": f"refused, with {dict(request.headers)}", "code": 400}}


async def _cut(request: web.Request, payload: bytes) -> web.StreamResponse:
    """Half of what Content-Length promises, then a closed connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(payload)
    await response.prepare(request)
    await response.write(payload[: len(payload) // 2])
    request.transport.close()
    return response


@contextmanager
def fake_engine(**options: object) -> Iterator[LLMServer]:
    """A server in a process of its own; `answer_tokens=(5, 40)` becomes `--answer-tokens 5 40`."""
    flags: list[str] = []
    for name, value in options.items():
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        flags += ["--" + name.replace("_", "-"), *map(str, values)]
    command = [sys.executable, "-m", "tests.helpers.fake_engine", *flags]
    with running_server("fake", command, {}, START_TIMEOUT) as server:
        yield server


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--tokenizer", default=str(DEMO_MODEL), help="what /v1/models names as root")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--completions-only", action="store_true", help="as vLLM without --enable-scale-out")
    parser.add_argument("--keep", action="store_true", help="tell the ids of every call at /calls")
    parser.add_argument("--adapters", action="store_true", help="as vLLM with --enable-lora")
    parser.add_argument("--capacity-tokens", type=int, default=200_000)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.5, help="one decode step")
    parser.add_argument("--stream-interval", type=int, default=1, help="most ids of an event")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=1e6)
    parser.add_argument("--first-id", type=int, default=20, help="least id that is sampled")
    parser.add_argument("--vocab-size", type=int, default=300, help="ids are below")
    parser.add_argument("--answer-tokens", type=int, nargs=2, metavar=("LEAST", "MOST"))
    parser.add_argument("--ends", type=int, metavar="N", help="one id in N ends the answer")
    parser.add_argument("--script", metavar="MODULE:FUNCTION", help="(prompt ids, call number) to ids")
    parser.add_argument("--token-file", default=os.environ.get(VARIABLE), help="tokens that it asks for")
    options = parser.parse_args()
    script = None
    if options.script:
        module, _, name = options.script.partition(":")
        script = getattr(import_module(module), name)
    language = FakeLanguage(
        first_id=options.first_id,
        vocab_size=options.vocab_size,
        answer_tokens=tuple(options.answer_tokens) if options.answer_tokens else None,
        ends=options.ends,
        script=script,
    )
    timing = Timing(base_s=options.step_ms / 1e3, prefill_tokens_per_s=options.prefill_tokens_per_s)
    asyncio.run(_serve(options, language, timing))


async def _serve(options: argparse.Namespace, language: FakeLanguage, timing: Timing) -> None:
    tokens = TokenFile(options.token_file) if options.token_file else None
    engine = FakeEngine(
        EngineModel(
            capacity_tokens=options.capacity_tokens,
            timing=timing,
            language=language,
            max_sequences=options.max_num_seqs,
            version=options.weight_version,
            stream_interval=options.stream_interval,
        ),
        served_name=options.served_model_name,
        tokenizer=options.tokenizer,
        max_model_len=options.max_model_len,
        completions_only=options.completions_only,
        keep=options.keep,
        adapters=options.adapters,
    )
    # Without it a client that closes its connection would leave its call in the engine.
    runner = web.AppRunner(create_app(engine, tokens), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
