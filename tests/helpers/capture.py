"""A whole service with capture, the scripted agent model behind it, and what its tests ask of both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollout.schema import Agent, Rollout, RolloutRequest
from rollout.trajectory import Chain
from tests.helpers import published
from tests.helpers.fake_engine import fake_engine
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Process, Stack, free_port, healthy, wait_until


@dataclass
class CaptureWorld:
    stack: Stack
    engine: str
    captures: list[Process]
    capture_url: str

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
        httpx.post(f"{self.engine}/fault", json={"kind": "slow", "factor": factor})
        try:
            yield
        finally:
            httpx.post(f"{self.engine}/fault", json={"kind": "slow", "factor": 1.0})

    def of(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The engine's calls of a rollout's sampled turns."""
        mine = {s.call_id for chain in rollout.trajectory.chains for s in chain.segments if s.sampled}
        return [call for call in self.calls() if call["call_id"] in mine]

    def ended(self, rollout_id: str, timeout_s: float = 60) -> Rollout:
        rollout = self.stack.client.wait(rollout_id, timeout=timeout_s)
        return self.stack.client.get(rollout.id)

    def calls(self) -> list[dict[str, Any]]:
        """What the engine was asked, and said."""
        return httpx.get(f"{self.engine}/calls").json()

    def hold_prompts(self, rollout: Rollout) -> int:
        """Every sampled call of the trajectory had exactly the ids before it as its prompt; how many."""
        asked = {call["call_id"]: call for call in self.calls() if call["state"] == "done"}
        held = set()
        for chain in rollout.trajectory.chains:
            for call_id, prompt, sampled in _calls(chain):
                assert asked[call_id]["prompt_ids"] == prompt
                assert asked[call_id]["token_ids"] == sampled
                held.add(call_id)
        assert len(held) == rollout.trajectory.receipt.calls
        return len(held)


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
    """Gateway, fleets, so many capture processes on one port, and an engine that follows plans."""
    tokenizer = published.directory("Qwen3", directory)
    os.environ["AGENT_TOKENIZER"] = str(tokenizer)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {"script": "tests.helpers.agent_script:turn", "tokenizer": tokenizer, "max_model_len": 40960}
    options |= {"vocab_size": 151936, "step_ms": 0.1, "keep": True, **engine}
    with (
        tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as sandbox_dir,
        fake_engine(**options) as server,
    ):
        env = {"ROLLOUT_CAPTURE_URL": url, "ROLLOUT_LEASE_S": "10"}
        try:
            with Stack(directory, Path(sandbox_dir), env) as stack:
                argv = [os.sys.executable, "-m", "services.capture", "--port", str(port)]
                captures = [stack.start(f"capture{number}", argv) for number in range(processes)]
                stack.start_workers({stage: stage for stage in ("init", "run", "eval")})
                stack.client.add_backend(server.url)
                wait_until(lambda: healthy(url), 60, "capture", captures[0])
                yield CaptureWorld(stack, server.url, captures, url)
        finally:
            stop_host(Path(sandbox_dir))
