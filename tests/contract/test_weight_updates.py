"""The exchange of weights on both engines: what becomes of calls under way, and what the canary finds."""

from __future__ import annotations

import threading

import httpx
import pytest

from rollout.policy import PolicyRequest
from rollout.schema import BackendRequest
from services.engines.describe import describe
from services.state.backends.store import BackendStore
from tests.helpers import llm_reference
from tests.helpers.checkpoints import canary
from tests.helpers.llm_servers import DEMO_MODEL
from tests.helpers.stack import wait_until
from workers.exchange import Exchange

PROMPT = [18, 22, 311, 220, 23, 20]
LONG, SHORT = 900, 30
"""Tokens of a call that shall still run when the weights change, seconds of an engine, and of one that waits
for the new ones."""
TOLERANCE = 1e-3
PATIENCE_S = 240


class Target:
    """One engine, registered as a backend."""

    def __init__(self, url: str, store: BackendStore) -> None:
        self.url = url
        self.store = store
        self.backend = store.put(describe(BackendRequest(url=url, id="it")))

    def exchange(self, version: str, path, **options):
        """Exchange the weights; the answer is what became of it."""
        request = PolicyRequest(version=version, path=path and str(path), **{"timeout_s": 240, **options})
        backend = self.store.get("it")
        return Exchange(self.store, backend, request).run(lambda _: None)

    def call(self, answers: list[dict], tokens: int, **sampling) -> None:
        params = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False, **sampling}
        body = {"token_ids": PROMPT, "sampling_params": params, "cache_salt": "exchange"}
        answer = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=240)
        answers.append(answer.raise_for_status().json()["choices"][0])

    def generated(self) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=240).text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:generation_tokens_total"))

    def paused(self) -> bool:
        return httpx.get(f"{self.url}/is_paused", timeout=240).json()["is_paused"]


@pytest.fixture(scope="module")
def store(server):
    return BackendStore(server.client)


@pytest.fixture
def target(backend, store):
    """The engine with the demo model's weights, before and after."""
    target = Target(backend.url, store)
    assert target.exchange("first", DEMO_MODEL, canary=canary(DEMO_MODEL)).state == "resumed"
    yield target
    done = target.exchange("default", DEMO_MODEL, canary=canary(DEMO_MODEL), reset_prefix_cache=True)
    assert done.state == "resumed", done


def exchanged_during_calls(target, weights, mode):
    """Calls of three callers while the weights change, and the outcome of the exchange.

    Their first calls are of different lengths, so that never all of them are between two calls.
    """
    choices: list[tuple[int, dict]] = []
    over = threading.Event()

    def call_again(tokens):
        while not over.is_set():
            answers: list[dict] = []
            target.call(answers, tokens)
            choices.append((tokens, *answers))
            tokens = SHORT if target.paused() else LONG

    check = canary(weights)  # which takes a while, and the calls do not wait
    before = target.generated()
    firsts = [LONG * share // 3 for share in (1, 2, 3)]
    callers = [threading.Thread(target=call_again, args=(first,), daemon=True) for first in firsts]
    for caller in callers:
        caller.start()
    wait_until(lambda: target.generated() > before, PATIENCE_S, "the calls to begin")
    done = target.exchange("step-1", weights, mode=mode, canary=check)
    over.set()
    for caller in callers:
        caller.join(PATIENCE_S)
        assert not caller.is_alive()
    return choices, done


def check_exchange(target, weights, mode) -> bool:
    """Exchange the weights during calls and check all; whether the exchange met calls that were under way."""
    choices, done = exchanged_during_calls(target, weights, mode)
    assert (done.state, done.error) == ("resumed", None)
    assert done.canary_max_error < TOLERANCE
    calls = [
        ([span["version"] for span in choice["weight_versions"]], choice["finish_reason"])
        for _, choice in choices
    ]
    met = (["first"], "abort") if mode == "abort" else (["first", "step-1"], "length")
    # One that is ended before it is begun has sampled nothing.
    others = [(["first"], "length"), (["step-1"], "length"), *([([], "abort")] if mode == "abort" else [])]
    assert all(call in [met, *others] for call in calls), calls
    for tokens, choice in choices:
        assert (len(choice["token_ids"]) == tokens) == (choice["finish_reason"] == "length")
    backend = target.store.get("it")
    assert (backend.policy_version, backend.healthy, backend.paused) == ("step-1", True, False)
    assert not target.paused()
    return met in calls


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_calls_under_way_are_kept_or_ended_and_the_canary_passes(target, other_weights, mode):
    # A starved front end of vLLM is seconds behind its engine, which then may have ended all calls it knows.
    for _ in range(8):
        if check_exchange(target, other_weights, mode):
            return
        assert target.exchange("first", DEMO_MODEL).state == "resumed"
    pytest.fail("no exchange met a call")


def test_calls_under_way_are_waited_for_and_the_canary_passes(target, other_weights):
    assert not check_exchange(target, other_weights, "wait")


def test_after_an_exchange_log_probs_are_those_of_the_new_weights(target, other_weights):
    assert target.exchange("step-2", other_weights, reset_prefix_cache=True).state == "resumed"
    answers: list[dict] = []
    target.call(answers, tokens=30, seed=1)
    (choice,) = answers
    assert choice["weight_versions"] == [{"version": "step-2", "start": 0, "end": 30}]
    expected = llm_reference.logprobs(other_weights, PROMPT, choice["token_ids"])
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(
        expected, abs=TOLERANCE
    )


def test_weights_that_are_not_the_trainer_s_fail_the_canary_and_nothing_is_sampled_from_them(
    target, other_weights
):
    done = target.exchange("step-3", other_weights, canary=canary(DEMO_MODEL))
    assert done.state == "failed"
    assert done.canary_max_error > 0.5
    assert "canary failed" in done.error
    backend = target.store.get("it")
    assert (backend.healthy, backend.paused, backend.policy_version) == (False, False, "first")
    assert "canary failed" in backend.error
    before = target.generated()
    queued = threading.Thread(target=target.call, args=([], 2), daemon=True)
    queued.start()
    queued.join(0.5)
    assert queued.is_alive()
    assert target.generated() == before
    assert target.exchange("step-4", other_weights, canary=canary(other_weights)).state == "resumed"
    queued.join(PATIENCE_S)
    assert not queued.is_alive()
    assert target.store.get("it").healthy


def test_after_a_reload_that_fails_the_engine_lives_and_good_weights_mend_it(target, other_weights, tmp_path):
    """vLLM dies at the next step when it is resumed after such a reload; so it must not be."""
    done = target.exchange("step-5", tmp_path / "nowhere")
    assert done.state == "failed"
    assert "nowhere" in done.error
    embedded = target.backend.engine == "embedded"
    assert target.store.get("it").healthy == embedded, "it alone vouches that its old weights are intact"
    assert target.paused() != embedded
    assert target.exchange("step-6", other_weights, canary=canary(other_weights)).state == "resumed"
