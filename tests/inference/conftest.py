"""The embedded backend of the session, asked by blocking calls, and put back after a test that changes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers import llm_client
from tests.helpers.llm_servers import DEMO_MODEL


class Backend:
    """The server, by blocking calls of the client for tests of backends."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, coroutine: Any) -> Any:
        """Run `coroutine(client)` against the server."""

        async def main() -> Any:
            async with llm_client.session(self.url) as client:
                return await coroutine(client)

        return asyncio.run(main())

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """The answer, which must be a success."""
        return self.run(lambda client: llm_client.post(client, path, body))

    def generate(self, token_ids: list[int], **options: Any) -> dict[str, Any]:
        """The first choice of POST /inference/v1/generate."""
        return self.run(lambda client: llm_client.generate(client, token_ids, **options))["choices"][0]

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        return self.run(lambda client: llm_client.stream(client, path, body))

    def refusal(self, path: str, **request: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of an answer that is none."""

        async def ask(client: Any) -> tuple[int, dict[str, Any]]:
            async with client.post(path, **request) as reply:
                return reply.status, (await reply.json())["error"]

        return self.run(ask)


@pytest.fixture
def backend(embedded):
    return Backend(embedded.url)


@pytest.fixture
def restored(backend):
    """The server, with its first weights, version and pause state put back afterwards."""
    yield backend
    backend.post("/resume")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(DEMO_MODEL)}}
    backend.post("/collective_rpc", body)
    backend.post("/update_weight_version", {"new_version": "default"})
