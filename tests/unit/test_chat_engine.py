"""Text-only backends over real sockets: what they are sent, what is believed, what is tried again."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from rollout.schema import Backend, BackendRequest, SamplingParams
from rollout.trajectory import Message
from services.engines import engine_of, stats
from services.engines.base import BrokenAnswer, SampleRequest
from services.engines.chat import TextRequest
from services.engines.describe import DescribeError, describe
from services.settings import settings
from tests.helpers.described import describing
from tests.helpers.http_server import Server as HttpServer
from tests.helpers.llm_servers import free_port
from workers.agent.codec import takeover_obstacle
from workers.agent.llm import MAX_AFTER_S, BackendUnavailable, session
from workers.agent.router import BackendRouter
from workers.errors import InfrastructureError, ModelError
from workers.inprocess import Server

MODELS = {"GET /v1/models": {"data": [{"id": "large", "max_model_len": 4096}, {"id": "small"}]}}
ASKED = [Message(role="user", content="Is it so?")]


def answer(text: Any = "Yes.", **more: Any) -> tuple[int, dict[str, Any]]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, {"choices": [choice | more], "usage": {"completion_tokens": 3}}


class Provider:
    """Gives the answers in order, the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.bodies, self.times = list(answers), [], []
        self.closed = threading.Event()


@contextmanager
def provider(*answers: Any) -> Iterator[tuple[Provider, Backend]]:
    """Each is (status, JSON or bytes), or (status, JSON, headers); a number is seconds without an answer."""
    made = Provider(*answers)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            made.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            made.times.append(time.monotonic())
            reply = made.answers.pop(0) if len(made.answers) > 1 else made.answers[0]
            if isinstance(reply, float):
                self.connection.settimeout(reply)
                if self.connection.recv(1) == b"":
                    made.closed.set()
                return
            status, body, headers = (*reply, {})[:3]
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = HttpServer(Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made, Backend(id="p", url=url, model="large", tokenizer="-", max_model_len=4096, api="chat")
    finally:
        server.shutdown()
        server.server_close()


class Placed(Server):
    """One backend; notes whose health was doubted."""

    def __init__(self, backend: Backend, wait_s: float) -> None:
        super().__init__(backend, wait_s)
        self.suspects: list[str] = []

    async def suspect(self, backend_id: str) -> None:
        self.suspects.append(backend_id)


def ask(backend: Backend, wait_s: float = 30.0, timeout_s: float = 20.0, **fields: Any):
    """The answer to one call, and the backends that were doubted."""
    fields = {"max_tokens": 50} | fields

    async def call():
        placements = Placed(backend, wait_s)
        async with session() as http:
            router = BackendRouter("r", placements, http, wait_s=wait_s)
            await router.acquire()
            request = TextRequest("c", [], messages=ASKED, **fields)
            return await router.generate(request, timeout_s), placements.suspects

    return asyncio.run(call())


def test_a_call_has_what_any_provider_takes_and_its_answer_is_words_without_ids():
    with provider(answer(), answer("", finish_reason="length")) as (made, backend):
        sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, stop_token_ids=[3])
        got, _ = ask(backend, sampling=sampling, seed=11)
        cut, _ = ask(backend)
    message = {"role": "user", "content": "Is it so?"}
    plain = {"model": "large", "messages": [message], "max_tokens": 50}
    assert made.bodies == [plain | {"temperature": 0.5, "top_p": 0.9, "seed": 11}, plain]
    assert (got.message.text, got.tokens, got.finish_reason) == ("Yes.", 3, "stop")
    assert (got.token_ids, got.logprobs, got.spans) == ([], [], [])
    assert (cut.message.text, cut.finish_reason) == ("", "length")


def test_a_provider_that_asks_to_wait_is_waited_for_and_not_doubted():
    with provider((429, {}, {"retry-after": "1"}), answer()) as (made, backend):
        got, suspects = ask(backend)
    assert got.message.text == "Yes." and made.times[1] - made.times[0] >= 1.0
    assert suspects == []


def test_a_key_that_this_node_lacks_is_waited_for_and_the_backend_is_not_doubted(tmp_path, monkeypatch):
    """Eight doubts put a backend away for all, and the keys of others may be where they belong."""
    monkeypatch.setenv("ROLLOUT_ENGINE_KEYS", str(tmp_path))
    settings.cache_clear()

    def write_key():
        (tmp_path / "draft").touch(0o600)
        (tmp_path / "draft").write_text("tok-3f9a7c51d2e84b06")
        (tmp_path / "draft").rename(tmp_path / "gpu")

    try:
        with provider(answer()) as (made, backend):
            threading.Timer(0.5, write_key).start()
            got, suspects = ask(backend.model_copy(update={"key": "gpu"}))
    finally:
        settings.cache_clear()
    assert (got.message.text, len(made.bodies), suspects) == ("Yes.", 1, [])


