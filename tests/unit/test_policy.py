"""What an update comes to, which requests are the same, and what SGLang is told (it cannot run here)."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from rollout.cli import policy as policy_commands
from rollout.errors import ApiError
from rollout.policy import BackendUpdate, PolicyRequest, PolicyStatus, PolicyUpdate
from rollout.schema import Backend, Problem
from services.engines.control import ControlError, control_of
from services.state.policy.store import LeaseLost, identity_of, outcome
from tests.helpers.described import describing
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
        self.orders: list[tuple] = []

    def __getattr__(self, name):
        return lambda *args, **_: self.orders.append((name, *args))


def exchange(
    request: PolicyRequest, **answers
) -> tuple[list[tuple[str, object]], list[tuple], BackendUpdate]:
    """An exchange with an SGLang that does what it is told, or answers as given: calls, words to placement,
    and the end."""
    store, calls = Store(), []
    with describing(FINE | {f"POST /{step}": answer for step, answer in answers.items()}, calls) as url:
        done = Exchange(store, backend(url), request).run(lambda _: None)
    return calls, store.orders, done


def backend(url: str, **fields) -> Backend:
    return SGLANG.model_copy(update={"url": url, **fields})


VLLM = {"engine": "vllm", "api": "generate"}
SCORES = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.5, 2, None], [-2.5, 3, None]]}}
STEPS = ("pause_generation", "update_weights_from_disk", "update_weight_version", "continue_generation")
FINE = {"POST /generate": SCORES} | {f"POST /{step}": {"success": True} for step in (*STEPS, "flush_cache")}


def test_sglang_is_paused_in_place_loaded_from_disk_continued_and_checked():
    canary = {"token_ids": [1, 2, 3], "logprobs": [-1.5, -2.5]}
    calls, orders, done = exchange(PolicyRequest(version="v1", path="/ckpt", canary=canary))
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
    assert orders == [("pause", "s"), ("set_version", "s", "v1"), ("recover", "s"), ("resume", "s")]


def test_sglang_lets_go_of_its_cache_when_it_is_to_be_reset():
    calls, _, done = exchange(PolicyRequest(version="v1", path="/ckpt", reset_prefix_cache=True))
    assert done.state == "resumed"
    assert calls[0] == ("/pause_generation", {"mode": "retract"})
    assert "/flush_cache" in [path for path, _ in calls]


def test_sglang_waits_for_calls_by_its_own_lock_and_is_not_paused_for_that():
    calls, _, _ = exchange(PolicyRequest(version="v1", path="/ckpt", mode="wait"))
    assert [path for path, _ in calls] == [f"/{step}" for step in STEPS[1:]]


@pytest.mark.parametrize(
    ("options", "answers", "steps", "words", "error"),
    [
        # A failed reload takes the backend out and ends its calls.
        (
            {},
            {"update_weights_from_disk": (400, {"success": False, "message": "no such file"})},
            [*STEPS[:2], STEPS[0]],
            ["pause", "fail", "resume"],
            "no such file",
        ),
        # Otherwise its weights are as they were, and stay in service.
        ({}, {"pause_generation": (500, "busy")}, [STEPS[0], STEPS[3]], ["pause", "resume"], "busy"),
        (
            {"lora": {"name": "m"}},
            {},
            [STEPS[0], STEPS[3]],
            ["pause", "resume"],
            "SGLang cannot exchange adapter 'm' in place",
        ),
    ],
    ids=["reload", "pause", "adapter"],
)
def test_a_step_that_fails_leaves_a_backend_that_is_safe(options, answers, steps, words, error):
    calls, orders, done = exchange(PolicyRequest(version="v1", path="/ckpt", **options), **answers)
    assert done.state == "failed" and error in done.error
    assert [path for path, _ in calls] == [f"/{step}" for step in steps]
    assert [word[0] for word in orders] == words
    assert (calls[-1] == ("/pause_generation", {"mode": "abort"})) == ("fail" in words)


def test_vllm_loads_an_adapter_in_place_of_the_one_of_that_name():
    calls = []
    with describing({"POST /v1/load_lora_adapter": "Success"}, calls) as url:
        control_of(backend(url, **VLLM), 10).load_adapter("policy", "/adapter")
    body = {"lora_name": "policy", "lora_path": "/adapter", "load_inplace": True}
    assert calls == [("/v1/load_lora_adapter", body)]


SHARED = {"model": "l", "policy": "left", "policies": {"left": "l", "right": "r"}, **VLLM}
ADAPTER = {
    f"POST /{step}": 200 for step in ("pause", "v1/load_lora_adapter", "update_weight_version", "resume")
}


def test_an_engine_that_fails_to_name_its_other_policies_keeps_all_that_it_has():
    store, calls = Store(), []
    with describing(ADAPTER | {"GET /weight_info": 503}, calls) as url:
        adapter = PolicyRequest(version="v1", path="/a", lora={})
        done = Exchange(store, backend(url, **SHARED), adapter).run(lambda _: None)
    assert done.state == "failed" and "HTTP 503" in done.error
    assert [path for path, _ in calls] == ["/pause", "/weight_info", "/resume"]
    assert store.orders == [("pause", "s"), ("resume", "s")]


def test_a_worker_that_lost_its_lease_while_an_adapter_was_loaded_labels_nothing():
    store, calls, steps = Store(), [], []

    def report(progress):
        steps.append(progress.state.value)
        if steps[-2:] == ["loading", "loading"]:
            raise LeaseLost("another worker goes on")

    weights = {"GET /weight_info": {"weight_version": "left=1&right=7"}}
    with describing(ADAPTER | weights, calls) as url, pytest.raises(LeaseLost):
        request = PolicyRequest(version="v1", path="/a", lora={})
        Exchange(store, backend(url, **SHARED), request).run(report)
    assert [path for path, _ in calls] == ["/pause", "/weight_info", "/v1/load_lora_adapter"]
    assert store.orders == [("pause", "s")]


def test_a_route_that_is_missing_is_reported_with_the_remedy():
    with describing({}) as url, pytest.raises(ControlError) as missing:
        control_of(backend(url, **VLLM), 10).pause("keep", reset=False)
    message = "backend s: POST /pause: HTTP 404: no such route; start vLLM with VLLM_SERVER_DEV_MODE=1"
    assert message in str(missing.value)


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
    with (
        describing({"POST /generate": json.dumps(answer)}) as url,
        pytest.raises(ControlError, match="canary was not answered"),
    ):
        control_of(backend(url), 5.0).score([1, 2])


def test_an_engine_that_answers_a_step_without_end_has_failed_it():
    endless = {"POST /continue_generation": " " * (17 << 20)}
    with describing(endless) as url, pytest.raises(ControlError, match="more than"):
        control_of(backend(url), 5.0).resume()


def test_an_update_is_written_as_releases_that_know_no_transfer_read_it():
    old = PolicyRequest(version="v1", path="/w")
    assert (
        "transfer" not in old.model_dump() and PolicyRequest.model_validate_json(old.model_dump_json()) == old
    )
    sent = PolicyRequest(version="v1", transfer={"backend": "ipc", "update_info": {"names": []}})
    assert PolicyRequest.model_validate_json(sent.model_dump_json()) == sent


@pytest.mark.parametrize("status", [403, 404])
def test_who_may_not_see_all_policies_or_asks_an_older_gateway_is_shown_the_default_one(monkeypatch, status):
    class Client:
        def policies(self):
            raise ApiError(status, Problem(title="no", status=status))

        def policy(self, name):
            return PolicyStatus(name=name, current=None, update=None, history=[])

    monkeypatch.setattr(policy_commands, "connect", lambda url: nullcontext(Client()))
    shown = CliRunner().invoke(policy_commands.policy, [])
    assert shown.exit_code == 0 and "none: backends of any weights" in shown.output, shown.output
    refused = CliRunner().invoke(policy_commands.policy, ["show", "--all"])
    assert isinstance(refused.exception, ApiError)
