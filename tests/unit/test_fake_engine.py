"""The fake engine: other tests and the routing benchmark rest on its timing, its tokens and its faults."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import httpx
import pytest

from tests.helpers import virtual_time
from tests.helpers.engine_cache import BLOCK, BlockCache, block_hashes
from tests.helpers.engine_faults import EngineDied
from tests.helpers.engine_model import EngineModel, PromptTooLong, Timing
from tests.helpers.fake_engine import FakeEngine, fake_engine
from tests.helpers.fake_language import FakeLanguage
from tests.helpers.fake_wire import COMPLETIONS, GENERATE
from tests.helpers.llm_client import generate_body, session
from tests.helpers.stack import wait_until

STEP = Timing(base_s=0.01, prefill_tokens_per_s=1000.0)


def tokens(count, start=1):
    return list(range(start, start + count))


async def call(model, prompt, max_tokens=1, **options):
    """(the finished sequence, virtual seconds it took)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    sequence = await model.wait(model.submit(prompt, max_tokens=max_tokens, **options))
    return sequence, loop.time() - began


def test_hours_of_virtual_time_pass_at_once_and_in_order_and_a_deadlock_is_reported():
    async def main():
        order = []

        async def wait(seconds):
            await asyncio.sleep(seconds)
            order.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(wait(7200), wait(3600), wait(0.5))
        return order

    assert virtual_time.run(main()) == [(0.5, 0.5), (3600, 3600.0), (7200, 7200.0)]
    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(asyncio.Event().wait())


def test_a_call_takes_its_prefill_in_chunks_and_then_a_step_a_token():
    async def main():
        model = EngineModel(timing=STEP, max_batched_tokens=500)
        return await call(model, tokens(1000), max_tokens=11)

    sequence, seconds = virtual_time.run(main())
    # Two chunks of 500 tokens, the first token with the second of them, ten more steps.
    assert seconds == pytest.approx(2 * 0.01 + 1.0 + 10 * 0.01)
    assert len(sequence.token_ids) == 11


def test_calls_in_one_batch_share_its_steps():
    async def main():
        model = EngineModel(timing=Timing(base_s=0.01, per_sequence_s=0.001, prefill_tokens_per_s=1e9))
        return await asyncio.gather(*(call(model, tokens(20, k * 100 + 1), 101) for k in range(10)))

    for _, seconds in virtual_time.run(main()):
        assert seconds == pytest.approx(101 * (0.01 + 10 * 0.001), rel=0.01)


def test_a_call_that_arrives_meanwhile_joins_at_the_next_step():
    async def main():
        model = EngineModel(timing=Timing(base_s=0.01, prefill_tokens_per_s=1e9))
        first = asyncio.create_task(call(model, tokens(20), 200))
        await asyncio.sleep(0.505)
        _, seconds = await call(model, tokens(20, 500), 1)
        return seconds, (await first)[1]

    late, long = virtual_time.run(main())
    assert late == pytest.approx(0.005 + 0.01, rel=1e-3)
    assert long == pytest.approx(2.0, rel=1e-3)


def test_a_prompt_that_was_seen_before_is_computed_from_its_last_whole_block_on():
    async def main():
        model = EngineModel(timing=STEP)
        first, _ = await call(model, tokens(1000), 50)
        again = [*tokens(1000), *first.token_ids, 7, 8, 9]
        second, seconds = await call(model, again)
        other_salt, _ = await call(model, again, cache_salt="step-1")
        await call(model, tokens(64, 5000))
        whole, _ = await call(model, tokens(64, 5000))
        return second.cached_tokens, seconds, other_salt.cached_tokens, model, whole.cached_tokens

    cached, seconds, salted, model, whole = virtual_time.run(main())
    # The last of the 1050 has been sampled but never computed.
    assert cached == 1049 // BLOCK * BLOCK
    assert seconds == pytest.approx(0.01 + (1053 - cached) / 1000)
    assert salted == 0
    assert whole == 48, "a prompt cached as a whole still computes its last block"
    assert (model.prompt_tokens, model.cached_tokens) == (1000 + 2 * 1053 + 2 * 64, cached + 48)


