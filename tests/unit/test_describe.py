"""What is made of servers that describe themselves in part, in another way, or not at all."""

from __future__ import annotations

import pytest

from rollout.schema import Backend, BackendRequest
from services.engines import stats
from services.engines.address import root, session
from services.engines.describe import DescribeError, describe
from tests.helpers.described import SGLANG, describing
from tests.helpers.llm_servers import free_port

CARD = {"id": "m", "root": "/models/m", "max_model_len": 512}
PLAIN = {"GET /v1/models": {"data": [CARD, {**CARD, "id": "other", "root": "/models/other"}]}}


def described(routes, **request) -> Backend:
    with describing(routes) as url:
        return describe(BackendRequest(url=url, **request))


def test_sglang_is_known_by_its_own_routes():
    found = described(SGLANG)
    assert (found.engine, found.api, found.model) == ("sglang", "sglang", "org/model")
    assert (found.tokenizer, found.max_model_len) == ("/models/tokenizer", 4096)
    assert found.capacity_tokens == 100_000  # two replicas
    assert (found.policy_version, found.routed_experts, found.logprobs_mode) == ("step-3", True, None)


def test_an_older_sglang_has_the_same_under_other_paths():
    old = {
        "GET /v1/models": {"data": [{**SGLANG["GET /v1/models"]["data"][0], "owned_by": "someone"}]},
        "GET /get_server_info": SGLANG["GET /server_info"],
        "GET /get_model_info": SGLANG["GET /model_info"],
    }
    found = described(old)
    assert (found.engine, found.policy_version, found.capacity_tokens) == ("sglang", "step-3", 100_000)


def test_vllm_without_scale_out_is_called_by_completions_and_with_it_by_generate():
    assert described({**PLAIN, "POST /inference/v1/generate": 403}).api == "completions"
    assert described(PLAIN).api == "completions"
    assert described({**PLAIN, "POST /inference/v1/generate": 400}).api == "generate"


def test_a_server_that_says_little_has_an_unknown_version_and_capacity():
    found = described(PLAIN)
    assert (found.engine, found.model, found.tokenizer) == ("vllm", "m", "/models/m")
    assert (found.policy_version, found.capacity_tokens, found.logprobs_mode) == (None, None, None)


def test_the_model_that_is_asked_for_is_described():
    found = described(PLAIN, model="other", capacity_tokens=9, max_rollouts=4)
    assert (found.model, found.tokenizer, found.capacity_tokens, found.max_rollouts) == (
        "other",
        "/models/other",
        9,
        4,
    )


@pytest.mark.parametrize(
    ("routes", "request_", "field", "message"),
    [
        ({}, {}, "url", "404"),
        ({"GET /v1/models": "<html>"}, {}, "url", "no list of models"),
        ({"GET /v1/models": {"data": []}}, {}, "url", "lists no model"),
        ({"GET /v1/models": [1]}, {}, "url", "no list of models"),
        ({"GET /v1/models": {"data": [{"id": "m"}]}}, {}, "url", "does not say max_model_len of 'm'"),
        (PLAIN, {"model": "absent"}, "model", "does not serve 'absent'; it serves: m, other"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_the_field_at_fault(routes, request_, field, message):
    with pytest.raises(DescribeError, match=message) as caught:
        described(routes, **request_)
    assert caught.value.field == field


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://[bad", "http://127.0.0.1:{port}/\x00"])
def test_an_address_where_nobody_answers_is_refused(url):
    with pytest.raises(DescribeError, match="does not answer as an LLM server") as caught:
        describe(BackendRequest(url=url.format(port=free_port())))
    assert caught.value.field == "url"


def test_a_url_is_the_same_with_and_without_what_openai_clients_add():
    assert {root(f"http://h:1{tail}") for tail in ("", "/", "/v1", "/v1/")} == {"http://h:1"}


def test_a_probe_asks_health_and_metrics_and_says_why_a_server_is_not_well():
    with session(30) as http:
        with describing(SGLANG) as url:
            found = describe(BackendRequest(url=url))
            assert stats.probe(found, http).running == 2
            assert stats.current_version(found, http) == "step-3"
        with pytest.raises(stats.ProbeError, match="/health: "):
            stats.probe(found, http)
        with pytest.raises(stats.ProbeError, match="/model_info: "):
            stats.current_version(found, http)
        with describing({**SGLANG, "GET /health": 503}) as url:
            sick = found.model_copy(update={"url": url})
            with pytest.raises(stats.ProbeError, match="/health: HTTP 503"):
                stats.probe(sick, http)
        with describing({"GET /health": "", "GET /model_info": "x"}) as url:
            silent = found.model_copy(update={"url": url})
            assert stats.probe(silent, http).running is None
            assert stats.current_version(silent, http) is None
