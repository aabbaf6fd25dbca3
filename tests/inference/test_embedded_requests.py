"""One request at a time: stopping, streaming, cancelling, and refusals."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers import llm_client, llm_reference
from tests.helpers.llm_servers import DEMO_MODEL


def test_log_probs_of_a_long_prompt_are_those_of_the_model_and_each_choice_has_them(backend):
    prompt = [18, 22, 311, 220, 23, 20, 7] * 90  # more than is scored at once
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    choices = backend.post("/v1/completions", body)["choices"]
    assert len(choices) == 2
    for choice in choices:
        first, *rest = choice["prompt_logprobs"]
        values = [entry[str(token)]["logprob"] for entry, token in zip(rest, prompt[1:], strict=True)]
        assert first is None
        expected = llm_reference.logprobs(DEMO_MODEL, prompt[:1], prompt[1:])
        assert values == pytest.approx(expected, abs=1e-3)


def test_a_streamed_reply_equals_the_whole_one(backend):
    body = llm_client.generate_body([9, 8, 7], max_tokens=40, seed=11, temperature=1.3, ignore_eos=True)
    (choice,) = backend.post("/inference/v1/generate", body)["choices"]
    chunks = backend.stream("/inference/v1/generate", {**body, "stream_options": {"include_usage": True}})
    assert len(chunks) > 10
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    streamed = llm_client.merged(chunks)
    for name in ("token_ids", "finish_reason", "weight_versions"):
        assert streamed[name] == choice[name]
    expected = llm_client.sampled_logprobs(choice)
    assert llm_client.sampled_logprobs(streamed) == pytest.approx(expected, abs=1e-4)


def test_streamed_completions_carry_ids_and_the_same_text(backend):
    body = {"prompt": [9, 8, 7], "max_tokens": 30, "seed": 5, "logprobs": 0, "return_token_ids": True}
    (whole,) = backend.post("/v1/completions", body)["choices"]
    parts = [choice for chunk in backend.stream("/v1/completions", body) for choice in chunk["choices"]]
    assert parts[0]["prompt_token_ids"] == [9, 8, 7]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


def test_top_k_and_top_p_truncate_and_renormalise(backend):
    likeliest, greedy, tiny = (
        backend.generate([1, 2, 3], max_tokens=10, ignore_eos=True, **options)
        for options in ({"top_k": 1}, {"temperature": 0}, {"top_p": 1e-6})
    )
    assert likeliest["token_ids"] == greedy["token_ids"] == tiny["token_ids"]
    assert llm_client.sampled_logprobs(likeliest) == [0.0] * 10
    assert all(entry["rank"] == 1 for entry in greedy["logprobs"]["content"])


def test_top_logprobs_start_with_the_sampled_token(backend):
    choice = backend.generate([1, 2, 3], max_tokens=10, logprobs=3, ignore_eos=True)
    for entry in choice["logprobs"]["content"]:
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        assert len(entry["top_logprobs"]) == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_closing_the_connection_cancels_the_request(backend, streaming):
    body = llm_client.generate_body([1, 2, 3], max_tokens=2000, ignore_eos=True, stream=streaming)

    async def ask(client):
        async def hang():
            async with client.post("/inference/v1/generate", json=body) as reply:
                async for _ in reply.content:
                    pass

        async def running():
            return await llm_client.metric(client, "vllm:num_requests_running")

        before = await llm_client.metric(client, "vllm:generation_tokens_total")
        task = asyncio.create_task(hang())
        async with asyncio.timeout(60):
            while not task.done() and await running() != 1:
                await asyncio.sleep(0.01)
            assert not task.done()
            task.cancel()
            while await running():
                await asyncio.sleep(0.05)
        await asyncio.gather(task, return_exceptions=True)
        return await llm_client.metric(client, "vllm:generation_tokens_total") - before

    assert 0 <= backend.run(ask) < 2000, "it was ended, and did not come to its own end"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[9, 8, 7]]}),
        ("/v1/completions", {"prompt": [9, 8, 7], "stream_options": {"include_usage": None}}),
        ("/inference/v1/generate", {"token_ids": [9, 8, 7], "features": [], "content_parts": []}),
        ("/inference/v1/generate", {"token_ids": [9, 8, 7], "kv_transfer_params": {}}),
    ],
)
def test_every_form_of_the_same_request_is_served(backend, path, body):
    params = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    sampling = params if path == "/v1/completions" else {"sampling_params": params}
    (choice,) = backend.post(path, {**body, **sampling, "return_token_ids": True})["choices"]
    assert choice["token_ids"] == backend.generate([9, 8, 7], **params)["token_ids"]


BAD_GENERATE = [
    ({"sampling_params": {}}, "token_ids"),
    ({"token_ids": [], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [1, -1], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [1, 384], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [1, True], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [1] * 2048, "sampling_params": {}}, "token_ids"),
    ({"token_ids": [1]}, "sampling_params"),
    ({"token_ids": [1], "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
    ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
    ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
    ({"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
    ({"token_ids": [1], "sampling_params": {"tempreature": 1}}, "sampling_params.tempreature"),
    ({"token_ids": [1], "sampling_params": {}, "cache_salt": ""}, "cache_salt"),
    ({"token_ids": [1], "sampling_params": {}, "stream": "yes"}, "stream"),
    ({"token_ids": [1], "sampling_params": {}, "features": {"image": 1}}, "features"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
    ([1, 2], "body"),
]


@pytest.mark.parametrize(("body", "field"), BAD_GENERATE)
def test_a_bad_request_is_refused_and_the_field_named(backend, body, field):
    status, error = backend.refusal("/inference/v1/generate", json=body)
    assert (status, error["code"], error["param"]) == (400, 400, field)
    assert field.rsplit(".", 1)[-1] in error["message"]


@pytest.mark.parametrize(
    ("path", "request_", "status"),
    [
        ("/v1/completions", {"json": {"prompt": [1] * 20, "max_tokens": 2049}}, 400),
        ("/v1/completions", {"json": {"prompt": 5}}, 400),
        ("/v1/completions", {"json": {"prompt": [[1], [2]]}}, 400),
        ("/v1/completions", {"json": {"model": "nobody", "prompt": [1]}}, 404),
        ("/pause?mode=maybe", {}, 400),
        ("/update_weight_version", {"json": {"new_version": ""}}, 400),
        ("/collective_rpc", {"json": {"method": "rm"}}, 400),
        ("/nothing", {"json": {}}, 404),
        ("/inference/v1/generate", {"data": b"{"}, 400),
    ],
)
def test_what_cannot_be_served_is_refused_in_the_same_form(backend, path, request_, status):
    answered, error = backend.refusal(path, **request_)
    assert (answered, error["code"]) == (status, status)
