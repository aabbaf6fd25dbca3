"""Tokens that an engine sampled from new weights count only once those are found to be the trainer's."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from rollout.schema import BackendRequest
from services.engines.base import SampleRequest
from services.engines.describe import describe
from services.state.backends.store import BackendStore
from workers.agent.placement import Placements
from workers.agent.router import BackendRouter

ROLLOUT = "rollout-1"
CALL = SampleRequest("c", [1, 2, 3], max_tokens=3, seed=1)
PATIENCE_S = 120


@pytest.fixture
def store(embedded, server):
    """Two backends, both this engine; the service knows other weights of the first than the engine names."""
    server.client.flushall()
    store = BackendStore(server.client)
    for name, version in (("exchanged", "before"), ("other", None)):
        backend = describe(BackendRequest(url=embedded.url, id=name))
        store.put(backend.model_copy(update={"policy_version": version or backend.policy_version}))
    return store


def call_that_ends_during_an_exchange(store, end):
    """Of a call that was answered while weights were exchanged: the backend that served it, how often it was
    answered in vain, and its completion.

    `end(version)` ends the exchange, told the version that the engine names.
    """

    async def main():
        placements = Placements(store)
        async with aiohttp.ClientSession() as http:
            router = BackendRouter(ROLLOUT, placements, http, policy_version="before")
            await router.acquire()
            store.pause("exchanged")
            answered, asked = asyncio.Event(), placements.trusted

            async def trusted(backend_id, version, policy):
                answered.version = version
                answered.set()
                return await asked(backend_id, version, policy)

            placements.trusted = trusted
            call = asyncio.create_task(router.generate(CALL, PATIENCE_S))
            await asyncio.wait_for(answered.wait(), PATIENCE_S)
            await asyncio.sleep(0.1)
            assert not call.done(), "tokens were taken before the weights were found right"
            end(answered.version)
            completion = await asyncio.wait_for(call, PATIENCE_S)
            return router.backend.id, router.metrics.get("failed_calls", 0), completion

    return asyncio.run(main())


@pytest.mark.parametrize("passes", [True, False])
def test_they_are_taken_when_the_canary_passes_and_else_the_call_is_made_elsewhere(store, passes):
    def end(version):
        if passes:
            store.set_version("exchanged", version)
        else:
            store.fail("exchanged", "canary failed")
        store.resume("exchanged")

    served, failed, completion = call_that_ends_during_an_exchange(store, end)
    assert (served, failed) == (("exchanged", 0) if passes else ("other", 1))
    assert len(completion.token_ids) == 3
