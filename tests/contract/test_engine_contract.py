"""The service's own engine code against real servers: the same tests for the embedded one and for vLLM."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import aiohttp
import httpx
import pytest

from rollout.schema import BackendRequest, SamplingParams
from services.engines import engine_of, stats
from services.engines.base import CallAborted, SampleRequest
from services.engines.describe import DescribeError, describe
from tests.helpers import llm_reference
from tests.helpers.llm_servers import DEMO_MODEL
from tests.helpers.stack import wait_until
from workers.agent.llm import EngineClient, session
from workers.agent.router import BackendRouter
from workers.errors import ModelError
from workers.inprocess import Server

TOLERANCE = 1e-3
PROMPT = [18, 22, 311, 220, 23, 20]
"""`37 times 85`."""
LONG_PROMPT = PROMPT * 50
"""Two blocks of vLLM's prefix cache (128 tokens each), and some."""
ENDLESS = [25] * 40
"""The greedy model says 16 and 22 to it, by turns and without end."""
LONG = 1900
"""Tokens of a call that shall still run when something is done to it."""
WATCHED = 200
"""Of one that is ended as soon as its first ids have come."""
TRIES = 10
GREEDY_AND_WARM = (0.0, 0.7, 1.0, 1.6)


@pytest.fixture(scope="module", params=["generate", "completions"])
def described(request, backend):
    """The server as the gateway describes it, called by each of its two routes."""
    return describe(BackendRequest(url=f"{backend.url}/v1/")).model_copy(update={"api": request.param})


@pytest.fixture(scope="module")
def version(backend):
    """The label of its weights; tests of other modules may have left another than the first."""
    return httpx.get(f"{backend.url}/weight_info", timeout=240).json()["weight_version"]


def complete(described, *, prompt=PROMPT, temperature=1.0, max_tokens=24, seed=None, watch=None, **sampling):
    """One call as a worker makes it."""

    async def main():
        async with session() as http:
            params = SamplingParams(temperature=temperature, **sampling)
            request = SampleRequest("call-1", prompt, max_tokens, params, seed, cache_salt="v0")
            return await EngineClient(http, described).generate(request, timeout_s=240, watch=watch)

    return asyncio.run(main())


def scored(described, token_ids):
    """Log-probs of given ids, as a weight update asks for them."""
    engine = engine_of(described)
    call = engine.score(token_ids)
    answer = httpx.post(described.url + call.path, json=call.body, timeout=240)
    assert answer.status_code == 200, answer.text
    return engine.read_score(answer.json(), token_ids)


def test_a_server_says_what_it_is(backend, version):
    profile = describe(BackendRequest(url=backend.url))
    assert (profile.engine, profile.api) == (backend.kind, "generate")
    assert (profile.model, profile.max_model_len) == ("demo", 2048)
    assert profile.tokenizer == str(DEMO_MODEL)
    assert profile.policy_version == version
    assert profile.logprobs_mode == "processed_logprobs"
    assert profile.capacity_tokens > 100_000
    assert not profile.routed_experts


def test_what_the_operator_says_goes_before_what_the_server_says(backend):
    request = BackendRequest(
        url=backend.url, id="mine", tokenizer="other", logprobs_mode="raw_logprobs", capacity_tokens=7
    )
    profile = describe(request)
    assert (profile.id, profile.tokenizer, profile.logprobs_mode, profile.capacity_tokens) == (
        "mine",
        "other",
        "raw_logprobs",
        7,
    )
    with pytest.raises(DescribeError, match="does not serve 'absent'; it serves: demo") as caught:
        describe(BackendRequest(url=backend.url, model="absent"))
    assert caught.value.field == "model"


@pytest.mark.parametrize("temperature", GREEDY_AND_WARM)
def test_ids_and_log_probs_are_those_of_the_model(described, version, temperature):
    done = complete(described, temperature=temperature, seed=11)
    assert done.spans == [(version, 0, len(done.token_ids))]
    assert done.finish_reason in ("stop", "length")
    assert (done.finish_reason == "length") == (len(done.token_ids) == 24)
    expected = llm_reference.logprobs(DEMO_MODEL, PROMPT, done.token_ids, temperature or 1.0)
    assert done.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_a_seed_repeats_and_a_stop_id_ends_the_call(described):
    first, again = (complete(described, temperature=2.0, seed=5) for _ in range(2))
    assert first.token_ids == again.token_ids
    ended = complete(described, stop_token_ids=list(range(64)), temperature=2.0, seed=5, max_tokens=200)
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] < 64 or ended.token_ids[-1] == 321


def test_scores_of_a_reply_are_the_log_probs_it_was_sampled_with(described):
    done = complete(described, temperature=1.0, max_tokens=60, seed=2)
    whole = PROMPT + done.token_ids
    values = scored(described, whole)
    assert len(values) == len(whole) - 1
    assert values == pytest.approx(llm_reference.logprobs(DEMO_MODEL, whole[:1], whole[1:]), abs=TOLERANCE)
    assert values[len(PROMPT) - 1 :] == pytest.approx(done.logprobs, abs=TOLERANCE)


