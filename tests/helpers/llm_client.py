"""A small client of the token-in, token-out contract, for tests of backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(total=240)
"""Seconds; no single request of these tests comes near it unless something hangs."""


def session(url: str) -> aiohttp.ClientSession:
    """A session for `url` without a limit on connections."""
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT)


def generate_body(token_ids: list[int], **options: Any) -> dict[str, Any]:
    """Body of /inference/v1/generate; options that are no field of the envelope are sampling parameters."""
    envelope = {
        "request_id",
        "cache_salt",
        "priority",
        "stream",
        "stream_options",
        "return_token_ids",
        "model",
    }
    outer = {name: value for name, value in options.items() if name in envelope}
    sampling = {name: value for name, value in options.items() if name not in envelope}
    return {"token_ids": token_ids, **outer, "sampling_params": {"logprobs": 0, **sampling}}


async def post(client: aiohttp.ClientSession, path: str, body: Any = None, **query: str) -> dict[str, Any]:
    """POST JSON and return JSON (empty for an empty body); AssertionError when the status is not 200."""
    async with client.post(path, json=body, params=query) as reply:
        text = await reply.text()
        assert reply.status == 200, f"{path}: {reply.status} {text}"
        return json.loads(text) if text else {}


async def get(client: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    """GET JSON."""
    async with client.get(path) as reply:
        assert reply.status == 200, f"{path}: {reply.status} {await reply.text()}"
        return await reply.json()


async def generate(client: aiohttp.ClientSession, token_ids: list[int], **options: Any) -> dict[str, Any]:
    """POST /inference/v1/generate."""
    return await post(client, "/inference/v1/generate", generate_body(token_ids, **options))


async def stream(
    client: aiohttp.ClientSession,
    path: str,
    body: dict[str, Any],
    on_chunk: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """All chunks of a server-sent stream, in order; the closing `[DONE]` is checked and dropped."""
    chunks: list[str] = []
    async with client.post(path, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        async for line in reply.content:
            if line.startswith(b"data: "):
                chunks.append(line[len(b"data: ") :].decode().strip())
                on_chunk()
    assert chunks[-1] == "[DONE]"
    return [json.loads(chunk) for chunk in chunks[:-1]]


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The single choice of a streamed reply, as the whole reply would show it."""
    choice: dict[str, Any] = {"token_ids": [], "logprobs": {"content": []}}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice["token_ids"] += part["token_ids"]
            choice["logprobs"]["content"] += part["logprobs"]["content"]
            choice["finish_reason"] = part["finish_reason"]
            choice["weight_versions"] = part["weight_versions"]
    return choice


def sampled_logprobs(choice: dict[str, Any]) -> list[float]:
    """Log-probs of a generate choice, after checking that they belong to its token ids."""
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    return [entry["logprob"] for entry in content]


async def metric(client: aiohttp.ClientSession, name: str) -> float:
    """Value of the first series of a metric, e.g. `vllm:num_requests_running`."""
    async with client.get("/metrics") as reply:
        for line in (await reply.text()).splitlines():
            if line.startswith(name + "{") or line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"/metrics has no {name}")
