"""The engine without HTTP: memory limits, order, failures, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module

import httpx
import pytest

from tests.helpers import llm_reference
from tests.helpers.lazy import Lazy
from tests.helpers.llm_servers import DEMO_MODEL, free_port
from tests.helpers.stack import healthy, wait_until

torch, sampling = Lazy("torch"), Lazy("services.inference.sampling")
server, inference_model = Lazy("services.inference.__main__"), Lazy("services.inference.model")
inference_engine = Lazy("services.inference.engine")


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return inference_model.load_model(DEMO_MODEL, None)


def sequence(prompt=(1, 2, 3), max_tokens=10, priority=0):
    return inference_engine.Sequence(
        request_id="r",
        index=0,
        prompt_ids=list(prompt),
        params=sampling.SamplingParams(),
        max_tokens=max_tokens,
        stop_reasons={},
        priority=priority,
    )


def play(model, sequences, capacity=100_000, max_sequences=128, fail_at=None, batch=None):
    """Run sequences to their end.

    Returns them in the order in which they ended, with the engine and the number of rows of each decoding.
    """
    rows, ended = [], []

    async def ending(made):
        await made.progress.wait()
        ended.append(made)

    async def main():
        engine = inference_engine.Engine(model, "test", max_sequences, capacity)
        engine.batch = batch or engine.batch
        decode = engine.batch.decode

        def watched(ids):
            rows.append(sum(token is not None for token in ids))
            if len(rows) == fail_at:
                raise RuntimeError("out of memory")
            return decode(ids)

        engine.batch.decode = watched
        engine.start()
        made = [sequence(**options) for options in sequences]
        try:
            engine.submit(made)
            await asyncio.wait_for(asyncio.gather(*map(ending, made)), 30)
            return engine
        finally:
            await engine.stop()
            await asyncio.sleep(0)
            assert not engine.alive

    return ended, asyncio.run(main()), rows


def assert_exact(ended):
    """The log-probs are those of the model."""
    for made in ended:
        expected = llm_reference.logprobs(DEMO_MODEL, made.prompt_ids, made.token_ids)
        assert [drawn.sampled[1] for drawn in made.draws] == pytest.approx(expected, abs=1e-4)


def test_sequences_wait_when_the_cache_has_no_room_for_their_whole_length(model):
    ended, _, rows = play(model, [{"prompt": [5] * 60, "max_tokens": 40}] * 10, capacity=399)
    assert max(rows) == 3
    assert {made.finish_reason for made in ended} == {"length"}
    assert_exact(ended)


def test_a_sequence_takes_the_width_of_the_widest_beside_it(model):
    options = [{"max_tokens": 97}, {"max_tokens": 5}, {"max_tokens": 5}]
    ended, _, rows = play(model, options, capacity=200)
    assert max(rows) == 2
    assert [len(made.draws) for made in ended] == [5, 5, 97]
    assert_exact(ended)


def test_places_of_those_that_ended_are_given_back_though_nobody_asks_for_them(model):
    """Of two rows the longer one ends first: with it go its row, and the columns that it alone had."""
    places = []

    class Watched(inference_model.Batch):
        def decode(self, token_ids):
            logits = super().decode(token_ids)
            places.append(self.places)
            return logits

    ended, _, rows = play(
        model, [{"prompt": [5] * 200, "max_tokens": 3}, {"max_tokens": 12}], batch=Watched(model.module)
    )
    assert rows == [2, 2, *[1] * 9]
    assert places == [2 * 201, 2 * 202, *range(6, 15)]
    assert_exact(ended)


def test_the_batch_never_exceeds_max_num_seqs_and_priority_goes_first(model):
    options = [{"max_tokens": 5, "priority": p} for p in (3, 1, 2, 1)]
    ended, _, rows = play(model, options, max_sequences=1)
    assert [made.priority for made in ended] == [1, 1, 2, 3]
    assert max(rows) == 1


def test_those_who_run_get_a_token_between_two_passes_over_newcomers(model):
    """Two of these prompts fill a pass."""
    ended, _, rows = play(
        model, [{"prompt": [5] * (inference_engine.PREFILL_TOKENS // 2 - 100), "max_tokens": 3}] * 5
    )
    assert rows == [2, 4, 3, 1]
    assert_exact(ended)


def test_rows_that_join_need_no_second_cache_beside_the_first(model, monkeypatch):
    """Only one layer at a time has an old version beside its new one."""
    peaks = []

    def cached():
        """Bytes of all states; what was there before the test is frozen and not looked through."""
        states = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.ndim == 4]
        return sum(x.nbytes for x in states)

    def noted(*args):
        peaks.append(cached())
        return joined(*args)

    joined = import_module("services.inference.model")._joined
    monkeypatch.setattr("services.inference.model._joined", noted)
    gc.collect()
    gc.freeze()
    try:
        batch = inference_model.Batch(model.module)
        batch.prefill([], [[5] * 400] * 4)
        whole = cached()
        assert whole == 4 * 400 * model.kv_bytes_per_token
        batch.prefill([0, 1, 2, 3], [[5] * 10])
    finally:
        gc.unfreeze()
    layers = model.module.config.num_hidden_layers
    assert len(peaks) == 2 * layers
    assert max(peaks) < (1 + 2 / layers) * whole


def test_a_failed_step_fails_its_requests_and_the_next_ones_are_served(model):
    ended, engine, _ = play(model, [{}] * 4, max_sequences=2, fail_at=3)
    assert [made.finish_reason for made in ended] == ["error", "error", "length", "length"]
    assert "out of memory" in ended[0].error
    assert_exact(ended[2:])
    assert not engine.running


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "nowhere"], "nowhere has no config.json"),
        (["--model", str(DEMO_MODEL), "--max-model-len", "4096"], "--max-model-len 4096 is above"),
        (["--model", str(DEMO_MODEL), "--kv-cache-gib", "0.001"], "--kv-cache-gib 0.001 holds"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_what_to_do(options, words, monkeypatch, capsys, caplog):
    monkeypatch.setattr(sys, "argv", ["services.inference", *options])
    assert server.main() == 2
    stderr = capsys.readouterr().err  # the loading of a model shows its progress first
    assert words in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert not any(record.exc_info for record in caplog.records)


def test_sigterm_answers_running_requests_and_ends_the_server(monkeypatch):
    """In this process: its main thread serves, and another one asks."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(sys, "argv", ["services.inference", "--model", str(DEMO_MODEL), "--port", str(port)])
    choices, ended = [], threading.Event()

    def generate():
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2000, "ignore_eos": True}}
        reply = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=240)
        choices.append(reply.json()["choices"][0])

    def sampled():
        lines = httpx.get(f"{url}/metrics", timeout=240).text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:generation_tokens_total"))

    def ask():
        wait_until(lambda: healthy(url), 120, "the server")  # before, the signal would end this process
        asking = threading.Thread(target=generate)
        asking.start()
        with suppress(TimeoutError, httpx.HTTPError):  # it must end all the same
            wait_until(sampled, 120, "the request to run")
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        asking.join()

    client = threading.Thread(target=ask)
    client.start()
    try:
        assert server.main() == 0
    finally:
        ended.set()
    client.join()
    (choice,) = choices
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"]


def test_what_comes_during_the_last_step_is_aborted_as_well(model):
    async def main():
        engine = inference_engine.Engine(model, "test", 128, 100_000)
        engine.start()
        late = sequence()
        async with engine._between_steps:
            stopping = asyncio.create_task(engine.stop())
            await asyncio.sleep(0)
            engine.submit([late])
        await stopping
        assert not engine.alive
        with pytest.raises(inference_engine.EngineError):
            engine.submit([sequence()])
        return late.finish_reason

    assert asyncio.run(main()) == "abort"
