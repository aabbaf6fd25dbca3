"""A stock vLLM with our guard before it: closed without the token, and with it all that the service does."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from rollout.policy import PolicyRequest
from rollout.schema import BackendRequest
from services.engines.base import SampleRequest
from services.engines.describe import DescribeError, describe
from services.engines.stats import current_version, probe
from services.settings import settings
from services.state.backends.store import BackendStore
from tests.helpers.checkpoints import canary
from tests.helpers.llm_servers import DEMO_MODEL
from workers.agent.llm import BackendUnavailable, EngineClient, session
from workers.exchange import Exchange

pytestmark = pytest.mark.vllm
PROMPT = [18, 22, 311, 220, 23, 20]


@pytest.fixture
def guarded(vllm, tmp_path, monkeypatch):
    """Its address at which it asks for a token, and the token, which is the engine key `vllm`."""
    token = vllm.token_file.read_text()
    key = tmp_path / "vllm"
    key.touch(0o600)
    key.write_text(token)
    monkeypatch.setenv("ROLLOUT_ENGINE_KEYS", str(tmp_path))
    settings.cache_clear()
    yield vllm.url.replace("127.0.0.1", "localhost"), token
    settings.cache_clear()


@pytest.mark.parametrize("token", [None, "tok-of-somebody-else"])
def test_without_its_token_vllm_answers_nothing_but_health(guarded, vllm, token):
    url, _ = guarded
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=url, headers=headers, timeout=240) as nobody:
        calls = [
            ("POST", "/pause"),
            ("POST", "/collective_rpc"),
            ("POST", "/update_weight_version"),
            ("POST", "/reset_prefix_cache"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/completions"),
            ("POST", "/inference/v1/generate"),
            ("POST", "/tokenize"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/metrics/"),
            ("GET", "/server_info"),
            ("GET", "/openapi.json"),
            ("OPTIONS", "/v1/completions"),
            ("GET", "/nowhere"),
        ]
        bodies = {"method": "sleep", "new_version": "stolen", "model": "demo", "prompt": [1]}
        statuses = {call: nobody.request(*call, json=bodies).status_code for call in calls}
        assert statuses == dict.fromkeys(calls, 401)
        assert nobody.get("/health").status_code == 200
    state = httpx.get(f"{vllm.url}/is_paused", timeout=240).json()
    assert state == {"is_paused": False}


def test_with_its_token_it_is_described_called_watched_and_brought_new_weights(guarded, vllm, server):
    url, token = guarded
    with pytest.raises(DescribeError, match="register it with `key`") as caught:
        describe(BackendRequest(url=url, id="guarded"))
    assert caught.value.field == "key"
    described = describe(BackendRequest(url=url, id="guarded", key="vllm"))
    plain = describe(BackendRequest(url=vllm.url, id="guarded"))
    assert described == plain.model_copy(update={"url": url, "key": "vllm"})
    assert described.capacity_tokens and described.logprobs_mode, "routes outside of /v1 were read"

    store = BackendStore(server.client)
    backend = store.put(described)
    before = backend.policy_version
    for version in ("guarded-1", before):
        request = PolicyRequest(
            version=version, path=str(DEMO_MODEL), canary=canary(DEMO_MODEL), timeout_s=240
        )
        done = Exchange(store, store.get("guarded"), request).run(lambda _: None)
        assert done.state == "resumed", done
        assert current_version(backend, 240) == version
    assert probe(backend, 240).generation_tokens is not None

    async def call(backend):
        async with session() as http:
            return await EngineClient(http, backend).generate(SampleRequest("c", PROMPT, 8), 240)

    done = asyncio.run(call(backend))
    assert done.token_ids and done.spans == [(before, 0, len(done.token_ids))]
    with pytest.raises(BackendUnavailable, match=r"HTTP 401.*no key was sent"):
        asyncio.run(call(backend.model_copy(update={"key": None})))
    assert token not in vllm.log.read_text()