def test_the_oldest_unused_blocks_are_evicted_first():
    cache = BlockCache(4)
    a, b = block_hashes(tokens(32), None), block_hashes(tokens(32, 100), None)
    for hashes in (a, b, a):
        cache.take(cached := hashes[: cache.hits(hashes)])
        assert cache.allocate(2 - len(cached))
        for digest in hashes[len(cached) :]:
            cache.publish(digest)
        cache.release(hashes, 0)
    assert (cache.hits(a), cache.hits(b), cache.in_use) == (2, 2, 0)
    assert cache.allocate(1)
    assert (cache.hits(a), cache.hits(b)) == (2, 1)
    assert cache.allocate(2)
    assert (cache.hits(a), cache.hits(b)) == (1, 0)
    assert not cache.allocate(2)


def test_calls_wait_when_the_cache_is_full_none_is_lost_and_what_never_fits_is_refused():
    async def main():
        model = EngineModel(timing=STEP, capacity_tokens=1600)
        with pytest.raises(PromptTooLong):
            model.submit(tokens(1590), max_tokens=20)
        calls = [asyncio.create_task(call(model, tokens(700, 1000 * k), 10)) for k in range(1, 6)]
        await asyncio.sleep(0.5)
        load = (model.running, model.waiting)
        return load, await asyncio.gather(*calls), model

    load, done, model = virtual_time.run(main())
    assert load == (2, 3)
    assert [len(sequence.token_ids) for sequence, _ in done] == [10] * 5
    assert (model.running, model.waiting, model.cache.in_use) == (0, 0, 0)


def test_a_sequence_without_room_to_grow_is_preempted_and_answers_the_same():
    async def main():
        model = EngineModel(timing=STEP, capacity_tokens=1600)
        prompts = [tokens(700, 1000 * k) for k in (1, 2)]
        done = await asyncio.gather(*(call(model, prompt, 300) for prompt in prompts))
        return prompts, [sequence for sequence, _ in done], model

    prompts, done, model = virtual_time.run(main())
    assert model.preemptions > 0
    assert model.cache.in_use == 0
    for prompt, sequence in zip(prompts, done, strict=True):
        expected = FakeLanguage().answer(prompt, max_tokens=300)
        assert (sequence.token_ids, sequence.logprobs) == (expected.token_ids, expected.logprobs)


def test_leaving_a_call_takes_it_out_of_the_engine():
    async def main():
        model = EngineModel(timing=STEP)
        task = asyncio.create_task(call(model, tokens(100), 10_000))
        await asyncio.sleep(1.0)
        before = model.running
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return before, model.running, model.cache.in_use

    assert virtual_time.run(main()) == (1, 0, 0)


def test_pausing_keeps_ends_or_waits_for_the_calls_and_versions_go_with_the_tokens():
    async def main():
        model = EngineModel(timing=STEP)

        async def paused(mode, during):
            task = asyncio.create_task(call(model, tokens(20), 100))
            await asyncio.sleep(0.5)
            await model.pause(mode)
            during()
            await asyncio.sleep(10)
            model.resume()
            return await task

        def new_version():
            model.version = "step-1"

        kept, seconds = await paused("keep", new_version)
        waited, at_once = await paused("wait", lambda: None)
        aborted, _ = await paused("abort", lambda: None)
        return kept, seconds, waited, at_once, aborted

    kept, seconds, waited, at_once, aborted = virtual_time.run(main())
    (old, start, middle), (new, begin, end) = kept.spans
    assert (old, start, new, begin, end) == ("default", 0, "step-1", middle, 100)
    assert 0 < middle < 100
    assert seconds > 10 > at_once
    assert waited.spans == [("step-1", 0, 100)]
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 100


def test_tokens_and_logprobs_depend_on_prompt_and_seed_alone():
    language = FakeLanguage(answer_tokens=(5, 40))
    options = {"max_tokens": 100, "stop_token_ids": [2]}
    answer = language.answer(tokens(30), seed=1, **options)
    assert answer == FakeLanguage(answer_tokens=(5, 40)).answer(tokens(30), seed=1, **options)
    assert answer.token_ids != language.answer(tokens(30), seed=2, **options).token_ids
    assert answer.token_ids != language.answer(tokens(31), seed=1, **options).token_ids
    assert 5 <= len(answer.token_ids) <= 40
    assert (answer.token_ids[-1], answer.finish_reason, answer.stop_reason) == (2, "stop", 2)
    cut = language.answer(tokens(30), seed=1, max_tokens=4, stop_token_ids=[2])
    assert (cut.token_ids, cut.finish_reason) == (answer.token_ids[:4], "length")
    assert len({language.answer(tokens(9), seed=s, max_tokens=1).token_ids[0] for s in range(200)}) > 190
    scored = language.prompt_logprobs([*tokens(30), *answer.token_ids])
    assert scored[29:] == answer.logprobs


