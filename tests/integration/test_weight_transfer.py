"""A trainer's process sends weights to vLLM through the whole service, by vLLM's own engines on both sides.

There is no GPU, so the broadcast goes through a TCP store and not NCCL. All else is what runs with one:
see tests/helpers/transfer_without_gpu.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from rollout.schema import RolloutRequest, State
from tests.helpers import llm_reference
from tests.helpers.checkpoints import canary, endless_copy
from tests.helpers.llm_servers import ROOT, VLLM_HOME, vllm_missing, vllm_server
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, free_port, wait_until

DEAD = 9
"""Exit code of a trainer that dies half-way."""

pytestmark = pytest.mark.vllm
PATIENCE_S = 240
TOKENS = 1500
"""Of a call that shall still run when weights change: seconds."""


class World:
    """A service with one engine, `it`, and trainers that come and go."""

    def __init__(self, stack: Stack, url: str, directory: Path) -> None:
        self.stack, self.client, self.url = stack, stack.client, url
        self.old, self.new, self.newest = (directory / name for name in ("old", "new", "newest"))

    def trainer(self, path: Path, version: str, connected: str, **plan) -> subprocess.Popen[str]:
        """A trainer's process, which connects and sends once."""
        plan |= {"url": self.stack.url, "backend": "it", "port": free_port(), "path": str(path)}
        plan |= {"version": version, "connected": connected, "canary": canary(path), "timeout_s": PATIENCE_S}
        return subprocess.Popen(
            [VLLM_HOME / "bin" / "python", "-m", "tests.helpers.transfer_without_gpu", json.dumps(plan)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self, trainer: subprocess.Popen[str]) -> dict:
        """Have a trainer send; what it says that came of its updates, once it has ended."""
        lines, errors = trainer.communicate("send\n", timeout=PATIENCE_S)
        said = [json.loads(line) for line in lines.splitlines() if line.startswith('{"')]
        return {"code": trainer.returncode, "errors": errors[-3000:]} | {
            k: v for x in said for k, v in x.items()
        }

    def engine(self, route: str) -> dict:
        return httpx.get(self.url + route, timeout=PATIENCE_S).json()

    def submit(self, count: int) -> list[str]:
        request = RolloutRequest(
            handler="digits",
            task={"digits": 5},
            n=count,
            sampling={"max_tokens": TOKENS, "seed": 1},
            limits={"max_turns": 1},
        )
        return [rollout.id for rollout in self.client.submit(request)]

    def generated(self) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:generation_tokens_total"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    if reason := vllm_missing():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("transfer")
    for name, scale in (("old", 0.0), ("new", 0.05), ("newest", 0.1)):
        endless_copy(directory / name, scale=scale)
    options = {
        "weight_transfer_config": json.dumps({"backend": "nccl"}),
        "worker_extension_cls": "tests.helpers.transfer_without_gpu.Extension",
    }
    with ExitStack() as exits, tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        exits.callback(stop_host, Path(sandbox_dir))
        server = exits.enter_context(vllm_server(directory / "old", **options))
        stack = exits.enter_context(Stack(directory, Path(sandbox_dir), {"ROLLOUT_BACKEND_PROBE_S": "0.5"}))
        stack.start_worker("init,run,eval")
        stack.client.add_backend(server.url, id="it")
        yield World(stack, server.url, directory)


def test_a_trainer_connects_and_sends_while_rollouts_run_and_every_token_has_its_version(world):
    trainer = world.trainer(world.new, "step-1", connected="step-0")
    wait_until(
        lambda: world.engine("/weight_info") == {"weight_version": "step-0"}, PATIENCE_S, "it to connect"
    )
    # The engine is labelled before the update's end is written.
    wait_until(lambda: world.client.policy().current is not None, PATIENCE_S, "the end of the update")
    assert world.client.policy().current.version == "step-0"
    ids = world.submit(4)
    before = world.generated()
    wait_until(lambda: world.generated() > before + 40, PATIENCE_S, "the rollouts to sample")
    told = world.told(trainer)
    assert told["code"] == 0, told
    sent = told["sent"]
    assert (sent["state"], sent["transfer"], sent["path"], sent["verified"]) == ("done", "nccl", None, True)
    assert sent["backends"]["it"]["canary_max_error"] < 1e-3
    rollouts = list(world.client.stream(ids, timeout=PATIENCE_S))
    assert [(rollout.state, rollout.attempt) for rollout in rollouts] == [(State.COMPLETED, 1)] * 4
    for rollout in rollouts:
        chain = rollout.trajectory.chain
        assert chain.policy_versions == sorted(chain.policy_versions)
        switch = chain.policy_versions.index("step-1")
        recorded, by_old = llm_reference.chain_logprobs(chain, world.old)
        errors = [abs(ours - reference) for ours, reference in zip(recorded, by_old, strict=True)]
        assert switch and max(errors[:switch]) < 1e-3
        assert sum(error > 1e-3 for error in errors[switch:]) > 0.9 * len(errors[switch:])


def test_half_a_sending_leaves_the_engine_paused_until_a_trainer_sends_all(world):
    current = world.client.policy().current
    before = current.version if current else "step-0"
    told = world.told(world.trainer(world.newest, "half", connected=before, dies=True))
    assert told["code"] == DEAD and "sent" not in told, told
    latest = world.client.policy().history[0]
    update = world.client.policy_update(latest.id, wait=60)
    assert (update.version, update.state) == ("half", "failed"), update
    backend = world.client.backend("it")
    assert (backend.healthy, backend.policy_version) == (False, before)
    assert world.engine("/is_paused") == {"is_paused": True}

    generated = world.generated()
    trainer = world.trainer(world.newest, "whole", connected=before)
    connected = json.loads(next(line for line in trainer.stdout if line.startswith('{"')))["connected"]
    assert connected["backends"]["it"]["state"] == "skipped", connected
    assert world.engine("/is_paused") == {"is_paused": True}, "half of them may still be in it"
    assert world.generated() == generated
    told = world.told(trainer)
    assert told["code"] == 0, told
    assert told["sent"]["backends"]["it"]["canary_max_error"] < 1e-3
    backend = world.client.backend("it")
    assert (backend.healthy, backend.policy_version) == (True, "whole")
