"""What a worker makes of answers that no engine should give, from a server that sends exactly these bytes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from rollout.schema import Backend, SamplingParams
from services.engines.base import SampleRequest
from tests.helpers.llm_servers import free_port
from workers.agent import llm
from workers.agent.llm import BackendUnavailable, BrokenCall, EngineClient, session
from workers.errors import ModelError

GOOD = {
    "choices": [
        {
            "token_ids": [7, 8],
            "finish_reason": "stop",
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.1}, {"token_id": 8, "logprob": -0.2}]},
        }
    ]
}
PLENTY = 60.0
"""Seconds that no test here comes near."""


def answer(status=200, body=b"", length=None):
    head = (
        f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}\r\n"
    )
    return head.encode() + b"Connection: close\r\n\r\n" + body


def good(**changes):
    return json.dumps({"choices": [{**GOOD["choices"][0], **changes}]}).encode()


@asynccontextmanager
async def served(reply):
    """A server that reads one request and does `reply(writer)`; gives its URL."""

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            line for line in head.decode().split("\r\n") if line.lower().startswith("content-length")
        )
        await reader.readexactly(int(length.split(":")[1]))
        await reply(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def call(url, timeout_s=PLENTY, **sampling):
    described = Backend(id="b", url=url, model="m", tokenizer="t", max_model_len=100, policy_version="v1")
    async with session() as http:
        request = SampleRequest("c", [1, 2, 3], 4, SamplingParams(**sampling))
        return await EngineClient(http, described).generate(request, timeout_s)


def called(data, **options):
    """The outcome of one call to a server that sends `data`."""

    async def main():
        async def reply(_, writer):
            writer.write(data)
            await writer.drain()

        async with served(reply) as url:
            return await call(url, **options)

    return asyncio.run(main())


def test_a_good_answer_is_a_completion():
    done = called(answer(body=good()))
    assert (done.token_ids, done.logprobs, done.spans) == ([7, 8], [-0.1, -0.2], [("v1", 0, 2)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (answer(500, b"boom"), "HTTP 500: boom"),
        (answer(503, b"draining"), "HTTP 503"),
        (answer(429, b"full"), "HTTP 429"),
        (answer(401, b"who are you"), r"HTTP 401: who are you \(no key was sent"),
        (answer(403, b"not you"), "HTTP 403: not you"),
        (answer(408, b"slow"), "HTTP 408"),
        (answer(body=good()[:40], length=400), "Payload"),
        (answer(body=good()[:40]), "no JSON"),
        (answer(body=b"<html>proxy</html>"), "no JSON"),
        (answer(body=b""), "no JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "Disconnected"),
        (b"not http at all\r\n\r\n", "backend b"),
        (b"", "Disconnected"),
    ],
)
def test_a_backend_that_fails_leaves_the_call_to_another_one(data, message):
    with pytest.raises(BackendUnavailable, match=message) as caught:
        called(data)
    assert not caught.value.aborted


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_call_that_is_refused_would_be_refused_elsewhere_too(status):
    with pytest.raises(ModelError, match=f"HTTP {status}: max_tokens is too large"):
        called(answer(status, b"max_tokens is too large"))


def test_an_answer_behind_a_stop_id_of_the_request_is_a_broken_call():
    """What else is broken: tests/unit/test_engines.py and tests/unit/test_engine_lies.py."""
    with pytest.raises(BrokenCall, match="ids follow the stop id 7"):
        called(answer(body=good()), stop_token_ids=[7])


def test_an_aborted_call_may_go_to_the_same_backend_again():
    with pytest.raises(BackendUnavailable, match="'abort'") as caught:
        called(answer(body=good(finish_reason="abort")))
    assert caught.value.aborted


def test_nobody_at_the_address_leaves_the_call_to_another_one():
    with pytest.raises(BackendUnavailable, match="backend b"):
        asyncio.run(call(f"http://127.0.0.1:{free_port()}"))


def test_an_answer_without_end_is_cut_off_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(llm, "MAX_ANSWER_BYTES", 100_000)
    sent = 0

    async def main():
        async def reply(_, writer):
            nonlocal sent
            writer.write(answer(length=1 << 40))
            while True:
                writer.write(b" " * 10_000)
                sent += 10_000
                try:
                    await writer.drain()
                except ConnectionError:
                    return

        async with served(reply) as url:
            with pytest.raises(BackendUnavailable, match="more than 100000 bytes"):
                await call(url)

    asyncio.run(asyncio.wait_for(main(), PLENTY))
    # What the sockets' buffers take beside what was read.
    assert sent < 50_000_000


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_who_gives_up_closes_the_connection_which_cancels_the_call_in_the_engine(how):
    async def main():
        arrived, closed = asyncio.Event(), asyncio.Event()

        async def reply(reader, _):
            arrived.set()
            assert await reader.read() == b""
            closed.set()

        async with served(reply) as url:
            task = asyncio.create_task(call(url, timeout_s=2.0 if how == "timeout" else PLENTY))
            await asyncio.wait_for(arrived.wait(), PLENTY)
            if how == "cancel":
                task.cancel()
            with pytest.raises(asyncio.CancelledError if how == "cancel" else BackendUnavailable):
                await task
            await asyncio.wait_for(closed.wait(), PLENTY)

    asyncio.run(main())