def test_a_script_decides_what_is_answered():
    language = FakeLanguage(script=lambda prompt, number: [len(prompt), number, 2])
    answer = language.answer([1, 2, 3, 4], max_tokens=10, stop_token_ids=[2], call_number=7)
    assert (answer.token_ids, answer.finish_reason) == ([4, 7, 2], "stop")


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_both_routes_give_the_same_ids_and_logprobs_as_json(path):
    body = generate_body(tokens(40), request_id="r1", max_tokens=5, seed=3)
    if path == COMPLETIONS:
        body = {"prompt": tokens(40), "max_tokens": 5, "seed": 3, "logprobs": 0, "return_token_ids": True}

    async def main():
        engine = FakeEngine(EngineModel())
        status, answer = await engine.request("POST", path, json.loads(json.dumps(body)))
        return status, answer

    status, answer = virtual_time.run(main())
    assert (status, json.loads(json.dumps(answer))) == (200, answer)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    if path == GENERATE:
        assert answer["request_id"] == "generate-tokens-r1"
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
        values = [entry["logprob"] for entry in logprobs["content"]]
    else:
        values = logprobs["token_logprobs"]
    expected = FakeLanguage().answer(tokens(40), max_tokens=5, seed=3)
    assert (choice["token_ids"], values) == (expected.token_ids, expected.logprobs)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_a_stream_has_an_id_an_event_as_vllm_writes_them_and_ends_with_the_counts(path):
    body = generate_body(tokens(40), request_id="r1", max_tokens=5)
    if path == COMPLETIONS:
        body = {"prompt": tokens(40), "request_id": "r1", "max_tokens": 5, "logprobs": 0}
        body["return_token_ids"] = True
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    async def main():
        loop = asyncio.get_running_loop()
        status, reply = await FakeEngine(EngineModel(timing=STEP)).request("POST", path, body)
        return status, [(loop.time(), line) async for line in reply.lines]

    status, lines = virtual_time.run(main())
    times, texts = zip(*lines, strict=True)
    assert status == 200 and texts[-1] == b"data: [DONE]\n\n"
    *events, usage = [json.loads(text.removeprefix(b"data: ")) for text in texts[:-1]]
    choices = [event["choices"][0] for event in events]
    expected = FakeLanguage().answer(tokens(40), max_tokens=5)
    assert [choice["token_ids"] for choice in choices] == [[token] for token in expected.token_ids]
    assert len(set(times[:5])) == 5, "ids were told at once"
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    keys = {*events[0], *choices[0]}
    if path == GENERATE:
        assert keys == {
            *("request_id", "output_mode", "choices", "index", "finish_reason", "stop_reason", "token_ids"),
            *("routed_experts", "sampling_mask", "weight_versions", "logprobs"),
        }
        spans = [choice["weight_versions"] for choice in choices]
        assert spans == [None] * 4 + [[{"version": "default", "start": 0, "end": 5}]]
    else:
        assert keys == {
            *("id", "object", "created", "model", "choices", "index", "text", "logprobs", "finish_reason"),
            *("stop_reason", "prompt_token_ids", "token_ids"),
        }
        assert [choice["prompt_token_ids"] for choice in choices] == [tokens(40)] + [None] * 4


def test_an_answer_asked_for_in_two_parts_is_as_in_one_where_the_ids_before_decide_its_end():
    language = FakeLanguage(ends=20)
    whole = language.answer(tokens(30), max_tokens=200, stop_token_ids=[2])
    assert whole.finish_reason == "stop" and len(whole.token_ids) > 3
    for at in range(1, len(whole.token_ids)):
        prompt = [*tokens(30), *whole.token_ids[:at]]
        rest = language.answer(prompt, max_tokens=200 - at, stop_token_ids=[2])
        assert rest.token_ids == whole.token_ids[at:]
        assert rest.logprobs == whole.logprobs[at:]


