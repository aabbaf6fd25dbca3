"""verl's servers as backends: the real gateway and worker, fake engines, and verl's own loop of steps."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional
from unittest.mock import MagicMock

import httpx
import pytest
from click.testing import CliRunner

from rollout.adapters.base import step_of
from rollout.cli import main
from rollout.client import ApiError, Unavailable
from rollout.integrations.verl import VerlServers
from rollout.schema import RolloutRequest
from tests.helpers.fake_engine import fake_engine
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import ROOT, Stack, free_port, wait_until
from tests.helpers.trainer_sources import classes, imported

SHORT = {"max_tokens": 200}
"""What is not said to be short fills the context: 17 s, at an engine's pace."""


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


@pytest.fixture(scope="module")
def other():
    """An engine that is none of verl's."""
    with fake_engine() as engine:
        yield engine


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
        [RolloutRequest(handler="digits", task={"digits": 20}, n=n, limits={"max_turns": 1}, sampling=SHORT)]
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


def test_what_a_killed_run_left_is_taken_over_and_what_is_gone_is_removed(client, engines, addresses, other):
    for number, engine in enumerate(engines):
        client.add_backend(engine.url, id=f"verl-{number + 1}")
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


def test_after_the_run_other_backends_take_rollouts_again(client, addresses, other):
    mine = client.add_backend(other.url)
    with VerlServers(client, addresses) as servers:
        servers.update(9)
        assert [step_of(version) for version in versions(client)] == [9], "of the trained weights alone"
    assert client.policy().current is None and versions(client) == {"default"}
    client.remove_backend(mine.id)


def test_a_killed_run_s_weights_are_wanted_until_an_operator_forgets_them(client, stack, addresses, other):
    forget = ["policy", "forget", "--url", stack.url]
    killed = VerlServers(client, addresses).__enter__()
    killed.update(10)
    refused = CliRunner().invoke(main, forget)
    assert refused.exit_code == 1
    assert re.search(r"verl-0, verl-1 serve the current\s+weights: update them", refused.stderr)
    for name in killed.backends:
        client.remove_backend(name)
    # Also a server of the run's that comes back without its weights.
    mine = client.add_backend(other.url)
    (early,) = client.submit(
        RolloutRequest(handler="digits", task={"digits": 20}, limits={"max_turns": 1}, sampling=SHORT)
    )
    wait_until(lambda: client.get(early.id).state == "running", 120, "it to look for a backend")
    time.sleep(1.0)
    assert client.get(early.id).backend is None and client.policy().current.version.endswith("-10")
    done = CliRunner().invoke(main, forget)
    assert done.stdout == "no weights are current: backends of any weights take rollouts\n"
    assert client.wait(early.id, 60).trajectory.policy_versions.count("default") > 0
    client.forget_policy()  # again
    client.remove_backend(mine.id)


def test_a_run_that_another_has_followed_leaves_the_other_s_weights(client, engines):
    with VerlServers(client, [engines[0].url], name="first") as first:
        first.update(1)
        with VerlServers(client, [engines[1].url], name="second") as second:
            label = second.update(1).version
            first.remove()
            assert client.policy().current.version == label
    assert client.policy().current is None


def test_a_run_that_fails_at_once_forgets_the_weights_of_a_killed_one_of_its_name(client, addresses):
    VerlServers(client, addresses).__enter__().update(3)
    with pytest.raises(KeyboardInterrupt), VerlServers(client, addresses):
        raise KeyboardInterrupt
    assert client.policy().current is None


def test_a_run_whose_server_is_refused_forgets_the_weights_of_a_killed_one(client, engines, addresses):
    """What that one left is removed first, so nobody else would."""
    VerlServers(client, addresses[:1]).__enter__().update(3)
    with pytest.raises(ApiError), VerlServers(client, [f"127.0.0.1:{free_port()}"]):
        pass
    assert client.policy().current is None


def test_a_run_that_ends_during_an_update_leaves_no_weights_wanted(client, addresses, other):
    """The update fails afterwards, and brings back the wish for those before it."""
    with VerlServers(client, addresses) as servers:
        before = servers.update(1).version
        client.update_policy(before[:-1] + "2", mode="abort", backends=servers.backends, wait=0)
    status = client.policy()
    assert status.update is None and status.current is None
    mine = client.add_backend(other.url)
    assert versions(client) == {"default"}
    client.remove_backend(mine.id)


def test_what_ended_a_run_is_not_hidden_by_its_end(client, addresses, monkeypatch, caplog):
    def away():
        raise Unavailable("away")

    with pytest.raises(KeyboardInterrupt), VerlServers(client, addresses) as servers:
        monkeypatch.setattr(client, "policy", away)
        raise KeyboardInterrupt
    assert "`rollout policy forget`: away" in caplog.text
    servers.remove()  # again


def test_weights_that_stay_after_a_run_are_told_with_the_remedy(client, engines, addresses, caplog):
    with VerlServers(client, addresses[:1]) as servers:
        version = servers.update(1).version
        other = client.add_backend(engines[1].url)
        client.update_policy(version, wait=60)
    assert re.search(rf"`rollout policy forget`: .*{other.id} serve the current weights", caplog.text)
    client.remove_backend(other.id)
    client.forget_policy()


def submitted(client) -> str:
    """Id of a rollout that has begun, on an engine that hangs."""
    (accepted,) = client.submit(RolloutRequest(handler="digits", task={"digits": 20}))
    wait_until(lambda: client.backend("verl-0").live_rollouts, 120, "a rollout to be placed")
    return accepted.id


