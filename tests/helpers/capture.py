"""A whole service with capture, the scripted agent model behind it, and what its tests ask of both."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx

from rollout.schema import Agent, Rollout, RolloutRequest
from rollout.trajectory import Chain
from services.state import keys
from services.state.backends.store import BackendStore
from services.state.capture.store import CaptureStore
from tests.helpers import published
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Process, Stack, free_port, healthy, wait_until


@dataclass
class CaptureWorld:
    stack: Stack
    engine: str
    capture_url: str
    engine_process: Process
    engine_argv: list[str]
    captures: list[Process]
    capture_argv: list[str]
    factor: float = 1.0

    def submit(self, task: dict[str, Any] | None = None, **more: Any) -> tuple[str, Any]:
        """An external rollout, and what its program is given."""
        request = RolloutRequest(
            handler="calculator",
            task=task or {"question": "1 plus 1", "answer": "2"},
            agent=Agent(harness="external"),
            **more,
        )
        (submitted,) = self.stack.client.submit(request)
        return submitted.id, submitted.agent

    def reward(self, access: Any, value: float) -> httpx.Response:
        headers = {"Authorization": f"Bearer {access.reward_key}"}
        return httpx.post(f"{access.base_url}/v1/reward", json={"reward": value}, headers=headers)

    def finish(self, access: Any) -> None:
        """The program is done, and leaves the score to the handler."""
        headers = {"Authorization": f"Bearer {access.reward_key}"}
        httpx.post(f"{access.base_url}/v1/finish", headers=headers).raise_for_status()

    @contextmanager
    def slow_engine(self, factor: float = 500.0) -> Iterator[None]:
        """An engine that takes seconds for a turn."""
        self.slow(factor)
        try:
            yield
        finally:
            self.slow(1.0)

    def of(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The engine's calls of a rollout's sampled turns."""
        mine = {s.call_id for chain in rollout.trajectory.chains for s in chain.segments if s.sampled}
        return [call for call in self.calls() if call["call_id"] in mine]

    def kill_capture(self, number: int) -> None:
        """SIGKILL to one of the processes, and another one in its place."""
        old = self.captures[number]
        old.kill()
        self.captures[number] = self.stack.start(old.name, self.capture_argv)

    def kill_engine(self) -> None:
        """SIGKILL to the engine, and another one in its place, which is as slow."""
        self.engine_process.kill()
        argv = self.engine_argv
        self.engine_process = self.stack.start("engine", argv)
        wait_until(lambda: healthy(self.engine), 60, "the engine", self.engine_process)
        self.slow(self.factor)

    def cut_next_answer(self, tokens: int) -> None:
        """The engine's connection to capture closes in the next stream, behind so many ids."""
        httpx.post(f"{self.engine}/fault", json={"kind": "cut", "tokens": tokens, "calls": 1})

    def await_calls(self, rollout_id: str, count: int, begun: bool = False) -> None:
        """Until so many calls of the rollout's first attempt were answered, or have begun."""
        store = CaptureStore(self.stack.redis.client)

        def reached() -> bool:
            summary = store.summary(rollout_id, 1)
            return summary is not None and (summary.calls if begun else summary.nodes) >= count

        wait_until(reached, 60, f"{count} calls of {rollout_id}")

    def await_departure(self, rollout_id: str) -> None:
        """Until it is known that the program waits for none of the answers to its first attempt's calls."""
        name = keys.capture_calls(rollout_id, 1)

        def known() -> bool:
            entries = self.stack.redis.client.hgetall(name)
            words = [entry.split()[1] for key, entry in entries.items() if key.startswith("call:")]
            return bool(words) and "begun" not in words

        wait_until(known, 60, f"the program of {rollout_id} to be missed")

    def replace_run_worker(self, stop: bool = False) -> None:
        """SIGKILL (`stop`: SIGTERM) to the worker of RUN, and another one in its place."""
        old = next(process for process in self.stack.processes if process.name.startswith("run"))
        old.stop() if stop else old.kill()
        self.stack.processes.remove(old)
        self.stack.start_worker("run", f"{old.name}x")

    def know_version(self, version: str) -> None:
        """The service has taken the engine's new weights over."""
        store = BackendStore(self.stack.redis.client)
        for backend in store.list():
            store.set_version(backend.id, version)

    def slow(self, factor: float) -> None:
        """How many times as long each token takes."""
        self.factor = factor
        httpx.post(f"{self.engine}/fault", json={"kind": "slow", "factor": factor})

    def sampled_tokens(self) -> float:
        """All that the engine has sampled so far."""
        lines = httpx.get(f"{self.engine}/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith("vllm:generation_tokens_total"))
        return float(line.rsplit(" ", 1)[1])

    def ended(self, rollout_id: str, timeout_s: float = 60) -> Rollout:
        rollout = self.stack.client.wait(rollout_id, timeout=timeout_s)
        return self.stack.client.get(rollout.id)

    def calls(self) -> list[dict[str, Any]]:
        """What the engine was asked, and said."""
        return httpx.get(f"{self.engine}/calls", timeout=60).json()

    def hold_prompts(self, rollout: Rollout) -> int:
        """Every sampled call of the trajectory had exactly the ids before it as its prompt; how many."""
        asked = {call["call_id"]: call for call in self.calls() if call["state"] == "done"}
        held, told = set(), {call.id: call for call in rollout.trajectory.calls}
        for chain in rollout.trajectory.chains:
            for call_id, prompt, sampled in _calls(chain):
                assert asked[call_id]["prompt_ids"] == prompt
                assert asked[call_id]["token_ids"] == sampled
                assert told[call_id].prompt_tokens == len(prompt) and told[call_id].seconds > 0
                held.add(call_id)
        assert len(held) == rollout.trajectory.receipt.calls
        return len(held)


GATE = f"sleep 600.{os.getpid()}"
"""A step of a plan behind which a program in a sandbox comes only while the `gate_is_open`."""


@contextmanager
def gate_is_open() -> Iterator[None]:
    """Meanwhile each `GATE` is ended as soon as it is there: no machine is too slow or too fast for it."""
    closing, words = Event(), [word.encode() for word in GATE.split()]

    def end_all() -> None:
        while not closing.wait(0.1):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    if file.read_bytes().split(b"\0")[:-1] == words:
                        os.kill(int(file.parent.name), signal.SIGTERM)

    ending = Thread(target=end_all)
    ending.start()
    try:
        yield
    finally:
        closing.set()
        ending.join()


def _calls(chain: Chain) -> Iterator[tuple[str, list[int], list[int]]]:
    before: list[int] = []
    for number, segment in enumerate(chain.segments):
        if segment.sampled:
            same = [s for s in chain.segments[number:] if s.sampled and s.call_id == segment.call_id]
            first = number == 0 or chain.segments[number - 1].call_id != segment.call_id
            if first:
                yield segment.call_id, list(before), [token for s in same for token in s.token_ids]
        before += segment.token_ids


@contextmanager
def capture_world(directory: Path, processes: int = 1, **engine: Any) -> Iterator[CaptureWorld]:
    """Gateway, fleets, so many capture processes on one port, and an engine that follows plans.

    `engine`: options of the fake one.
    """
    tokenizer = published.directory("Qwen3", directory)
    port, engine_port = free_port(), free_port()
    url, engine_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{engine_port}"
    options = {"script": "tests.helpers.agent_script:turn", "tokenizer": tokenizer, "max_model_len": 40960}
    options |= {"vocab_size": 151936, "step_ms": 0.1, "port": engine_port, **engine}
    flags = [str(part) for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    engine_argv = [sys.executable, "-m", "tests.helpers.fake_engine", "--keep", *flags]
    capture_argv = [sys.executable, "-m", "services.capture", "--port", str(port)]
    env = {"ROLLOUT_CAPTURE_URL": url, "ROLLOUT_LEASE_S": "10", "AGENT_TOKENIZER": str(tokenizer)}
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as sandbox_dir:
        try:
            with Stack(directory, Path(sandbox_dir), env) as stack:
                process = stack.start("engine", engine_argv)
                captures = [stack.start(f"capture{number}", capture_argv) for number in range(processes)]
                stack.start_workers({stage: stage for stage in ("init", "run", "eval")})
                wait_until(lambda: healthy(engine_url), 60, "the engine", process)
                stack.client.add_backend(engine_url)
                wait_until(lambda: healthy(url), 60, "capture", captures[0])
                yield CaptureWorld(stack, engine_url, url, process, engine_argv, captures, capture_argv)
        finally:
            stop_host(Path(sandbox_dir))
