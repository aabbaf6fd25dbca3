"""What the rollout service relies on in an LLM backend; the same tests for the embedded one and for vLLM."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import asynccontextmanager

import pytest

from tests.helpers import llm_client, llm_reference
from tests.helpers.llm_servers import DEMO_MODEL

TOLERANCE = 1e-3
IM_END = 321
PROMPT = [18, 22, 311, 220, 23, 20]
"""`37 times 85`."""

TRIES = 10
LONG = 1900
"""Tokens of a request that is ended before it is through: seconds on any machine here."""
WHOLE = 400
"""Tokens of one that still runs when something is done to it, and comes to its end."""


def run(backend, coroutine):
    """Run `coroutine(client)` against the backend."""

    async def main():
        async with llm_client.session(backend.url) as client:
            return await coroutine(client)

    return asyncio.run(main())


def choices(backend, **options):
    """The choices of one call of the generate route."""
    return run(backend, lambda client: llm_client.generate(client, PROMPT, **options))["choices"]


def test_generate_returns_ids_logprobs_and_versions_of_every_token(backend):
    lengths = range(1, 33)

    async def ask(client):
        return await asyncio.gather(
            *(
                llm_client.generate(
                    client,
                    PROMPT * (1 + n % 5),
                    request_id=f"r{n}",
                    cache_salt="v0",
                    max_tokens=n,
                    temperature=1.0,
                    top_p=1,
                    top_k=-1,
                    seed=n,
                    detokenize=False,
                    ignore_eos=True,
                    stop_token_ids=[],
                )
                for n in lengths
            )
        )

    for n, reply in zip(lengths, run(backend, ask), strict=True):
        prompt = PROMPT * (1 + n % 5)
        (choice,) = reply["choices"]
        assert reply["request_id"] == f"generate-tokens-r{n}"
        assert reply["usage"]["prompt_tokens"] == len(prompt)
        assert reply["usage"]["completion_tokens"] == n
        assert len(choice["token_ids"]) == n
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": n}]
        expected = llm_reference.logprobs(DEMO_MODEL, prompt, choice["token_ids"])
        sampled = llm_client.sampled_logprobs(choice)
        assert sampled == pytest.approx(expected, abs=TOLERANCE)
        # float32 holds them without loss: in that they go over the wire (`rollout.arrays`).
        assert array("f", sampled).tolist() == sampled


def test_greedy_tokens_are_the_most_likely_ones(backend):
    (choice,) = choices(backend, max_tokens=20, temperature=0, ignore_eos=True)
    assert all(entry["rank"] == 1 for entry in choice["logprobs"]["content"])


def test_the_end_of_turn_token_is_part_of_the_reply(backend):
    async def ask(client):
        jobs = (llm_client.generate(client, PROMPT, max_tokens=300, seed=s) for s in range(8))
        return await asyncio.gather(*jobs)

    ended = [r["choices"][0] for r in run(backend, ask) if r["choices"][0]["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        assert choice["token_ids"].index(IM_END) == len(choice["token_ids"]) - 1
        assert choice["stop_reason"] is None


def test_a_stop_token_of_the_caller_is_named_in_stop_reason(backend):
    (choice,) = choices(backend, max_tokens=50, ignore_eos=True, stop_token_ids=list(range(384)))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", choice["token_ids"][0])
    assert len(choice["token_ids"]) == 1


def test_a_seed_gives_the_same_tokens_again_and_choices_differ(backend):
    options = {"max_tokens": 20, "seed": 5, "n": 3, "temperature": 1.5, "ignore_eos": True}
    first, second = ([choice["token_ids"] for choice in choices(backend, **options)] for _ in range(2))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3


def test_completions_take_and_return_ids(backend):
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": 25,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": 3,
        "ignore_eos": True,
    }

    async def ask(client):
        whole = await llm_client.post(client, "/v1/completions", body)
        return whole, await llm_client.stream(client, "/v1/completions", body)

    whole, chunks = run(backend, ask)
    (choice,) = whole["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 25
    expected = llm_reference.logprobs(DEMO_MODEL, PROMPT, choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    streamed = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(expected, abs=TOLERANCE)
    assert "".join(part["text"] for part in parts) == choice["text"]


def test_a_streamed_reply_equals_the_whole_one(backend):
    body = llm_client.generate_body(PROMPT, max_tokens=30, seed=11, ignore_eos=True)

    async def ask(client):
        whole = await llm_client.post(client, "/inference/v1/generate", body)
        return whole, await llm_client.stream(client, "/inference/v1/generate", body)

    whole, chunks = run(backend, ask)
    assert len(chunks) > 1
    (choice,), streamed = whole["choices"], llm_client.merged(chunks)
    for key in ("token_ids", "finish_reason", "weight_versions"):
        assert streamed[key] == choice[key]
    expected = llm_client.sampled_logprobs(choice)
    assert llm_client.sampled_logprobs(streamed) == pytest.approx(expected, abs=TOLERANCE)


def test_abort_by_the_prefixed_id_returns_the_partial_tokens(backend):
    async def ask(client):
        async def attempt():
            async with running(client, max_tokens=LONG, request_id="long") as task:
                await abort(client, "generate-tokens-long")
                return llm_client.merged(await asyncio.wait_for(task, 60))

        return await caught(attempt, lambda choice: choice["finish_reason"] == "abort")

    choice = run(backend, ask)
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < LONG
    assert len(llm_client.sampled_logprobs(choice)) == len(choice["token_ids"])


def test_abort_by_the_plain_id_does_nothing(backend):
    async def ask(client):
        async def attempt():
            async with running(client, max_tokens=WHOLE, request_id="long") as task:
                await abort(client, "long")
                return not task.done(), llm_client.merged(await asyncio.wait_for(task, 60))

        return await caught(attempt, lambda outcome: outcome[0])

    met, choice = run(backend, ask)
    assert (met, len(choice["token_ids"]), choice["finish_reason"]) == (True, WHOLE, "length")


async def abort(client, request_id):
    await llm_client.post(client, "/inference/v1/abort_requests", {"request_ids": [request_id]})


@asynccontextmanager
async def running(client, path="/inference/v1/generate", **options):
    """A request that has sampled its first token: gives a task whose result is its merged, streamed reply.

    Streamed because that is the only sure sign of a running request: vLLM refreshes its gauge of them only
    after a step, and now and then not before a short request has ended.
    """
    body = llm_client.generate_body(PROMPT, ignore_eos=True, **options)
    if path == "/v1/completions":
        body = {"model": "demo", "prompt": PROMPT, "ignore_eos": True, **options}
    begun = asyncio.Event()
    task = asyncio.create_task(llm_client.stream(client, path, body, on_chunk=begun.set))
    try:
        await asyncio.wait_for(begun.wait(), 60)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def caught(attempt, was_caught):
    """What `attempt` gives once it has met its request still running, and after some tries whatever it gives.

    On a loaded machine an engine can be through with a request before its server has sent the first token.
    """
    for _ in range(TRIES):
        result = await attempt()
        if was_caught(result):
            break
    return result


async def generated(client):
    """Tokens sampled since the server's start."""
    return await llm_client.metric(client, "vllm:generation_tokens_total")


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_closing_the_connection_cancels_the_request(backend, path):
    async def ask(client):
        async def attempt():
            before = await generated(client)
            async with running(client, path, max_tokens=LONG):
                pass  # leaving it closes the connection
            count = -1.0
            while count != (count := await generated(client)):
                await asyncio.sleep(0.5)
            return count - before

        return await caught(attempt, lambda count: count < LONG)

    assert 0 <= run(backend, ask) < LONG


