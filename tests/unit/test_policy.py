"""What an update comes to, which requests are the same, and what SGLang is told (it cannot run here)."""

from __future__ import annotations

import json

import httpx
import pytest

from rollout.policy import BackendUpdate, PolicyRequest, PolicyUpdate
from rollout.schema import Backend
from services.engines.control import ControlError, control_of
from services.state.policy import identity_of, outcome
from workers.exchange import Exchange

SGLANG = Backend(
    id="s",
    url="http://engine:30000/v1",
    model="m",
    tokenizer="t",
    max_model_len=1024,
    engine="sglang",
    api="sglang",
    policy_version="v0",
)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["resumed", "resumed"], "done"),
        (["resumed", "failed"], "partly"),
        (["failed", "failed"], "failed"),
        (["resumed", "skipped"], "done"),
        (["skipped"], "failed"),
    ],
)
def test_an_update_is_what_became_of_the_backends_that_are_still_there(states, expected):
    backends = {str(number): BackendUpdate(state=state) for number, state in enumerate(states)}
    fields = {"version": "v", "path": None, "mode": "keep", "verified": False, "created_at": 0.0}
    assert outcome(PolicyUpdate(id="u", backends=backends, **fields)) == expected


def test_requests_are_the_same_by_weights_and_backends_and_not_by_how_they_are_exchanged():
    first = PolicyRequest(version="v", path="/a", backends=["x", "y"])
    same = PolicyRequest(version="v", path="/a", backends=["y", "x"], mode="abort", timeout_s=5, wait=1)
    assert identity_of(first) == identity_of(same)
    others = [
        {"version": "w", "path": "/a", "backends": ["x", "y"]},
        {"version": "v", "path": "/b", "backends": ["x", "y"]},
        {"version": "v", "path": "/a"},
        {"version": "v", "path": "/a", "backends": ["x", "y"], "lora": {"name": "l"}},
    ]
    assert identity_of(first) not in [identity_of(PolicyRequest(**fields)) for fields in others]