def test_log_probs_of_a_prompt_come_in_vllms_shape_from_both(backend):
    params = {"max_tokens": 1, "prompt_logprobs": 2, "temperature": 0.5, "detokenize": False}
    body = {"token_ids": PROMPT, "sampling_params": params}
    answer = httpx.post(f"{backend.url}/inference/v1/generate", json=body, timeout=240).json()
    first, *rest = answer["prompt_logprobs"]
    assert first is None and len(rest) == len(PROMPT) - 1
    expected = llm_reference.logprobs(DEMO_MODEL, PROMPT[:1], PROMPT[1:])
    for token, value, entries in zip(PROMPT[1:], expected, rest, strict=True):
        assert next(iter(entries)) == str(token)
        assert entries[str(token)]["logprob"] == pytest.approx(value, abs=TOLERANCE)
        assert {1, 2} <= {entry["rank"] for entry in entries.values()}
        ordered = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [e["logprob"] for e in ordered] == sorted((e["logprob"] for e in ordered), reverse=True)
        assert len(entries) == (2 if entries[str(token)]["rank"] <= 2 else 3)


def test_a_watched_call_tells_its_ids_as_they_come_and_ends_as_the_whole_one(described):
    whole = complete(described, temperature=0.0, max_tokens=60, stop_token_ids=[7])
    told = []
    streamed = complete(described, temperature=0.0, max_tokens=60, stop_token_ids=[7], watch=told.append)
    assert [token for run in told for token in run] == streamed.token_ids
    assert len(told) > 1 or len(whole.token_ids) == 1
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)
    assert replace(streamed, logprobs=whole.logprobs, cached_tokens=None) == replace(
        whole, cached_tokens=None
    )
    assert streamed.cached_tokens is not None or whole.cached_tokens is None


def test_a_watched_call_that_a_pause_ends_in_mid_stream_goes_on_from_its_ids(described, version):
    """Greedy, so that the pieces must be what one call says."""
    request = SampleRequest("watched", ENDLESS, WATCHED, SamplingParams(temperature=0.0))

    async def main():
        told = []
        async with session() as http, aiohttp.ClientSession() as control:
            router = BackendRouter("r", Server(described), http)
            call = asyncio.create_task(router.generate(request, 240, told.extend))
            while not call.done() and len(told) < 3:
                await asyncio.sleep(0.001)
            for path in ("/pause?mode=abort", "/resume"):
                (await control.post(described.url + path)).raise_for_status()
            return told, await call, router.metrics.get("failed_calls", 0)

    whole = complete(described, prompt=ENDLESS, temperature=0.0, max_tokens=WATCHED)
    assert len(whole.token_ids) == WATCHED and len(set(whole.token_ids)) > 1
    for _ in range(TRIES):
        told, joined, failed = asyncio.run(main())
        assert told == joined.token_ids == whole.token_ids
        assert joined.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)
        assert joined.spans == [(version, 0, len(told))]
        assert joined.finish_reason == whole.finish_reason
        if failed:
            return
    pytest.fail(f"none of {TRIES} calls was ended in its middle")


def test_a_call_that_a_pause_ends_is_told_apart_from_one_that_failed(described):
    engine = engine_of(described)
    request = SampleRequest("long", PROMPT, LONG)
    call = engine.generate(request)
    call.body.get("sampling_params", call.body)["ignore_eos"] = True

    def attempt():
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, described.url + call.path, json=call.body, timeout=240)
            wait_until(
                lambda: answer.done() or stats.read_stats(described, 60).running,
                100,
                "the call to be worked on",
            )
            try:
                httpx.post(f"{described.url}/pause", params={"mode": "abort"}, timeout=240).raise_for_status()
                wait([answer], 10)  # one that came after the pause has to wait for the end of it
            finally:
                httpx.post(f"{described.url}/resume", timeout=240).raise_for_status()
            return answer.result()

    for _ in range(TRIES):  # a fast engine can be through with it before the pause
        try:
            engine.read(attempt().json(), request)
        except CallAborted:
            return
    pytest.fail(f"none of {TRIES} calls of {LONG} tokens was aborted")


def test_scores_follow_the_weights_though_the_prefix_is_cached(described, backend, other_weights):
    def load(path):
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        httpx.post(f"{backend.url}/collective_rpc", json=body, timeout=240).raise_for_status()

    complete(described, prompt=LONG_PROMPT, max_tokens=1)
    before = scored(described, LONG_PROMPT)
    load(other_weights)
    try:
        after = scored(described, LONG_PROMPT)
    finally:
        load(DEMO_MODEL)
        httpx.post(f"{backend.url}/reset_prefix_cache", timeout=240)
    expected = llm_reference.logprobs(other_weights, LONG_PROMPT[:1], LONG_PROMPT[1:])
    assert after == pytest.approx(expected, abs=TOLERANCE)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.1


def test_what_an_engine_refuses_is_the_models_error_and_no_reason_to_go_elsewhere(described):
    with pytest.raises(ModelError, match="HTTP 400"):
        complete(described, prompt=[1_000_000])


def test_a_probe_tells_load_and_prefix_cache(described, version):
    before = stats.probe(described, timeout_s=240)
    assert 0 <= before.kv_usage <= 1
    assert before.cached_tokens <= before.prompt_tokens
    for _ in range(2):
        complete(described, prompt=LONG_PROMPT, max_tokens=1)

    def counted():
        now = stats.probe(described, timeout_s=240)
        hits = 256 if described.engine == "vllm" else 0
        prompts_counted = now.prompt_tokens >= before.prompt_tokens + 2 * len(LONG_PROMPT)
        return now if prompts_counted and now.cached_tokens >= before.cached_tokens + hits else None

    # vLLM refreshes its metrics behind its answers, also behind those to calls before these two.
    after = wait_until(counted, 120, "the prompt tokens, and the second time the cached ones, to be counted")
    assert math.isfinite(after.at) and after.cached_ratio <= 1
    assert stats.current_version(described, timeout_s=240) == version
