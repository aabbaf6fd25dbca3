"""What is made of servers that describe themselves in part, in another way, or not at all."""

from __future__ import annotations

import socketserver
import threading
import time

import pytest

from rollout.schema import Backend, BackendRequest
from services.engines import stats
from services.engines.address import root
from services.engines.describe import DescribeError, describe
from tests.helpers.described import SGLANG, describing
from tests.helpers.llm_servers import free_port

CARD = {"id": "m", "root": "/models/m", "max_model_len": 512}
PLAIN = {"GET /v1/models": {"data": [CARD, {**CARD, "id": "other", "root": "/models/other"}]}}


def described(routes, **request) -> Backend:
    with describing(routes) as url:
        return describe(BackendRequest(url=url, **request))


def test_sglang_is_known_by_its_own_routes():
    backend = described(SGLANG)
    assert (backend.engine, backend.api, backend.model) == ("sglang", "sglang", "org/model")
    assert (backend.tokenizer, backend.max_model_len) == ("/models/tokenizer", 4096)
    assert backend.capacity_tokens == 100_000  # two replicas
    assert (backend.policy_version, backend.routed_experts, backend.logprobs_mode) == ("step-3", True, None)


def test_an_older_sglang_has_the_same_under_other_paths():
    old = {
        "GET /v1/models": {"data": [{**SGLANG["GET /v1/models"]["data"][0], "owned_by": "someone"}]},
        "GET /get_server_info": SGLANG["GET /server_info"],
        "GET /get_model_info": SGLANG["GET /model_info"],
    }
    backend = described(old)
    assert (backend.engine, backend.policy_version, backend.capacity_tokens) == ("sglang", "step-3", 100_000)


def test_vllm_without_scale_out_is_called_by_completions_and_with_it_by_generate():
    assert described({**PLAIN, "POST /inference/v1/generate": 403}).api == "completions"
    assert described(PLAIN).api == "completions"
    assert described({**PLAIN, "POST /inference/v1/generate": 400}).api == "generate"


def test_a_server_that_says_little_has_an_unknown_version_and_capacity():
    backend = described(PLAIN)
    assert (backend.engine, backend.model, backend.tokenizer) == ("vllm", "m", "/models/m")
    assert (backend.policy_version, backend.capacity_tokens, backend.logprobs_mode) == (None, None, None)


def test_the_model_that_is_asked_for_is_described():
    backend = described(PLAIN, model="other", capacity_tokens=9, max_rollouts=4)
    assert (backend.model, backend.tokenizer, backend.capacity_tokens, backend.max_rollouts) == (
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
    with describing(SGLANG) as url:
        backend = describe(BackendRequest(url=url))
        assert stats.probe(backend).running == 2
        assert stats.current_version(backend) == "step-3"
    with pytest.raises(stats.ProbeError, match="/health: "):
        stats.probe(backend)
    with pytest.raises(stats.ProbeError, match="/model_info: "):
        stats.current_version(backend)
    with describing({**SGLANG, "GET /health": 503}) as url:
        sick = backend.model_copy(update={"url": url})
        with pytest.raises(stats.ProbeError, match="/health: HTTP 503"):
            stats.probe(sick)
    with describing({"GET /health": "", "GET /model_info": "x"}) as url:
        silent = backend.model_copy(update={"url": url})
        assert stats.probe(silent).running is None
        assert stats.current_version(silent) is None


NESTED = '{"data":' + "[" * 100_000


@pytest.mark.parametrize(
    "card",
    [
        {**CARD, "max_model_len": True},
        {**CARD, "max_model_len": 1e400},
        {**CARD, "max_model_len": -5},
        {**CARD, "max_model_len": [512]},
        {**CARD, "max_model_len": 2**40},
        {**CARD, "id": 7},
        {**CARD, "id": "m\x00"},
        {**CARD, "id": ""},
        "m",
        None,
    ],
)
def test_a_server_that_says_impossible_things_of_its_model_is_no_backend(card):
    with pytest.raises(DescribeError):
        described({"GET /v1/models": {"data": [card]}})


@pytest.mark.parametrize("models", [NESTED, "[]", '{"data": {"id": "m"}}', " " * (17 << 20), "NaN"])
def test_a_server_that_answers_with_something_else_is_no_backend(models):
    with pytest.raises(DescribeError):
        described({"GET /v1/models": models})


@pytest.mark.parametrize("version", [None, 7, "", {"a": 1}, ["v"], "v" * 129, True])
def test_a_version_that_is_none_is_not_told(version):
    lying = {**SGLANG, "GET /model_info": {**SGLANG["GET /model_info"], "weight_version": version}}
    with describing(lying) as url:
        backend = describe(BackendRequest(url=url))
        assert backend.policy_version is None
        assert stats.current_version(backend) is None


@pytest.mark.parametrize("info", [NESTED, '{"vllm_config": {"model_config": 7}}', "7", '{"dp_size": 1e999}'])
def test_settings_that_cannot_be_read_are_not_told(info):
    backend = described({**PLAIN, "GET /server_info": info})
    assert (backend.capacity_tokens, backend.logprobs_mode, backend.tokenizer) == (None, None, "/models/m")


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "1e300"])
def test_counts_that_cannot_be_are_not_told(value):
    counts = stats.parse_stats(
        described(SGLANG), f"sglang:num_running_reqs {value}\nsglang:token_usage 7\nsglang:num_queue_reqs 2\n"
    )
    assert (counts.running, counts.waiting, counts.kv_usage) == (None, 2, 1.0)