def test_a_server_error_is_tried_again_and_doubted():
    with provider((503, {}), (500, {}, {"retry-after": "soon"}), answer()) as (made, backend):
        got, suspects = ask(backend)
    assert (got.message.text, len(made.bodies), suspects) == ("Yes.", 3, ["p", "p"])


@pytest.mark.parametrize(
    ("said", "waits"), [("7", 7.0), ("99999", MAX_AFTER_S), ("-1", 0), ("x", 0), (None, 0)]
)
def test_how_long_a_server_may_ask_to_be_left_alone_is_bounded(said, waits):
    assert BackendUnavailable("m", after=said).after_s == waits


def test_a_refused_call_is_not_tried_again():
    with provider((400, {"error": "no"})) as (made, backend), pytest.raises(ModelError, match="HTTP 400"):
        ask(backend)
    assert len(made.bodies) == 1


@pytest.mark.parametrize(
    "reply",
    [
        answer(None),
        answer("", finish_reason="stop"),
        answer(7),
        answer(finish_reason="content_filter"),
        answer(finish_reason=None),
        (200, {"choices": []}),
        (200, {"choices": [{"message": "x", "finish_reason": "stop"}]}),
        (200, []),
        (200, b'{"choices": ' + b" " * (4 << 20)),
    ],
)
def test_an_answer_that_says_nothing_or_something_else_is_no_answer(reply):
    with provider(reply) as (_, backend), pytest.raises(ModelError, match="could not be used"):
        ask(backend, wait_s=0.0)


def test_who_does_not_answer_in_time_is_given_up_and_the_call_is_closed():
    with provider(60.0) as (made, backend):
        with pytest.raises(InfrastructureError, match="no answer within"):
            ask(backend, wait_s=0.0, timeout_s=1.0)
        assert made.closed.wait(60), "the provider sees that nobody waits"


def test_a_text_only_backend_takes_no_ids_and_takes_no_conversation_of_ids_over():
    backend = Backend(id="p", url="http://p", model="m", tokenizer="-", max_model_len=9, api="chat")
    engine = engine_of(backend)
    with pytest.raises(BrokenAnswer, match="text only"):
        engine.generate(SampleRequest("c", [1], 5))
    with pytest.raises(BrokenAnswer, match="text only"):
        engine.score([1, 2])
    assert "text only" in takeover_obstacle(backend.model_copy(update={"api": "generate"}), backend)


# -- registration and probes -----------------------------------------------------------------


def described(routes: dict[str, Any], **request: Any) -> Backend:
    with describing(routes) as url:
        return describe(BackendRequest(url=f"{url}/v1", text_only=True, **request))


def test_a_provider_is_described_by_its_list_of_models_where_it_has_one():
    backend = described(MODELS, max_rollouts=5)
    assert (backend.api, backend.model, backend.max_model_len) == ("chat", "large", 4096)
    assert (backend.max_rollouts, backend.capacity_tokens, backend.policy_version) == (5, None, None)
    assert described(MODELS, model="small").model == "small"
    assert described({}, model="whatever").model == "whatever"
    with pytest.raises(DescribeError, match="name a model") as error:
        described({})
    assert error.value.field == "model"
    with pytest.raises(DescribeError, match="does not serve 'other'"):
        described(MODELS, model="other")
    with pytest.raises(DescribeError, match="does not answer"):
        describe(BackendRequest(url=f"http://127.0.0.1:{free_port()}", text_only=True, model="m"))


@pytest.mark.parametrize("routes", [MODELS, {}, {"GET /v1/models": 401}, {"GET /v1/models": 429}])
def test_a_provider_without_health_and_metrics_is_well_as_long_as_it_answers(routes):
    calls: list[tuple[str, Any]] = []
    backend = described(MODELS)
    with describing(routes, calls) as url:
        there = backend.model_copy(update={"url": url})
        assert stats.probe(there).running is None
        assert stats.current_version(there) is None
    assert [path for path, _ in calls] == ["/v1/models"]
    with pytest.raises(stats.ProbeError, match="/v1/models: "):
        stats.probe(there)
    with describing({"GET /v1/models": 502}) as url, pytest.raises(stats.ProbeError, match="HTTP 502"):
        stats.probe(backend.model_copy(update={"url": url}))