def test_before_servers_sleep_their_rollouts_are_cancelled(client):
    with fake_engine() as engine, VerlServers(client, [engine.url]) as servers:
        servers.update(1)
        httpx.post(f"{engine.url}/fault", json={"kind": "hang"})
        rollout = submitted(client)
        servers.drain()
        assert client.backend("verl-0").live_rollouts == 0
        assert client.wait(rollout, 60).state == "cancelled"


def test_servers_that_cannot_be_emptied_are_named(client, monkeypatch):
    with fake_engine() as engine, VerlServers(client, [engine.url]) as servers:
        servers.update(1)
        httpx.post(f"{engine.url}/fault", json={"kind": "hang"})
        rollout = submitted(client)
        monkeypatch.setattr(servers, "_timeout_s", 0.3)
        monkeypatch.setattr(client, "cancel_many", lambda ids: None)
        with pytest.raises(RuntimeError, match=r"rollouts are still on verl-0 after 0.3 s: cancel them"):
            servers.drain()
        client.cancel(rollout)
        client.wait(rollout, 60)


def test_a_server_is_registered_as_one_that_takes_no_rollouts(client, engines):
    backend = client.add_backend(engines[0].url, drain=True)
    assert backend.draining
    client.drain_backend(backend.id, False)
    assert not client.add_backend(engines[0].url).draining, "described anew, it is as it was"
    client.remove_backend(backend.id)


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
        wait_until(lambda: client.policy().update is None, 120, "the update to end")


@pytest.fixture
def agent_loop(stack, monkeypatch):
    """Runs the example's agent loop on a row of so many digits; with verl's released class of outputs."""
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

    async def run(digits: int, **info):
        loop = plugin.__new__(plugin)
        loop._url, loop.rollout_config = stack.url, config
        info = {"handler": "digits", "task": {"digits": digits}, "limits": {"max_turns": 1}} | info
        info = {name: value for name, value in info.items() if value is not None}
        return await loop.run({"temperature": 1.0}, extra_info=info, uid="7d0c")

    return run, released.AgentLoopOutput


def test_verls_agent_loop_gives_a_row_or_leaves_the_rollout_out(client, addresses, agent_loop):
    run, output = agent_loop
    with VerlServers(client, addresses) as servers:
        servers.update(5)
        row = asyncio.run(run(20))
        assert isinstance(row, output) and row.reward_score == 0.5
        assert sum(row.response_mask) and len(row.response_ids) <= 32
        assert row.extra_fields["min_global_steps"] == row.extra_fields["max_global_steps"] == 5
        assert client.get(row.extra_fields["rollout_id"]).group_id == "7d0c"
        with pytest.raises(RuntimeError, match=r"rollout \S+ is left out: "):
            asyncio.run(run(40_000))
    with pytest.raises(ValueError, match="the service needs `handler` and `task`"):
        asyncio.run(run(20, handler=None))


def test_a_session_that_verl_gives_up_leaves_no_rollout_behind(client, agent_loop):
    run, _ = agent_loop

    async def given_up():
        session = asyncio.create_task(run(20))
        await asyncio.to_thread(
            wait_until, lambda: client.backend("verl-0").live_rollouts, 120, "a rollout to be placed"
        )
        session.cancel()
        await asyncio.wait([session])
        assert session.cancelled()

    with fake_engine() as engine, VerlServers(client, [engine.url]) as servers:
        servers.update(5)
        httpx.post(f"{engine.url}/fault", json={"kind": "hang"})
        asyncio.run(given_up())
        wait_until(lambda: client.backend("verl-0").live_rollouts == 0, 120, "the rollout to end")
        assert client.list(state="cancelled", limit=1).rollouts[0].group_id == "7d0c"


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
    labels, calls = [], []

    def seen_by(name):
        def call(*_):
            known = {
                httpx.get(f"http://{address}/weight_info").json()["weight_version"] for address in addresses
            }
            assert not any(backend.live_rollouts for backend in client.backends())
            calls.append((name, {b.draining for b in client.backends()}, {step_of(v) for v in known}))

        return call

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
    trainer.checkpoint_manager.update_weights.side_effect = seen_by("update")
    trainer.checkpoint_manager.sleep_replicas.side_effect = seen_by("sleep")
    trainer._reissue_inflight_prompts = MagicMock()
    trainer.global_steps, trainer.steps_per_epoch, trainer.total_training_steps = 7, 100, 100
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(MagicMock())
    config.data.train_batch_size, trainer._next_train_batch = 8, MagicMock()
    trainer._submit_batch_to_rollout = MagicMock()
    trainer._add_prompts_to_generate(8 * 4)
    with pytest.raises(RuntimeError, match="33 groups of this step have no rollout to learn from"):
        trainer._add_prompts_to_generate(1)
    assert trainer._submit_batch_to_rollout.call_count == 1
    assert labels == [[7], [8], [9]], "each step samples the weights of the one before"
    assert [one.args for one in trainer.checkpoint_manager.update_weights.call_args_list] == [
        (8,),
        (9,),
        (10,),
    ]
    # Drained before they sleep, labelled after the weights have come, and drained until then.
    steps = [(name, {True}, {step}) for step in (7, 8, 9) for name in ("sleep", "update")]
    assert calls == steps


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