class Store:
    """Notes what placement is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def __getattr__(self, name):
        return lambda *args, **_: self.told.append((name, *args))


def exchange(request: PolicyRequest, answer) -> tuple[list[tuple[str, object]], list[tuple], BackendUpdate]:
    """An exchange with a server that answers by `answer(path)`: calls, words to placement, and the end."""
    calls: list[tuple[str, object]] = []

    def handle(call: httpx.Request) -> httpx.Response:
        calls.append((call.url.path, json.loads(call.content or b"null")))
        return answer(call.url.path)

    store = Store()
    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        done = Exchange(store, SGLANG, request, http).run(lambda _: None)
    return calls, store.told, done


def fine(path: str) -> httpx.Response:
    if path == "/generate":
        logprobs = [[None, 1, None], [-1.5, 2, None], [-2.5, 3, None]]
        return httpx.Response(200, json={"meta_info": {"input_token_logprobs": logprobs}})
    return httpx.Response(200, json={"success": True})


def test_sglang_is_paused_in_place_loaded_from_disk_continued_and_checked():
    canary = {"token_ids": [1, 2, 3], "logprobs": [-1.5, -2.5]}
    calls, told, done = exchange(PolicyRequest(version="v1", path="/ckpt", canary=canary), fine)
    assert (done.state, done.canary_max_error) == ("resumed", 0.0)
    assert calls[:4] == [
        ("/pause_generation", {"mode": "in_place"}),
        (
            "/update_weights_from_disk",
            {
                "model_path": "/ckpt",
                "weight_version": "v1",
                "flush_cache": False,
                "abort_all_requests": False,
            },
        ),
        ("/update_weight_version", {"new_version": "v1", "abort_all_requests": False}),
        ("/continue_generation", {}),
    ]
    assert [path for path, _ in calls[4:]] == ["/generate"]
    assert told == [("pause", "s"), ("set_version", "s", "v1"), ("recover", "s"), ("resume", "s")]


def test_sglang_lets_go_of_its_cache_when_it_is_to_be_reset():
    calls, _, done = exchange(PolicyRequest(version="v1", path="/ckpt", reset_prefix_cache=True), fine)
    assert done.state == "resumed"
    assert calls[0] == ("/pause_generation", {"mode": "retract"})
    assert "/flush_cache" in [path for path, _ in calls]


def test_sglang_waits_for_calls_by_its_own_lock_and_is_not_paused_for_that():
    calls, _, _ = exchange(PolicyRequest(version="v1", path="/ckpt", mode="wait"), fine)
    assert [path for path, _ in calls] == [
        "/update_weights_from_disk",
        "/update_weight_version",
        "/continue_generation",
    ]


def test_a_failed_reload_takes_the_backend_out_and_ends_its_calls():
    def broken(path: str) -> httpx.Response:
        if path == "/update_weights_from_disk":
            return httpx.Response(400, json={"success": False, "message": "no such file"})
        return fine(path)

    calls, told, done = exchange(PolicyRequest(version="v1", path="/ckpt"), broken)
    assert done.state == "failed"
    assert "no such file" in done.error
    assert calls[-1] == ("/pause_generation", {"mode": "abort"})
    assert [word[0] for word in told] == ["pause", "fail", "resume"]


def test_a_failed_pause_leaves_the_old_weights_in_service():
    def busy(path: str) -> httpx.Response:
        return httpx.Response(500, text="busy") if path == "/pause_generation" else fine(path)

    calls, told, done = exchange(PolicyRequest(version="v1", path="/ckpt"), busy)
    assert done.state == "failed"
    assert [path for path, _ in calls] == ["/pause_generation", "/continue_generation"]
    assert [word[0] for word in told] == ["pause", "resume"]


def test_an_adapter_is_refused_where_the_engine_cannot_exchange_it():
    request = PolicyRequest(version="v1", path="/adapter", lora={"name": "policy"})
    _, told, done = exchange(request, fine)
    assert done.state == "failed"
    assert [word[0] for word in told] == ["pause", "resume"], "its weights are as they were"
    assert "SGLang cannot exchange adapter 'policy' in place" in done.error


def test_vllm_loads_an_adapter_in_place_of_the_one_of_that_name():
    bodies = []

    def handle(call: httpx.Request) -> httpx.Response:
        bodies.append((call.url.path, json.loads(call.content)))
        return httpx.Response(200, text="Success")

    vllm = SGLANG.model_copy(update={"engine": "vllm", "api": "generate"})
    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        control_of(vllm, http, 10).load_adapter("policy", "/adapter")
    body = {"lora_name": "policy", "lora_path": "/adapter", "load_inplace": True}
    assert bodies == [("/v1/load_lora_adapter", body)]


def test_a_route_that_is_missing_is_reported_with_the_remedy():
    vllm = SGLANG.model_copy(update={"engine": "vllm", "api": "generate"})
    transport = httpx.MockTransport(lambda _: httpx.Response(404, json={"detail": "Not Found"}))
    with httpx.Client(transport=transport) as http, pytest.raises(ControlError) as missing:
        control_of(vllm, http, 10).pause("keep", reset=False)
    assert "backend s: POST /pause: HTTP 404: Not Found; start vLLM with VLLM_SERVER_DEV_MODE=1" in str(
        missing.value
    )


CANARY = {
    "true": True,
    "text": "-0.5",
    "none": None,
    "not a number": float("nan"),
    "above zero": 2.5,
    "four hundred digits": -(10**400),
}


@pytest.mark.parametrize("value", CANARY.values(), ids=CANARY)
def test_a_canarys_answer_that_is_no_log_prob_is_the_backends_failure(value):
    answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [value, 2, None]]}}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=json.dumps(answer).encode()))
    with (
        httpx.Client(transport=transport) as http,
        pytest.raises(ControlError, match="canary was not answered"),
    ):
        control_of(SGLANG, http, 5.0).score([1, 2])


def test_an_engine_that_answers_a_step_without_end_has_failed_it():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b" " * (17 << 20)))
    with httpx.Client(transport=transport) as http, pytest.raises(ControlError, match="more than"):
        control_of(SGLANG, http, 5.0).resume()
