"""The engine without HTTP: memory limits, order, failures, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
import torch

from services.inference.batch import Batch
from services.inference.engine import Engine
from services.inference.metrics import Metrics
from services.inference.model import load_model
from services.inference.sampling import SamplingParams
from services.inference.scheduler import Scheduler
from services.inference.sequence import Sequence
from tests.helpers import llm_reference
from tests.helpers.llm_servers import DEMO_MODEL, ROOT, free_port


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(DEMO_MODEL, None)


def sequence(listener, prompt=(1, 2, 3), max_tokens=10, priority=0):
    return Sequence(
        request_id="r",
        index=0,
        prompt_ids=list(prompt),
        params=SamplingParams(),
        max_tokens=max_tokens,
        listener=listener,
        priority=priority,
    )


def play(model, sequences, capacity=100_000, max_sequences=128, before=None):
    """Run sequences to their end; returns them in the order in which they ended."""

    async def main():
        events = asyncio.Queue()
        scheduler = Scheduler(Batch(model.module, capacity), max_sequences, capacity)
        engine = Engine(model, scheduler, Metrics("test", capacity), asyncio.get_running_loop())
        made = [sequence(events.put_nowait, **options) for options in sequences]
        if before:
            before(scheduler)
        engine.start()
        try:
            engine.submit(made)
            return [(await asyncio.wait_for(events.get(), 30)).sequence for _ in made], scheduler
        finally:
            engine.stop()
            assert not engine.alive

    return asyncio.run(main())


def test_sequences_wait_when_the_cache_has_no_room_for_their_whole_length(model):
    widest = []

    def watch(scheduler):
        original = scheduler.batch.decode

        def decode(ids):
            widest.append(len(ids))
            return original(ids)

        scheduler.batch.decode = decode

    # 100 tokens round up to 128 columns: 400 places hold three rows.
    ended, _ = play(model, [{"prompt": [5] * 60, "max_tokens": 40}] * 10, capacity=400, before=watch)
    assert max(widest) == 3
    assert {s.finish_reason for s in ended} == {"length"}
    for s in ended:
        expected = llm_reference.logprobs(DEMO_MODEL, s.prompt_ids, s.token_ids)
        assert s.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_batch_never_exceeds_max_num_seqs_and_priority_goes_first(model):
    options = [{"max_tokens": 5, "priority": p} for p in (3, 1, 2)]
    ended, _ = play(model, options, max_sequences=1)
    assert [s.priority for s in ended] == [1, 2, 3]


def test_a_failed_step_fails_its_requests_and_the_next_ones_are_served(model):
    calls = []

    def sabotage(scheduler):
        original = scheduler.batch.decode

        def decode(ids):
            calls.append(len(ids))
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return original(ids)

        scheduler.batch.decode = decode

    ended, scheduler = play(model, [{}] * 4, max_sequences=2, before=sabotage)
    assert [s.finish_reason for s in ended] == ["error", "error", "length", "length"]
    assert "out of memory" in ended[0].error
    for s in ended[2:]:
        expected = llm_reference.logprobs(DEMO_MODEL, s.prompt_ids, s.token_ids)
        assert s.logprobs == pytest.approx(expected, abs=1e-4)
    assert len(scheduler.batch) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "nowhere"], "nowhere has no config.json"),
        (["--model", str(DEMO_MODEL), "--max-model-len", "4096"], "--max-model-len 4096 is above"),
        (["--model", str(DEMO_MODEL), "--kv-cache-gib", "0.001"], "--kv-cache-gib 0.001 holds"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_what_to_do(options, words):
    command = [sys.executable, "-m", "services.inference", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_answers_running_requests_and_ends_the_process():
    port = free_port()
    command = [sys.executable, "-m", "services.inference", "--model", str(DEMO_MODEL), "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline, "not healthy after 60 s"
                time.sleep(0.1)

        async def ask():
            async with httpx.AsyncClient(timeout=30) as client:
                body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2000, "ignore_eos": True}}
                task = asyncio.create_task(
                    client.post(f"http://127.0.0.1:{port}/inference/v1/generate", json=body)
                )
                await asyncio.sleep(0.5)
                os.kill(process.pid, signal.SIGTERM)
                return (await task).json()

        choice = asyncio.run(ask())["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert choice["token_ids"]
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()
