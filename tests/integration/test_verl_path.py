"""The path of docs/guides/swe-qwen3-8b-verl.md on a CPU: the demo model is trained from a file of tasks, by
verl's own agent-loop class, with engines that are registered and labelled by code."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import httpx
import pytest

from examples.demo_model.task import make_tasks
from rollout.datasets import read
from rollout.integrations.verl import VerlServers
from rollout.planning import model_of, plan
from tests.helpers.lazy import Lazy
from tests.helpers.llm_servers import DEMO_MODEL, embedded_server
from tests.helpers.long_forms import TRAINING
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack
from tests.helpers.trainer_sources import classes, imported

torch, transformers = Lazy("torch"), Lazy("transformers")

STEPS, TASKS, N = 3, 4, 4
NODE = {"gpus": 1, "gpu_gb": 8, "share": 0.6, "cores": 2, "memory_gb": 32}
MAX_GAP = 1e-3
"""Nats between the engine's log-probs and the trainer's, both in float32."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            with Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir)) as stack:
                stack.start_workers({stage: stage for stage in ("init", "run", "eval")})
                yield stack
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture
def agent_loop(monkeypatch):
    """examples/verl's loop upon verl's own base class and output; what needs Ray is stood in for."""
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    path = "verl/experimental/agent_loop/agent_loop.py"
    stand_ins = {name: MagicMock() for name in imported(path)}
    stand_ins |= {"ABC": object, "abstractmethod": lambda decorated: decorated}
    for kept in ("Any", "Optional", "BaseModel", "torch"):
        stand_ins.pop(kept)
    names = ["AgentLoopMetrics", "AgentLoopOutput", "AgentLoopBase", "DictConfigWrap", "ToolListWrap"]
    monkeypatch.setitem(
        sys.modules, "verl.experimental.agent_loop.agent_loop", classes(path, names, **stand_ins)
    )
    root = Path(__file__).resolve().parents[2]
    return runpy.run_path(str(root / "examples" / "verl" / "agent_loop.py"))["ServiceAgentLoop"]


def parquet(stack, directory: Path) -> Path:
    """Made by the command of the guide, with the service's schema of the handler."""
    rows, path = directory / "rows.jsonl", directory / "train.parquet"
    rows.write_text("".join(json.dumps(task) + "\n" for task in make_tasks(TASKS * STEPS, seed=3)))
    argv = [sys.executable, "-m", "rollout.cli", "tasks", "convert", str(rows), "--handler", "calculator"]
    argv += ["--verl", str(path), "--limits", '{"max_turns": 4}']
    done = subprocess.run(
        argv, env=os.environ | {"ROLLOUT_URL": stack.url}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and f"{TASKS * STEPS} tasks fit" in done.stderr, done.stderr
    return path


def own_logprobs(model, row):
    """The trainer's log-probs of a row's response."""
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    table = torch.log_softmax(model(input_ids=ids[:, :-1]).logits.float(), dim=-1)
    return table.gather(-1, ids[:, 1:, None]).flatten()[len(row.prompt_ids) - 1 :]


@TRAINING.only
def test_the_guide_s_path_trains_the_demo_model_with_each_step_s_weights_under_its_label(
    stack, agent_loop, tmp_path
):
    result = plan(model_of(str(DEMO_MODEL)), **NODE, tasks=TASKS, n=N, images=0, unpacked_gb=0)
    assert result["slots"]["run"] >= 1
    rows = [row.data for row in read(parquet(stack, tmp_path))]
    config = SimpleNamespace(prompt_length=512, response_length=1024)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    async def group(row):
        """As verl runs a row `rollout.n` times; those that are left out raise."""
        loops = [agent_loop.__new__(agent_loop) for _ in range(N)]
        for loop in loops:
            loop._url, loop.rollout_config = stack.url, config
        info = {"extra_info": row["extra_info"], "uid": f"uid-{row['extra_info']['index']}"}
        made = await asyncio.gather(
            *(loop.run({"temperature": 1.0}, **info) for loop in loops), return_exceptions=True
        )
        return [one for one in made if not isinstance(one, BaseException)]

    async def sample(part):
        return await asyncio.gather(*map(group, part))

    gaps, rewards = [], []
    with (
        embedded_server() as engine,
        VerlServers(stack.client, [engine.url.removeprefix("http://")]) as servers,
    ):
        servers.update(0)
        for step in range(STEPS):
            groups = asyncio.run(sample(rows[TASKS * step : TASKS * (step + 1)]))
            servers.drain()
            made = [row for group in groups for row in group]
            assert len(made) == TASKS * N, "the service left rollouts out"
            losses = []
            for members in groups:
                mean = sum(row.reward_score for row in members) / len(members)
                for row in members:
                    versions = {row.extra_fields[name] for name in ("min_global_steps", "max_global_steps")}
                    assert versions == {step}
                    mine, mask = own_logprobs(model, row), torch.tensor(row.response_mask)
                    gaps.append(((mine.detach() - torch.tensor(row.response_logprobs)) * mask).abs().max())
                    losses.append(-((row.reward_score - mean) * mine * mask).sum() / mask.sum())
            rewards.append(sum(row.reward_score for row in made) / len(made))
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # As verl does, the weights come to the engine past the service, which then labels them.
            path = tmp_path / f"step-{step + 1}"
            model.save_pretrained(path)
            transformers.AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(path)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            httpx.post(f"{engine.url}/collective_rpc", json=body, timeout=240).raise_for_status()
            servers.update(step + 1)
    assert max(gaps) < MAX_GAP, "weights and labels are not in step"
    assert len(set(rewards)) > 1 and max(rewards) > 0, rewards
    assert stack.client.backends() == []
