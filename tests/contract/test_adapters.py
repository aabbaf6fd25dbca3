"""Two adapters of one real vLLM, each a policy: brought, told apart, and exchanged alone."""

from __future__ import annotations

import httpx
import pytest

from rollout.policy import Canary, PolicyRequest
from rollout.schema import BackendRequest
from services.engines.describe import describe
from services.state.backends.store import BackendStore
from tests.helpers.checkpoints import adapter, canary
from tests.helpers.llm_servers import vllm_missing, vllm_server
from workers.exchange import Exchange

PATIENCE_S = 240
POLICIES = {"left": "adapter-l", "right": "adapter-r"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three adapters: of each the directory, and what a trainer says of it."""
    directories = [tmp_path_factory.mktemp("adapter") for _ in range(3)]
    pairs = [adapter(directory, seed) for seed, directory in enumerate(directories)]
    return [(path, Canary(**canary(whole), tolerance=1e-3)) for path, whole in pairs]


@pytest.fixture(scope="module")
def engine():
    if reason := vllm_missing():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        with vllm_server(enable_lora=True, max_loras=2, max_lora_rank=8) as server:
            yield server


def test_two_adapters_are_two_policies_each_with_weights_and_versions_of_its_own(engine, made, server):
    store = BackendStore(server.client)

    def bring(policy, version, number, path=None):
        weights, says = made[number]
        fields = {"path": str(path or weights), "canary": says, "lora": {}, "timeout_s": PATIENCE_S}
        request = PolicyRequest(version=version, **fields)
        return Exchange(store, store.get("it").of(policy), request).run(lambda _: None)

    def label():
        return httpx.get(f"{engine.url}/weight_info", timeout=PATIENCE_S).json()["weight_version"]

    described = describe(BackendRequest(url=engine.url, id="it", policies=POLICIES))
    assert [*described.rejected] == ["left", "right"], "vLLM has neither yet"
    assert (described.max_model_len, described.api) == (2048, "generate")
    store.put(described)

    for number, policy in enumerate(POLICIES):
        done = bring(policy, f"{policy}-1", number)
        assert (done.state, done.canary_max_error < 1e-4) == ("resumed", True), done
    assert label() == "left=left-1&right=right-1"
    again = describe(BackendRequest(url=engine.url, id="it", policies=POLICIES))
    assert (again.versions, again.rejected) == ({"left": "left-1", "right": "right-1"}, {})
    assert again.tokenizer == described.tokenizer

    # Another for the left: the right one's weights and version are as they were.
    assert bring("left", "left-2", 2).state == "resumed"
    assert bring("right", "right-1", 1, path=made[1][0]).state == "resumed"
    assert label() == "left=left-2&right=right-1"

    # One that is not there leaves what was; one with the wrong weights takes its policy away alone.
    missing = bring("right", "right-2", 1, path="/nowhere")
    assert (missing.state, store.get("it").rejected) == ("failed", {})
    assert "No adapter found" in missing.error and label() == "left=left-2&right=right-1"
    wrong = bring("left", "left-3", 2, path=made[0][0])
    assert wrong.state == "failed" and [*store.get("it").rejected] == ["left"]
    assert label() == "left=&right=right-1"
    params = {"max_tokens": 4, "logprobs": 0, "detokenize": False}
    body = {"model": "adapter-r", "token_ids": [18, 22, 311], "sampling_params": params}
    answer = httpx.post(f"{engine.url}/inference/v1/generate", json=body, timeout=PATIENCE_S).json()
    assert {span["version"] for span in answer["choices"][0]["weight_versions"]} == {"left=&right=right-1"}
    assert bring("left", "left-4", 0).state == "resumed" and store.get("it").rejected == {}
