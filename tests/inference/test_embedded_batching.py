"""Continuous batching: many clients, unequal lengths, exact log-probs, reproducible seeds."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.helpers import llm_client, llm_reference
from tests.helpers.llm_servers import DEMO_MODEL

TOLERANCE = 1e-4


def test_sixty_four_clients_are_served_together_with_exact_logprobs(backend):
    rng = random.Random(0)
    prompts = [[rng.randrange(310) for _ in range(rng.randint(1, 120))] for _ in range(64)]
    lengths = [rng.randint(1, 60) for _ in prompts]

    async def ask(client):
        async def late(i):
            await asyncio.sleep(rng.random() * 0.3)  # join at different steps
            return await llm_client.generate(
                client, prompts[i], max_tokens=lengths[i], seed=i, ignore_eos=True
            )

        return await asyncio.gather(*(late(i) for i in range(len(prompts))))

    for prompt, length, reply in zip(prompts, lengths, backend.run(ask), strict=True):
        choice = reply["choices"][0]
        assert len(choice["token_ids"]) == length
        assert choice["finish_reason"] == "length"
        expected = llm_reference.logprobs(DEMO_MODEL, prompt, choice["token_ids"])
        assert llm_client.sampled_logprobs(choice) == pytest.approx(expected, abs=TOLERANCE)


def test_a_long_request_holds_no_short_ones(backend):
    """By the server's own clock: on a busy machine its client is slower than it is."""
    path, body = (
        "/inference/v1/generate",
        llm_client.generate_body([1, 2, 3], max_tokens=2000, ignore_eos=True),
    )

    async def ask(client):
        async def seconds():
            """From arrival to end, of all requests that have ended."""
            return await llm_client.metric(client, "vllm:e2e_request_latency_seconds_sum")

        before, begun = await seconds(), asyncio.Event()
        long = asyncio.create_task(llm_client.stream(client, path, body, on_chunk=begun.set))
        await asyncio.wait_for(begun.wait(), 60)
        for _ in range(5):
            await llm_client.generate(client, [1, 2, 3], max_tokens=5, ignore_eos=True)
        short = await seconds() - before
        assert not long.done()
        reply = llm_client.merged(await long)
        return short, await seconds() - before - short, reply

    short, whole, reply = backend.run(ask)
    assert len(reply["token_ids"]) == 2000
    assert short < whole / 2


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(backend):
    async def ask(client):
        async def tokens(seed):
            reply = await llm_client.generate(
                client, [9, 8, 7], max_tokens=30, seed=seed, temperature=1.5, ignore_eos=True
            )
            return reply["choices"][0]["token_ids"]

        return await tokens(7), await asyncio.gather(*(tokens(seed) for seed in range(16)))

    alone, crowd = backend.run(ask)
    assert crowd[7] == alone
    assert len({tuple(tokens) for tokens in crowd}) > 8


def test_choices_of_one_request_differ_and_carry_their_index(backend):
    options = {"max_tokens": 20, "seed": 3, "n": 4, "temperature": 1.5, "ignore_eos": True}
    reply = backend.post("/inference/v1/generate", llm_client.generate_body([9, 8, 7], **options))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in reply["choices"]}) == 4
    assert reply["usage"]["completion_tokens"] == 80
    assert reply["usage"]["prompt_tokens"] == 3


def test_metrics_count_tokens_under_vllms_names(backend):
    async def ask(client):
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        before = [await llm_client.metric(client, name) for name in names]
        await llm_client.generate(client, [1, 2, 3, 4], max_tokens=6, ignore_eos=True)
        after = [await llm_client.metric(client, name) for name in names]
        assert 0 <= await llm_client.metric(client, "vllm:kv_cache_usage_perc") <= 1
        return [b - a for a, b in zip(before, after, strict=True)]

    assert backend.run(ask) == [4, 6]