@pytest.fixture
def dripping():
    """The address of a server whose answers come a byte at a time."""

    class Dripping(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            try:
                for _ in range(300):
                    self.request.sendall(b" ")
                    time.sleep(0.1)
            except OSError:
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_health_answer_that_comes_a_byte_at_a_time_ends_the_probe(dripping):
    backend = described(SGLANG).model_copy(update={"url": dripping})
    began = time.monotonic()
    with pytest.raises(stats.ProbeError, match="longer than"):
        stats.probe(backend, 3.0)
    assert time.monotonic() - began < 20


def test_settings_that_come_a_byte_at_a_time_come_too_late(dripping, monkeypatch):
    # Behind an @ it is the other server's address; what stands before is a name of a user.
    monkeypatch.setattr("services.engines.describe.SERVER_INFO", (f"@{dripping.removeprefix('http://')}/x",))
    monkeypatch.setattr("services.engines.describe.INFO_TIMEOUT_S", 0.5)
    backend = described(PLAIN)
    assert (backend.capacity_tokens, backend.logprobs_mode, backend.tokenizer) == (None, None, "/models/m")


ADAPTERS = [
    {"id": "base", "root": "/models/base", "max_model_len": 512, "parent": None},
    {"id": "l", "root": "/adapters/l", "max_model_len": None, "parent": "base"},
]
RUNTIME = {"POST /v1/load_lora_adapter": (400, {"error": {"message": "lora_name is missing"}})}


def test_a_server_serves_the_policies_that_are_named_each_by_a_model_of_its_own():
    routes = {"GET /v1/models": {"data": ADAPTERS}, "GET /weight_info": {"weight_version": "left=3&base=1"}}
    backend = described(routes, policies={"left": "l", "frozen": None})
    assert (backend.policies, backend.policy, backend.model) == ({"left": "l", "frozen": "base"}, "left", "l")
    assert (backend.versions, backend.policy_version) == ({"left": "3"}, "3")
    # What an adapter leaves out is its base's.
    assert (backend.tokenizer, backend.max_model_len) == ("/models/base", 512)
    alone = described(routes, policies={"left": "l"})
    assert (alone.policies, alone.policy_version) == ({"left": "l"}, "left=3&base=1")
    assert described(routes).policies == {"default": "base"}


@pytest.mark.parametrize(
    ("policies", "field", "message"),
    [
        ({"left": "l", "right": "l"}, "policies", "'l' is named for several"),
        ({"left": None, "right": "base"}, "policies", "'base' is named for several"),
        ({"left": "l", "right": "r"}, "policies", "does not serve 'r'; it serves: base, l; vLLM with"),
    ],
)
def test_policies_that_cannot_be_served_are_refused(policies, field, message):
    with pytest.raises(DescribeError, match=message) as caught:
        described({"GET /v1/models": {"data": ADAPTERS}}, policies=policies)
    assert caught.value.field == field


def test_an_adapter_that_updates_can_load_need_not_be_there_yet():
    routes = {"GET /v1/models": {"data": ADAPTERS}, **RUNTIME}
    backend = described(routes, policies={"right": "r", "left": "l"})
    assert (backend.model, backend.tokenizer, backend.healthy) == ("r", "/models/base", False)
    assert [*backend.rejected] == ["right"] and "first update of policy 'right'" in backend.rejected["right"]
    with pytest.raises(DescribeError, match="does not serve 'absent'"):
        described(routes, model="absent")
