"""One request at a time: stopping, streaming, cancelling, and refusals."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers import llm_client, llm_reference
from tests.helpers.llm_servers import DEMO_MODEL


def run(embedded, coroutine):
    """Run `coroutine(client)` against the server."""

    async def main():
        async with llm_client.session(embedded.url) as client:
            return await coroutine(client)

    return asyncio.run(main())


def test_log_probs_of_a_prompt_are_not_streamed(embedded):
    async def ask(client):
        body = llm_client.generate_body([1, 2, 3], max_tokens=2, prompt_logprobs=1, stream=True)
        async with client.post("/inference/v1/generate", json=body) as reply:
            return reply.status, await reply.json()

    status, answer = run(embedded, ask)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


def test_log_probs_of_a_long_prompt_are_those_of_the_model_and_each_choice_has_them(embedded):
    prompt = [18, 22, 311, 220, 23, 20, 7] * 90  # more than is scored at once

    async def ask(client):
        body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
        return await llm_client.post(client, "/v1/completions", body)

    for choice in run(embedded, ask)["choices"]:
        first, *rest = choice["prompt_logprobs"]
        values = [entry[str(token)]["logprob"] for entry, token in zip(rest, prompt[1:], strict=True)]
        assert first is None
        expected = llm_reference.logprobs(DEMO_MODEL, prompt[:1], prompt[1:])
        assert values == pytest.approx(expected, abs=1e-3)


def test_a_streamed_reply_equals_the_whole_one(embedded):
    body = llm_client.generate_body([9, 8, 7], max_tokens=40, seed=11, temperature=1.3, ignore_eos=True)

    async def ask(client):
        whole = await llm_client.post(client, "/inference/v1/generate", body)
        usage = {"stream_options": {"include_usage": True}}
        return whole, await llm_client.stream(client, "/inference/v1/generate", {**body, **usage})

    whole, chunks = run(embedded, ask)
    assert len(chunks) > 10
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    choice, streamed = whole["choices"][0], llm_client.merged(chunks)
    assert streamed["token_ids"] == choice["token_ids"]
    got, expected = llm_client.sampled_logprobs(streamed), llm_client.sampled_logprobs(choice)
    assert got == pytest.approx(expected, abs=1e-4)
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert streamed["weight_versions"] == choice["weight_versions"]


def test_streamed_completions_carry_ids_and_the_same_text(embedded):
    body = {"prompt": [9, 8, 7], "max_tokens": 30, "seed": 5, "logprobs": 0, "return_token_ids": True}

    async def ask(client):
        whole = await llm_client.post(client, "/v1/completions", body)
        return whole["choices"][0], await llm_client.stream(client, "/v1/completions", body)

    whole, chunks = run(embedded, ask)
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert parts[0]["prompt_token_ids"] == [9, 8, 7]
    assert [token for p in parts for token in p["token_ids"]] == whole["token_ids"]
    assert "".join(p["text"] for p in parts) == whole["text"]
    offsets = [offset for p in parts for offset in p["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


def test_top_k_and_top_p_truncate_and_renormalise(embedded):
    async def ask(client):
        one = await llm_client.generate(client, [1, 2, 3], max_tokens=10, top_k=1, ignore_eos=True)
        greedy = await llm_client.generate(client, [1, 2, 3], max_tokens=10, temperature=0, ignore_eos=True)
        tiny = await llm_client.generate(client, [1, 2, 3], max_tokens=10, top_p=1e-6, ignore_eos=True)
        return [reply["choices"][0] for reply in (one, greedy, tiny)]

    one, greedy, tiny = run(embedded, ask)
    assert one["token_ids"] == greedy["token_ids"] == tiny["token_ids"]
    assert llm_client.sampled_logprobs(one) == [0.0] * 10
    assert all(entry["rank"] == 1 for entry in greedy["logprobs"]["content"])


def test_top_logprobs_start_with_the_sampled_token(embedded):
    async def ask(client):
        return await llm_client.generate(client, [1, 2, 3], max_tokens=10, logprobs=3, ignore_eos=True)

    for entry in run(embedded, ask)["choices"][0]["logprobs"]["content"]:
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        assert len(entry["top_logprobs"]) == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_closing_the_connection_cancels_the_request(embedded, streaming):
    body = llm_client.generate_body([1, 2, 3], max_tokens=2000, ignore_eos=True, stream=streaming)

    async def ask(client):
        async def hang():
            async with client.post("/inference/v1/generate", json=body) as reply:
                async for _ in reply.content:
                    pass

        task = asyncio.create_task(hang())
        await asyncio.sleep(0.2)
        assert await llm_client.metric(client, "vllm:num_requests_running") == 1
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0.05)
            if await llm_client.metric(client, "vllm:num_requests_running") == 0:
                return True
        return False

    assert run(embedded, ask)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[9, 8, 7]]}),
        ("/v1/completions", {"prompt": [9, 8, 7], "stream_options": {"include_usage": None}}),
        ("/inference/v1/generate", {"token_ids": [9, 8, 7], "features": [], "content_parts": []}),
        ("/inference/v1/generate", {"token_ids": [9, 8, 7], "kv_transfer_params": {}}),
    ],
)
def test_every_form_of_the_same_request_is_served(embedded, path, body):
    params = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    sampling = params if path == "/v1/completions" else {"sampling_params": params}

    async def ask(client):
        plain = await llm_client.generate(client, [9, 8, 7], **params)
        reply = await llm_client.post(client, path, {**body, **sampling, "return_token_ids": True})
        return plain["choices"][0]["token_ids"], reply["choices"][0]["token_ids"]

    expected, token_ids = run(embedded, ask)
    assert token_ids == expected


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
    ([1, 2], "body"),
]


@pytest.mark.parametrize(("body", "field"), BAD_GENERATE)
def test_a_bad_request_is_refused_and_the_field_named(embedded, body, field):
    async def ask(client):
        async with client.post("/inference/v1/generate", json=body) as reply:
            return reply.status, await reply.json()

    status, answer = run(embedded, ask)
    assert status == 400
    assert answer["error"]["param"] == field
    assert answer["error"]["code"] == 400
    assert field.rsplit(".", 1)[-1] in answer["error"]["message"]


def test_other_refusals(embedded):
    async def ask(client):
        answers = []
        for path, body in [
            ("/v1/completions", {"prompt": [1] * 20, "max_tokens": 2049}),
            ("/v1/completions", {"prompt": 5}),
            ("/v1/completions", {"prompt": [[1], [2]]}),
            ("/v1/completions", {"model": "nobody", "prompt": [1]}),
            ("/pause?mode=maybe", None),
            ("/update_weight_version", {"new_version": ""}),
            ("/collective_rpc", {"method": "rm"}),
            ("/nothing", {}),
        ]:
            async with client.post(path, json=body) as reply:
                answers.append((reply.status, (await reply.json())["error"]["code"]))
        async with client.post("/inference/v1/generate", data=b"{") as reply:
            answers.append((reply.status, (await reply.json())["error"]["code"]))
        return answers

    assert run(embedded, ask) == [(s, s) for s in (400, 400, 400, 404, 400, 400, 400, 404, 400)]