def test_bad_requests_are_refused():
    bad = [
        (GENERATE, {}),
        (GENERATE, {"token_ids": [], "sampling_params": {}}),
        (GENERATE, {"token_ids": [1] * 100, "sampling_params": {}}),
        (GENERATE, {"token_ids": [-1], "sampling_params": {}}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": 3}}),
        (COMPLETIONS, {"prompt": [1], "max_tokens": 101}),
        ("/fault", {"kind": "earthquake"}),
    ]

    async def main():
        engine = FakeEngine(EngineModel(), max_model_len=100)
        return [(await engine.request("POST", path, body))[0] for path, body in bad]

    assert virtual_time.run(main()) == [400] * len(bad)


@pytest.mark.parametrize(
    ("kind", "options", "effect"),
    [
        ("error", {"status": 503}, 503),
        ("lie", {"name": "one_log_prob_too_few"}, "short"),
        ("die", {"tokens": 3}, EngineDied),
        ("hang", {}, TimeoutError),
        ("slow", {"factor": 100}, "slow"),
    ],
)
def test_a_fault_meets_as_many_calls_as_it_was_told(kind, options, effect):
    async def main():
        engine = FakeEngine(EngineModel(timing=STEP))
        engine.fault(kind, calls=None if kind == "slow" else 1, **options)

        async def ask():
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                async with asyncio.timeout(100):
                    status, answer = await engine.request(
                        "POST", GENERATE, generate_body(tokens(10), max_tokens=20)
                    )
            except (TimeoutError, ConnectionError) as error:
                return type(error)
            if status != 200:
                return status
            values = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
            if loop.time() - began > 10:
                return "slow"
            return "short" if len(values) < 20 else "good"

        first = await ask()
        engine.fault("none")
        return first, await ask(), [record.state for record in engine.calls]

    first, after, states = virtual_time.run(main())
    assert first == effect
    assert after == (EngineDied if kind == "die" else "good")
    expected = {"hang": "cancelled", "error": "failed", "die": "failed"}
    assert states[0] == expected.get(kind, "done")


@pytest.fixture(scope="module")
def server():
    with fake_engine(answer_tokens=(5, 40), step_ms=5, capacity_tokens=50_000) as server:
        yield server


def test_the_server_says_what_it_is_and_does_as_it_is_told(server):
    with httpx.Client(base_url=server.url, timeout=240) as http:
        (card,) = http.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("fake", 32768)
        assert http.post(GENERATE, json={}).status_code == 400
        http.post("/update_weight_version", json={"new_version": "step-1"}).raise_for_status()
        assert http.get("/weight_info").json() == {"weight_version": "step-1"}
        http.post("/pause", params={"mode": "keep"}).raise_for_status()
        assert http.get("/is_paused").json() == {"is_paused": True}
        http.post("/resume").raise_for_status()
        body = generate_body(tokens(100), max_tokens=100, stop_token_ids=[2])
        http.post(GENERATE, json=body).raise_for_status()
        again = http.post(GENERATE, json=body).json()
        text = http.get("/metrics").text
    assert again["choices"][0]["token_ids"][-1] == 2
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="fake"} 96.0' in text
    assert 'num_gpu_blocks="3125"' in text


def test_closing_the_connection_cancels_the_call(server):
    def reached(state):
        calls = httpx.get(f"{server.url}/calls", timeout=240).json()
        return any((record["call_id"], record["state"]) == ("left", state) for record in calls)

    async def leave():
        async with session(server.url) as http:
            body = generate_body(tokens(9), request_id="left", max_tokens=5)
            task = asyncio.create_task(http.post(GENERATE, json=body))
            await asyncio.to_thread(wait_until, lambda: reached("running"), 120, "the call to begin")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    fault = {"kind": "hang", "calls": 1}
    httpx.post(f"{server.url}/fault", json=fault, timeout=240).raise_for_status()
    asyncio.run(leave())
    wait_until(lambda: reached("cancelled"), 120, "the call to be cancelled")


def test_half_answers_are_seen_as_such(server):
    with httpx.Client(base_url=server.url, timeout=240) as http:
        body = generate_body(tokens(10), max_tokens=5)
        http.post("/fault", json={"kind": "truncated", "calls": 1}).raise_for_status()
        half = http.post(GENERATE, json=body)
        assert half.status_code == 200
        with pytest.raises(ValueError):
            half.json()
        http.post("/fault", json={"kind": "cut", "calls": 1}).raise_for_status()
        with pytest.raises(httpx.RemoteProtocolError):
            http.post(GENERATE, json=body)
        assert http.post(GENERATE, json=body).status_code == 200


def test_a_server_that_dies_in_the_middle_of_a_call_leaves_its_client_without_an_answer():
    with fake_engine() as server:
        fault = {"kind": "die", "tokens": 10}
        httpx.post(f"{server.url}/fault", json=fault, timeout=240).raise_for_status()
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{server.url}{GENERATE}", json=generate_body(tokens(9), max_tokens=100), timeout=240)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", timeout=240)
