"""verl's servers as backends: the real gateway and worker, fake engines, and verl's own loop of steps."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional
from unittest.mock import MagicMock

import httpx
import pytest

from rollout.adapters.base import step_of
from rollout.client import ApiError
from rollout.integrations.verl import VerlServers
from rollout.schema import RolloutRequest
from tests.helpers.fake_engine import fake_engine
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import ROOT, Stack, free_port, wait_until
from tests.helpers.trainer_sources import classes, imported


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """A gateway and one worker of all stages."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            with Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir)) as stack:
                stack.start_worker("init,run,eval", "all")
                yield stack
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture(scope="module")
def engines():
    with fake_engine() as first, fake_engine() as second:
        yield first, second


@pytest.fixture
def addresses(engines):
    """As verl has them."""
    return [engine.url.removeprefix("http://") for engine in engines]


@pytest.fixture
def client(stack):
    yield stack.client
    assert stack.client.backends() == [], "a run leaves no backend"


def versions(client, n=4) -> set[str]:
    """What new rollouts are labelled with."""
    rollouts = client.run(
        [RolloutRequest(handler="digits", task={"digits": 20}, n=n, limits={"max_turns": 1})]
    )
    assert all(rollout.reward == 0.5 for rollout in rollouts), rollouts
    return {v for one in rollouts for v in one.trajectory.policy_versions if v is not None}


def test_servers_are_backends_while_verl_trains_and_tokens_carry_the_step(client, engines, addresses):
    with VerlServers(client, addresses) as servers:
        assert servers.backends == ["verl-0", "verl-1"]
        # Until they are labelled nothing is sampled from them.
        assert all(client.backend(name).draining for name in servers.backends)
        for step in (0, 1):
            update = servers.update(step)
            assert [step_of(version) for version in versions(client)] == [step]
            labels = [httpx.get(f"{engine.url}/weight_info").json()["weight_version"] for engine in engines]
            assert labels == [update.version] * 2
            servers.drain()
            assert all(client.backend(name).draining for name in servers.backends)
        again = VerlServers(client, addresses)
        with again:
            assert again.update(1).version != update.version, "a run begun anew has labels of its own"
            assert len(versions(client)) == 1


def test_what_a_killed_run_left_is_taken_over_and_what_is_gone_is_removed(client, engines, addresses):
    for number, engine in enumerate(engines):
        client.add_backend(engine.url, id=f"verl-{number + 1}")
    with fake_engine() as other:
        mine = client.add_backend(other.url, id="verl-judge")
        with VerlServers(client, addresses) as servers:
            assert {b.id: b.url for b in client.backends()} == {
                "verl-0": engines[0].url,
                "verl-1": engines[1].url,
                mine.id: mine.url,
            }
            servers.update(3)
            servers.register(addresses[1:])
            assert servers.backends == ["verl-0"] and client.backend("verl-0").url == engines[1].url
            servers.update(4)
            assert [step_of(version) for version in versions(client)] == [4]
            client.remove_backend("verl-0")  # by an operator: the end of the run is still orderly
        assert [backend.id for backend in client.backends()] == [mine.id], "another's backend is let alone"
        client.remove_backend(mine.id)


def test_a_server_that_does_not_answer_ends_the_run_before_it_begins(client, addresses):
    with pytest.raises(ApiError, match="does not answer as an LLM server"):
        VerlServers(client, [addresses[0], f"127.0.0.1:{free_port()}"]).__enter__()


def test_a_server_that_does_not_take_the_label_is_named(client, addresses):
    with fake_engine() as dying, VerlServers(client, [*addresses, dying.url]) as servers:
        servers.update(0)
        httpx.post(f"{dying.url}/fault", json={"kind": "die"})
        with pytest.raises(httpx.HTTPError):
            body = {"token_ids": [20], "sampling_params": {"max_tokens": 2}}
            httpx.post(f"{dying.url}/inference/v1/generate", json=body)
        with pytest.raises(RuntimeError, match=r"did not reach all servers \(partly\): verl-2: .*DEV_MODE"):
            servers.update(1)


def test_without_a_worker_that_brings_labels_the_step_says_so(client, stack, addresses):
    (worker,) = (process for process in stack.processes if process.name == "all")
    with VerlServers(client, addresses, timeout_s=0.5) as servers:
        os.killpg(worker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RuntimeError, match=r"is queued after 0.5 s: see `rollout status` for RUN"):
                servers.update(1)
        finally:
            os.killpg(worker.pid, signal.SIGCONT)
        wait_until(lambda: client.policy().update is None, 60, "the update to end")


