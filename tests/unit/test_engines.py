"""Wire formats: what is asked, what is read, and what is not trusted.

What real servers answer is tested in `tests/contract`; SGLang's answers here are as its source builds them.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest

from rollout.schema import Backend, SamplingParams
from services.engines import engine_of
from services.engines.base import BrokenAnswer, CallAborted, SampleRequest
from services.engines.checks import MAX_VERSION, ROUNDING
from services.engines.describe import capacity_of_vllm
from services.engines.stats import parse_stats

VLLM = {
    "request_id": "generate-tokens-c",
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
    "prompt_logprobs": [None, {"2": {"logprob": -0.25, "rank": 1}}, {"3": {"logprob": -0.5, "rank": 2}}],
    "choices": [
        {
            "token_ids": [7, 8, 9],
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {"content": [{"token_id": t, "logprob": -t / 10} for t in (7, 8, 9)]},
            "weight_versions": [
                {"version": "step-1", "start": 0, "end": 2},
                {"version": "step-2", "start": 2, "end": 3},
            ],
            "routed_experts": "opaque==",
        }
    ],
}
COMPLETIONS = {
    "id": "cmpl-c",
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": None},
    "choices": [
        {
            "token_ids": [7, 8, 9],
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {"token_logprobs": [-0.7, -0.8, -0.9]},
            "prompt_logprobs": VLLM["prompt_logprobs"],
        }
    ],
}
SGLANG = {
    "text": "",
    "output_ids": [7, 8, 9],
    "meta_info": {
        "id": "c",
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "weight_version": "step-2",
        "output_token_logprobs": [[-0.7, 7, None], [-0.8, 8, None], [-0.9, 9, None]],
        "input_token_logprobs": [[None, 1, None], [-0.25, 2, None], [-0.5, 3, None]],
        "routed_experts": "opaque==",
    },
}
ASKED = SampleRequest(
    "c", [1, 2, 3], 3, stop_token_ids=frozenset({9}), end_ids=frozenset({10}), vocab_size=100
)
ANSWERS = {"generate": VLLM, "completions": COMPLETIONS, "sglang": SGLANG}


def backend(api="generate", **fields) -> Backend:
    return Backend(
        id="b",
        url="http://h:1",
        model="m",
        tokenizer="t",
        max_model_len=100,
        api=api,
        engine="sglang" if api == "sglang" else "vllm",
        policy_version="step-0",
        **fields,
    )


def changed(answer, path, value):
    """A copy of an answer with one value replaced, or taken out with `...`."""
    answer = copy.deepcopy(answer)
    *way, last = path
    place = answer
    for part in way:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return answer


def ask(api, seed=5, cache_salt="step-0", described=None, **sampling):
    stops = frozenset({9})
    request = SampleRequest("c", [1, 2, 3], 4, SamplingParams(**sampling), seed, stops, cache_salt)
    return engine_of(described or backend(api)).generate(request)


def test_generate_is_asked_in_ids_with_the_chosen_log_prob_only():
    call = ask("generate", temperature=0.5, top_p=0.9, top_k=3, stop_token_ids=[4, 9])
    assert call.path == "/inference/v1/generate"
    assert call.body == {
        "model": "m",
        "request_id": "c",
        "token_ids": [1, 2, 3],
        "cache_salt": "step-0",
        "sampling_params": {
            "max_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "stop_token_ids": [4, 9],
            "logprobs": 0,
            "seed": 5,
            "detokenize": False,
        },
    }


def test_completions_is_asked_the_same_beside_the_prompt():
    call = ask("completions", seed=None, cache_salt=None)
    assert call.path == "/v1/completions"
    assert call.body == {
        "model": "m",
        "request_id": "c",
        "prompt": [1, 2, 3],
        "return_token_ids": True,
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [9],
        "logprobs": 0,
    }


def test_sglang_is_asked_by_its_own_names():
    call = ask("sglang", temperature=0.5, top_p=0.9)
    assert call.path == "/generate"
    assert call.body == {
        "rid": "c",
        "input_ids": [1, 2, 3],
        "extra_key": "step-0",
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "stop_token_ids": [9],
            "sampling_seed": 5,
        },
    }
    with_experts = ask("sglang", described=backend("sglang", routed_experts=True))
    assert with_experts.body["return_routed_experts"] is True


@pytest.mark.parametrize("api", ANSWERS)
def test_top_k_0_is_sent_as_off_for_some_engines_refuse_0(api):
    body = ask(api, top_k=0).body
    assert body.get("sampling_params", body)["top_k"] == -1


@pytest.mark.parametrize("api", ANSWERS)
def test_an_answer_is_read_with_its_log_probs_versions_and_experts(api):
    done = engine_of(backend(api)).read(ANSWERS[api], ASKED)
    assert (done.call_id, done.token_ids, done.logprobs) == ("c", [7, 8, 9], [-0.7, -0.8, -0.9])
    assert done.finish_reason == ("stop" if api == "sglang" else "length")
    assert done.cached_tokens == (None if api == "completions" else 2)
    assert done.routed_experts == (None if api == "completions" else "opaque==")
    assert (
        done.spans
        == {
            "generate": [("step-1", 0, 2), ("step-2", 2, 3)],
            "completions": [("step-0", 0, 3)],
            "sglang": [("step-2", 0, 3)],
        }[api]
    )


def test_a_newer_sglang_tells_spans_and_an_older_one_the_last_version_only():
    spans = [{"version": "step-1", "start": 0, "end": 1}, {"version": "step-2", "start": 1, "end": 3}]
    engine = engine_of(backend("sglang"))
    done = engine.read(changed(SGLANG, ["meta_info", "weight_versions"], spans), ASKED)
    assert done.spans == [("step-1", 0, 1), ("step-2", 1, 3)]
    silent = engine.read(changed(SGLANG, ["meta_info", "weight_version"], ...), ASKED)
    assert silent.spans == [("step-0", 0, 3)]
    ids_in_log_probs_only = engine.read(changed(SGLANG, ["output_ids"], ...), ASKED)
    assert ids_in_log_probs_only.token_ids == [7, 8, 9]


@pytest.mark.parametrize("api", ANSWERS)
def test_a_seed_of_0_is_a_seed(api):
    body = ask(api, seed=0).body
    params = body.get("sampling_params", body)
    assert params["sampling_seed" if api == "sglang" else "seed"] == 0
    params = ask(api, seed=None).body.get("sampling_params", {})
    assert not {"seed", "sampling_seed"} & set(params)


def reply(ids, reason="length", logprob=-0.5, **choice):
    """An answer of `/inference/v1/generate`."""
    content = [{"token_id": token, "logprob": logprob} for token in ids]
    return {
        "choices": [{"token_ids": ids, "finish_reason": reason, "logprobs": {"content": content}, **choice}]
    }


def of_version(length):
    return reply([7, 8, 6], weight_versions=[{"version": "v" * length, "start": 0, "end": 3}])


NEARLY_FULL = dataclasses.replace(ASKED, prompt=[1] * 98)


@pytest.mark.parametrize(
    ("asked", "fine", "broken", "why"),
    [
        (ASKED, reply([7, 8, 99]), reply([7, 8, 100]), "outside the vocabulary"),
        (ASKED, of_version(MAX_VERSION), of_version(MAX_VERSION + 1), "no policy version"),
        (ASKED, reply([7, 8, 6], logprob=ROUNDING), reply([7, 8, 6], logprob=1.1 * ROUNDING), "most is 0"),
        (ASKED, reply([7, 8, 6]), reply([7, 8]), "cut at 2 ids, and 3 had room"),
        (NEARLY_FULL, reply([7, 8]), reply([7, 8, 6]), "3 ids were sampled where 2 had room"),
        (ASKED, reply([7, 10], "stop"), reply([7, 11], "stop"), "11 ends no turn"),
        (ASKED, reply([7, 9], "stop"), reply([9, 9], "stop"), "follow the stop id"),
    ],
)
def test_the_last_that_can_be_is_taken_and_the_first_that_cannot_is_not(asked, fine, broken, why):
    engine = engine_of(backend())
    done = engine.read(fine, asked)
    assert done.token_ids == fine["choices"][0]["token_ids"]
    assert max(done.logprobs) <= 0.0
    with pytest.raises(BrokenAnswer, match=why):
        engine.read(broken, asked)


def test_sglang_may_cut_a_call_before_it_is_full():
    meta = {**SGLANG["meta_info"], "finish_reason": {"type": "length"}, "cached_tokens": None}
    meta["output_token_logprobs"] = meta["output_token_logprobs"][:2]
    answer = {**SGLANG, "output_ids": [7, 8], "meta_info": meta}
    assert engine_of(backend("sglang")).read(answer, ASKED).token_ids == [7, 8]


@pytest.mark.parametrize(("hits", "kept"), [(0, 0), (3, 3), (4, None), (-1, None), (True, None), ("2", None)])
def test_as_many_ids_as_the_prompt_has_may_come_from_the_cache(hits, kept):
    answer = changed(VLLM, ["usage", "prompt_tokens_details", "cached_tokens"], hits)
    assert engine_of(backend()).read(answer, ASKED).cached_tokens == kept


CHOICE = ["choices", 0]
META = ["meta_info"]


@pytest.mark.parametrize(
    ("api", "path", "value"),
    [
        ("generate", ["choices"], ...),
        ("generate", CHOICE, None),
        ("generate", [*CHOICE, "token_ids"], [7, 8]),
        ("generate", [*CHOICE, "token_ids"], [7, 8, 10]),
        ("generate", [*CHOICE, "weight_versions", 1, "version"], ...),
        ("completions", [*CHOICE, "token_ids"], ...),
        ("completions", [*CHOICE, "logprobs", "token_logprobs"], [-0.7, -0.8]),
        ("completions", [*CHOICE, "logprobs", "token_logprobs", 0], None),
        ("sglang", META, None),
        ("sglang", ["output_ids"], [7, 8]),
        ("sglang", ["output_ids"], [7, 8, 10]),
        ("sglang", [*META, "output_token_logprobs"], ...),
        ("sglang", [*META, "output_token_logprobs", 1, 0], None),
        ("sglang", [*META, "output_token_logprobs", 1, 1], 11),
    ],
)
def test_an_answer_that_contradicts_itself_or_lacks_something_is_not_used(api, path, value):
    """What else `generate` may say that is not so: tests/helpers/engine_lies.py."""
    with pytest.raises(BrokenAnswer, match="backend b: "):
        engine_of(backend(api)).read(changed(ANSWERS[api], path, value), ASKED)


@pytest.mark.parametrize("api", ANSWERS)
@pytest.mark.parametrize("answer", [[], None, "text", 3, {}])
def test_an_answer_of_another_shape_is_broken_and_nothing_worse(api, answer):
    with pytest.raises(BrokenAnswer):
        engine_of(backend(api)).read(answer, ASKED)
    with pytest.raises(BrokenAnswer):
        engine_of(backend(api)).read_score(answer, [1, 2, 3])


@pytest.mark.parametrize(
    ("api", "path", "value"),
    [
        ("generate", [*CHOICE, "finish_reason"], "abort"),
        ("generate", [*CHOICE, "finish_reason"], None),
        ("completions", [*CHOICE, "finish_reason"], "abort"),
        ("sglang", [*META, "finish_reason"], {"type": "abort", "message": "paused"}),
        ("sglang", [*META, "finish_reason"], None),
    ],
)
def test_tokens_of_an_aborted_call_are_not_used(api, path, value):
    with pytest.raises(CallAborted):
        engine_of(backend(api)).read(changed(ANSWERS[api], path, value), ASKED)


@pytest.mark.parametrize("api", ANSWERS)
def test_scores_are_read_per_id_but_the_first(api):
    engine = engine_of(backend(api))
    assert engine.read_score(ANSWERS[api], [1, 2, 3]) == [-0.25, -0.5]
    for ids in ([1, 2], [1, 2, 3, 4], [1, 2, 4]):
        with pytest.raises(BrokenAnswer):
            engine.read_score(ANSWERS[api], ids)


def test_scoring_samples_as_little_as_the_engine_allows_and_leaves_no_prefix_to_rollouts():
    vllm, sglang = (engine_of(backend(api)).score([1, 2, 3]).body for api in ("generate", "sglang"))
    assert (vllm["sampling_params"]["max_tokens"], vllm["sampling_params"]["prompt_logprobs"]) == (1, 0)
    assert (sglang["sampling_params"]["max_new_tokens"], sglang["logprob_start_len"]) == (0, 0)
    assert vllm["cache_salt"] == sglang["extra_key"] == "score"


def test_metrics_of_several_engines_behind_one_address_are_added_up():
    text = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n + 1}\n'
        f'vllm:num_requests_waiting{{engine="{n}"}} 2\n'
        f'vllm:kv_cache_usage_perc{{engine="{n}"}} {n / 2}\n'
        f'vllm:prefix_cache_queries_total{{engine="{n}"}} 100\n'
        f'vllm:prefix_cache_hits_total{{engine="{n}"}} 30\n'
        f'vllm:generation_tokens_total{{engine="{n}"}} 50\n'
        "# TYPE vllm:e2e_request_latency_seconds histogram\n"
        f'vllm:e2e_request_latency_seconds_bucket{{engine="{n}",le="+Inf"}} 3\n'
        f'vllm:e2e_request_latency_seconds_count{{engine="{n}"}} 3\n'
        f'vllm:e2e_request_latency_seconds_sum{{engine="{n}"}} 1.25\n'
        for n in (0, 1)
    )
    stats = parse_stats(backend(), text)
    assert (stats.running, stats.waiting, stats.kv_usage) == (3, 4, 0.25)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.cached_ratio) == (200, 60, 0.3)
    assert (stats.generation_tokens, stats.requests, stats.request_seconds) == (100, 6, 2.5)
    assert parse_stats(backend(), "vllm:kv_cache_usage_perc 1.2\n").kv_usage == 1.0


def test_metrics_of_sglang_count_a_number_once_though_it_comes_by_priority_too():
    text = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",priority=""} 3.0
sglang:num_running_reqs{model_name="m",priority="1"} 3.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.5
sglang:prompt_tokens_total{model_name="m"} 200.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 40.0
sglang:cached_tokens_total{model_name="m",cache_source="host"} 10.0
"""
    stats = parse_stats(backend("sglang"), text)
    assert (stats.running, stats.waiting, stats.kv_usage) == (3, 1, 0.5)
    assert stats.cached_ratio == 0.25


@pytest.mark.parametrize("text", ["", "<html>", "vllm:num_requests_running{engine=", "a b c d\n", "x NaN\n"])
def test_metrics_that_are_none_say_nothing(text):
    stats = parse_stats(backend(), text)
    assert (stats.running, stats.kv_usage, stats.cached_ratio) == (None, None, None)


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (['kv_cache_size_tokens="900",num_gpu_blocks="10",block_size="128"'], 900),
        (['num_gpu_blocks="10",block_size="16"'], 160),
        (['kv_cache_size_tokens="None",num_gpu_blocks="10",block_size="16"'], 160),
        (
            [
                'num_gpu_blocks="10",block_size="16",engine="0"',
                'num_gpu_blocks="5",block_size="16",engine="1"',
            ],
            240,
        ),
        (['num_gpu_blocks="None",block_size="16"'], None),
        ([], None),
    ],
)
def test_the_capacity_of_vllm_comes_from_its_metrics(labels, tokens):
    assert capacity_of_vllm("".join(f"vllm:cache_config_info{{{label}}} 1.0\n" for label in labels)) == tokens