def test_bad_requests_are_400_in_openais_shape(backend):
    bad = [
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/inference/v1/generate", {"token_ids": [100000], "sampling_params": {}}),
        ("/inference/v1/generate", {"token_ids": [1] * 2048, "sampling_params": {}}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temperature": 3}}),
        ("/v1/completions", {"model": "demo", "prompt": [1] * 20, "max_tokens": 2049}),
    ]

    async def ask(client):
        answers = []
        for path, body in bad:
            async with client.post(path, json=body) as reply:
                answers.append((reply.status, await reply.json()))
        return answers

    for (path, body), (status, answer) in zip(bad, run(backend, ask), strict=True):
        assert status == 400, f"{path} {str(body)[:80]}: {answer}"
        assert answer["error"]["code"] == 400
        assert answer["error"]["message"]


def test_max_tokens_is_clipped_to_what_the_prompt_leaves_of_the_context(backend):
    body = {"model": "demo", "prompt": [1] * 2040, "max_tokens": 100, "ignore_eos": True}

    async def ask(client):
        generated = await llm_client.generate(client, [1] * 2040, max_tokens=100, ignore_eos=True)
        completed = await llm_client.post(client, "/v1/completions", {**body, "return_token_ids": True})
        return [reply["choices"][0] for reply in (generated, completed)]

    for choice in run(backend, ask):
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (8, "length")


def test_the_server_says_what_it_serves(backend):
    async def ask(client):
        assert await llm_client.get(client, "/is_paused") == {"is_paused": False}
        assert "version" in await llm_client.get(client, "/version")
        return await llm_client.get(client, "/v1/models")

    (card,) = run(backend, ask)["data"]
    assert (card["id"], card["max_model_len"]) == ("demo", 2048)


def test_pause_abort_ends_running_requests_and_later_ones_wait_for_resume(backend):
    async def ask(client):
        async def attempt():
            await llm_client.post(client, "/resume")
            async with running(client, max_tokens=LONG) as task:
                await llm_client.post(client, "/pause", mode="abort")
                return llm_client.merged(await asyncio.wait_for(task, 60))

        choice = await caught(attempt, lambda choice: choice["finish_reason"] == "abort")
        queued = asyncio.create_task(llm_client.generate(client, PROMPT, max_tokens=2))
        await asyncio.sleep(0.3)
        assert not queued.done()
        await llm_client.post(client, "/resume")
        await asyncio.wait_for(queued, 60)
        return choice

    choice = run(backend, ask)
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < LONG


def test_pause_wait_returns_when_the_running_requests_have_ended(backend):
    async def ask(client):
        async def attempt():
            async with running(client, max_tokens=WHOLE) as task:
                paused = asyncio.create_task(llm_client.post(client, "/pause", mode="wait"))
                await asyncio.sleep(0.05)
                waits = not paused.done() and not task.done()
                await paused
                # It has ended at the server, so all of its reply is on its way.
                choice = llm_client.merged(await asyncio.wait_for(task, 60))
            await llm_client.post(client, "/resume")
            return waits, choice

        return await caught(attempt, lambda outcome: outcome[0])

    waited, choice = run(backend, ask)
    assert (waited, len(choice["token_ids"]), choice["finish_reason"]) == (True, WHOLE, "length")


def test_weights_swapped_in_mid_generation_show_in_the_version_spans(backend, other_weights):
    """Last: it leaves the backend with its first weights under the label they began with."""

    async def swap(client, directory, version):
        await llm_client.post(client, "/pause", mode="keep")
        assert await llm_client.get(client, "/is_paused") == {"is_paused": True}
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await llm_client.post(client, "/collective_rpc", body)
        await llm_client.post(client, "/update_weight_version", {"new_version": version})
        await llm_client.post(client, "/resume")
        assert await llm_client.get(client, "/weight_info") == {"weight_version": version}

    async def ask(client):
        async def attempt():
            await swap(client, DEMO_MODEL, "first")
            async with running(client, max_tokens=WHOLE) as task:
                await swap(client, other_weights, "step-1")
                return llm_client.merged(await task)

        crossing = await caught(attempt, lambda choice: len(choice["weight_versions"]) == 2)
        after = await llm_client.generate(
            client, PROMPT, cache_salt="step-1", max_tokens=30, seed=1, ignore_eos=True
        )
        await swap(client, DEMO_MODEL, "default")
        await llm_client.post(client, "/reset_prefix_cache")
        return crossing, after["choices"][0]

    crossing, after = run(backend, ask)
    old, new = crossing["weight_versions"]
    assert (old["version"], old["start"], new["version"]) == ("first", 0, "step-1")
    assert (new["start"], new["end"]) == (old["end"], len(crossing["token_ids"]))
    expected = llm_reference.logprobs(DEMO_MODEL, PROMPT, crossing["token_ids"])[: old["end"]]
    assert llm_client.sampled_logprobs(crossing)[: old["end"]] == pytest.approx(expected, abs=TOLERANCE)
    assert after["weight_versions"] == [{"version": "step-1", "start": 0, "end": 30}]
    expected = llm_reference.logprobs(other_weights, PROMPT, after["token_ids"])
    assert llm_client.sampled_logprobs(after) == pytest.approx(expected, abs=TOLERANCE)