def test_verls_agent_loop_gives_a_row_or_leaves_the_rollout_out(client, stack, addresses, monkeypatch):
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    path = "verl/experimental/agent_loop/agent_loop.py"
    stand_ins = {name: MagicMock() for name in imported(path)} | {"ABC": object, "abstractmethod": _as_it_is}
    for kept in ("Any", "Optional", "BaseModel", "torch"):
        stand_ins.pop(kept)
    names = ["AgentLoopMetrics", "AgentLoopOutput", "AgentLoopBase", "DictConfigWrap", "ToolListWrap"]
    released = classes(path, names, **stand_ins)
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", released)
    plugin = runpy.run_path(str(ROOT / "examples" / "verl" / "agent_loop.py"))["ServiceAgentLoop"]
    config = SimpleNamespace(prompt_length=64, response_length=32)

    def run(digits: int, **info):
        loop = plugin.__new__(plugin)
        loop._url, loop.rollout_config = stack.url, config
        info = {"handler": "digits", "task": {"digits": digits}, "limits": {"max_turns": 1}} | info
        return asyncio.run(loop.run({"temperature": 1.0}, extra_info=info, uid="7d0c"))

    with VerlServers(client, addresses) as servers:
        servers.update(5)
        row = run(20)
        assert isinstance(row, released.AgentLoopOutput) and row.reward_score == 0.5
        assert sum(row.response_mask) and len(row.response_ids) <= 32
        assert row.extra_fields["min_global_steps"] == row.extra_fields["max_global_steps"] == 5
        assert client.get(row.extra_fields["rollout_id"]).group_id == "7d0c"
        with pytest.raises(RuntimeError, match=r"rollout \S+ is left out: "):
            run(40_000)
    with pytest.raises(ValueError, match="the service needs `handler` and `task`"):
        asyncio.run(plugin.__new__(plugin).run({}, extra_info={"task": {}}))


def _as_it_is(decorated):
    return decorated


def test_verls_own_loop_of_steps_keeps_the_service_in_step(client, stack, addresses, monkeypatch):
    """Its trainers' and its server manager's classes, with the plug-in; what needs GPUs is stood in for."""
    monkeypatch.setenv("ROLLOUT_URL", stack.url)
    v1 = "verl.trainer.ppo.v1"
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", v1):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base = "verl/trainer/ppo/v1/trainer_base.py"
    names = ["PPOTrainer", "TRAINER_REGISTRY", "register_trainer", "get_trainer_cls"]
    stand_ins = {name: MagicMock() for name in imported(base)}
    base = classes(
        base, names, **stand_ins | {"ABC": object, "abstractmethod": _as_it_is, "Optional": Optional}
    )
    monkeypatch.setitem(sys.modules, f"{v1}.trainer_base", base)
    uses = {name: getattr(base, name) for name in ("PPOTrainer", "register_trainer", "marked_timer")}
    sync = classes("verl/trainer/ppo/v1/trainer_sync.py", ["PPOTrainerSync"], **uses)
    monkeypatch.setitem(sys.modules, f"{v1}.trainer_sync", sync)
    server = "verl/workers/rollout/llm_server.py"
    stand_ins = {name: MagicMock() for name in imported(server)} | {"auto_await": _as_it_is}
    servers = classes(server, ["LLMServerManager"], **stand_ins, LLMServerClient=object)
    runpy.run_path(str(ROOT / "examples" / "verl" / "trainer.py"))
    config = MagicMock()
    config.trainer.get = lambda name, default=None: False if name == "val_before_train" else default
    config.trainer.total_epochs, config.trainer.save_freq, config.trainer.test_freq = 1, -1, -1
    config.actor_rollout_ref.rollout.logprobs_mode = "processed_logprobs"
    config.global_profiler.steps = None
    labels = []

    class Steps(base.get_trainer_cls("rollout_service")):
        def step(self, metrics, timing):
            labels.append([step_of(version) for version in versions(client)])
            self.on_sample_end()
            assert [backend.draining for backend in client.backends()] == [True, True]
            return MagicMock()

        def _compute_metrics(self, *args, **kwargs):
            if len(labels) == 3:
                raise KeyboardInterrupt

    trainer = Steps(config)
    assert trainer.trainer_mode == "sync"
    trainer.llm_server_manager = object.__new__(servers.LLMServerManager)
    trainer.llm_server_manager.server_addresses = addresses
    trainer.checkpoint_manager, trainer._shutdown_dump_executor = MagicMock(), MagicMock()
    trainer._reissue_inflight_prompts = MagicMock()
    trainer.global_steps, trainer.steps_per_epoch, trainer.total_training_steps = 7, 100, 100
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(MagicMock())
    assert labels == [[7], [8], [9]], "each step samples the weights of the one before"
    assert [one.args for one in trainer.checkpoint_manager.update_weights.call_args_list] == [
        (8,),
        (9,),
        (10,),
    ]


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ([], "is no list of servers"),
        ("10.0.0.7:8000", "is no list of servers"),
        (["10.0.0.7"], "'10.0.0.7' is not host:port"),
        (["10.0.0.7:80000"], "is not host:port"),
        ([None], "address None is not host:port"),
        (["[::1]:8000", "http://[::1]:8000"], "is there twice"),
    ],
)
def test_addresses_that_are_none_are_refused_by_name(stack, addresses, problem):
    with pytest.raises(ValueError, match=problem):
        VerlServers(stack.client, addresses)


@pytest.mark.parametrize("step", [-1, 1.0, True, "step-1"])
def test_a_step_is_a_whole_number(stack, addresses, step):
    with pytest.raises(ValueError, match="give verl's global_steps"):
        VerlServers(stack.client, addresses).update(step)
