"""Weight updates through the whole service: gateway, two workers, two real engines, real checkpoints."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from rollout.cli import main
from rollout.client import ApiError
from rollout.policy import Canary, PolicyUpdate
from rollout.schema import Backend, Rollout, RolloutRequest, State
from services.state.backends.store import BackendStore
from tests.helpers import llm_reference
from tests.helpers.checkpoints import canary, endless_copy
from tests.helpers.keys import http
from tests.helpers.llm_servers import LLMServer, embedded_server
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Process, Stack, free_port, wait_until

PATIENCE_S = 120
"""For what takes a second or two on an idle machine."""
TOKENS = 400
"""Of a call that shall still run when weights change: seconds."""
ROLLOUTS = 64


@dataclass
class Fleet:
    """A stack whose two backends sample without end."""

    stack: Stack
    workers: dict[str, Process]
    engines: dict[str, LLMServer]
    old: Path
    new: Path

    @property
    def client(self):
        return self.stack.client

    def backend(self, name: str) -> Backend:
        return self.client.backend(name)

    def update(self, version: str, path: Path | None = None, **options) -> PolicyUpdate:
        update = self.client.update_policy(version, path and str(path), **{"wait": PATIENCE_S, **options})
        assert update.state.ended, update
        return update

    def canary(self, path: Path, shift: float = 0.0) -> Canary:
        fields = canary(path)
        return Canary(**{**fields, "logprobs": [value + shift for value in fields["logprobs"]]})

    def ask(self, name: str, route: str, **query) -> dict:
        return httpx.get(self.engines[name].url + route, params=query, timeout=240).json()

    def tell(self, name: str, route: str, body: dict | None = None, **query) -> None:
        answer = httpx.post(self.engines[name].url + route, json=body, params=query, timeout=240)
        answer.raise_for_status()

    def calls(self, gauge: str) -> int:
        """Calls `running` or `waiting`, over all engines."""
        total = 0.0
        for server in self.engines.values():
            lines = httpx.get(server.url + "/metrics", timeout=240).text.splitlines()
            total += sum(float(x.split()[-1]) for x in lines if x.startswith(f"vllm:num_requests_{gauge}"))
        return int(total)

    def submit(self, count: int, tokens: int) -> list[str]:
        request = RolloutRequest(
            handler="digits",
            task={"digits": 5},
            n=count,
            sampling={"max_tokens": tokens, "seed": 1},
            limits={"max_turns": 1},
        )
        return [rollout.id for rollout in self.client.submit(request)]

    def results(self, ids: list[str]) -> list[Rollout]:
        return list(self.client.stream(ids, timeout=PATIENCE_S))

    def check_settled(self, version: str) -> None:
        """Both engines run and serve `version`, and both take rollouts."""
        for name in self.engines:
            assert self.ask(name, "/is_paused") == {"is_paused": False}
            assert self.ask(name, "/weight_info") == {"weight_version": version}
            backend = self.backend(name)
            assert (backend.healthy, backend.paused, backend.policy_version) == (True, False, version)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Two workers of all stages and two engines, named a and b."""
    directory = tmp_path_factory.mktemp("policy")
    old, new = endless_copy(directory / "old"), endless_copy(directory / "new", scale=0.05)
    with ExitStack() as exits, tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        exits.callback(stop_host, Path(sandbox_dir))
        # Attempts are counted, and one worker may stand still beside the other for a stack's usual 3 s.
        env = {"ROLLOUT_BACKEND_PROBE_S": "0.5", "ROLLOUT_LEASE_S": "10"}
        # To the end: a server ends with the thread that started it.
        pool = exits.enter_context(ThreadPoolExecutor(4))
        servers = [pool.submit(exits.enter_context, embedded_server(old)) for _ in "ab"]
        stack = exits.enter_context(Stack(directory, Path(sandbox_dir), env))
        fleets = {name: pool.submit(stack.start_worker, "init,run,eval", name) for name in ("one", "two")}
        workers = {name: started.result() for name, started in fleets.items()}
        engines = dict(zip("ab", (started.result() for started in servers), strict=True))
        for name, server in engines.items():
            stack.client.add_backend(server.url, id=name)
        yield Fleet(stack, workers, engines, old, new)


@pytest.fixture
def settled(fleet):
    """The fleet, with old weights labelled `base` before the test."""
    update = fleet.update("base", fleet.old, canary=fleet.canary(fleet.old))
    assert update.state == "done", update
    return fleet


def test_an_update_reaches_every_backend_and_is_checked_against_the_trainer(settled):
    update = settled.update("step-1", settled.new, canary=settled.canary(settled.new))
    assert (update.state, update.verified, update.warnings) == ("done", True, [])
    for backend in update.backends.values():
        assert backend.state == "resumed"
        assert backend.canary_max_error < 1e-3
        assert {"pause", "reload", "canary", "total"} <= backend.seconds.keys()
    settled.check_settled("step-1")
    status = settled.client.policy()
    assert (status.current.version, status.current.path) == ("step-1", str(settled.new))
    assert (status.current.update_id, status.update) == (update.id, None)
    assert status.history[0] == update
    # A trainer that lost the answer asks again and gets the same update.
    assert settled.update("step-1", settled.new).id == update.id
    exposition = http.get(settled.stack.url + "/metrics").text
    assert 'rollout_policy_info{policy="default",version="step-1"} 1.0' in exposition
    assert 'rollout_policy_updates_total{outcome="done",policy="default"}' in exposition


def test_an_update_without_a_canary_says_that_it_is_not_verified(settled):
    update = settled.update("step-2", settled.new, mode="abort", reset_prefix_cache=True)
    assert (update.state, update.verified) == ("done", False)
    assert "not verified" in update.warnings[0]
    assert settled.client.policy().current.verified is False
    settled.check_settled("step-2")


def test_an_update_while_64_rollouts_run_loses_none_and_labels_every_token_truly(settled):
    # Frozen before they start, all 64 calls begin together and are under way when the weights change.
    for name in settled.engines:
        settled.tell(name, "/pause", mode="keep")
    ids = settled.submit(ROLLOUTS, TOKENS)
    wait_until(lambda: settled.calls("waiting") == ROLLOUTS, PATIENCE_S, "all calls to arrive")
    for name in settled.engines:
        settled.tell(name, "/resume")
    wait_until(lambda: settled.calls("running") == ROLLOUTS, PATIENCE_S, "all calls to run")
    update = settled.update("step-3", settled.new, mode="keep", canary=settled.canary(settled.new))
    assert update.state == "done", update

    rollouts = settled.results(ids)
    assert len(rollouts) == ROLLOUTS
    for rollout in rollouts:
        assert (rollout.state, rollout.attempt, rollout.drop) == (State.COMPLETED, 1, False), rollout.error
        chain = rollout.trajectory.chain
        sampled = [segment for segment in chain.segments if segment.sampled]
        # One call, unbroken, whose tokens carry the old version up to one place and the new one after it.
        assert [segment.policy_version for segment in sampled] == ["base", "step-3"]
        assert len({segment.call_id for segment in sampled}) == 1
        assert sum(len(segment.token_ids) for segment in sampled) == TOKENS
        assert chain.policy_versions == sorted(chain.policy_versions)
    assert {rollout.backend for rollout in rollouts} == {"a", "b"}
    # The place is the true one: up to it the old weights gave these log-probs, after it they did not.
    for rollout in rollouts[:6]:
        recorded, by_old = llm_reference.chain_logprobs(rollout.trajectory.chain, settled.old)
        switch = rollout.trajectory.chain.policy_versions.index("step-3")
        errors = [abs(ours - reference) for ours, reference in zip(recorded, by_old, strict=True)]
        assert max(errors[:switch]) < 1e-3
        assert sum(error > 1e-3 for error in errors[switch:]) > 0.9 * len(errors[switch:])


def test_a_backend_that_fails_the_canary_takes_no_rollouts_until_an_update_succeeds(settled):
    # As by a trainer that transfers weights itself, and reaches one of the two.
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(settled.new)}}
    settled.tell("a", "/collective_rpc", body)
    update = settled.update("step-4", None, canary=settled.canary(settled.new))
    assert update.state == "partly"
    assert update.backends["a"].state == "resumed"
    failed = update.backends["b"]
    assert (failed.state, failed.canary_max_error > 0.05) == ("failed", True)
    assert "canary failed: id " in failed.error
    assert settled.ask("b", "/is_paused") == {"is_paused": True}, "nothing may be sampled from wrong weights"
    backend = settled.backend("b")
    assert not backend.healthy
    assert "canary failed" in backend.error
    rollouts = settled.results(settled.submit(6, 5))
    assert {(rollout.state, rollout.backend) for rollout in rollouts} == {(State.COMPLETED, "a")}
    assert settled.update("step-5", settled.new, canary=settled.canary(settled.new)).state == "done"
    settled.check_settled("step-5")


def test_when_no_backend_takes_the_weights_the_current_ones_come_back(settled):
    update = settled.update("step-6", settled.new, canary=settled.canary(settled.new, shift=0.5))
    assert update.state == "failed"
    assert settled.client.policy().current.version == "base"

    def back() -> bool:
        backends = [settled.backend(name) for name in settled.engines]
        return all(
            backend.healthy and not backend.paused and backend.policy_version == "base"
            for backend in backends
        )

    wait_until(back, PATIENCE_S, "the old weights to come back")
    settled.check_settled("base")
    assert {rollout.state for rollout in settled.results(settled.submit(4, 5))} == {State.COMPLETED}


def test_a_backend_that_is_down_fails_and_the_others_go_on(settled):
    store = BackendStore(settled.stack.redis.client)
    store.put(
        settled.backend("a").model_copy(update={"id": "dead", "url": f"http://127.0.0.1:{free_port()}"})
    )
    try:
        update = settled.update("step-8", settled.new)
        assert update.state == "partly"
        assert {name: backend.state.value for name, backend in update.backends.items()} == {
            "a": "resumed",
            "b": "resumed",
            "dead": "failed",
        }
        assert "Connection refused" in update.backends["dead"].error
    finally:
        settled.client.remove_backend("dead")
    settled.check_settled("step-8")


def test_a_backend_that_was_started_again_gets_the_current_weights_before_it_takes_rollouts(settled):
    settled.update("step-9", settled.new, canary=settled.canary(settled.new))
    # What a restart leaves: the weights and the label that the server begins with.
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(settled.old)}}
    settled.tell("b", "/collective_rpc", body)
    settled.tell("b", "/update_weight_version", {"new_version": "default"})

    def caught_up() -> bool:
        version = settled.ask("b", "/weight_info")["weight_version"]
        backend = settled.backend("b")
        return (version, backend.policy_version, backend.paused) == ("step-9", "step-9", False)

    wait_until(caught_up, PATIENCE_S, "backend b to catch up")
    settled.check_settled("step-9")
    verified = settled.update("step-9b", None, canary=settled.canary(settled.new))
    assert verified.state == "done", verified


def test_what_cannot_be_is_refused_and_nothing_begins(settled):
    good = {"version": "v", "path": "/ckpt"}
    bad = [
        ({}, "version"),
        ({"version": ""}, "version"),
        ({"version": "v" * 129}, "version"),
        ({"version": "v", "path": "relative/dir"}, "path"),
        ({**good, "mode": "drop"}, "mode"),
        ({**good, "canary": {"token_ids": [1, 2, 3], "logprobs": [-1.0]}}, "canary"),
        ({**good, "canary": {"token_ids": [1], "logprobs": []}}, "canary.token_ids"),
        ({**good, "canary": {"token_ids": [1, 2], "logprobs": ["NaN"]}}, "canary"),
        ({**good, "backends": []}, "backends"),
        ({**good, "backends": ["a", "zz"]}, "backends"),
        ({**good, "concurrency": -1}, "concurrency"),
        ({**good, "timeout_s": 0}, "timeout_s"),
        ({**good, "wait": 1e6}, "wait"),
        ({"version": "v", "lora": {"name": "x"}}, "(body)"),
        ({**good, "colour": "blue"}, "colour"),
    ]
    before = settled.client.policy()
    for body, field in bad:
        answer = http.post(settled.stack.url + "/v1/policy", json=body)
        assert answer.status_code == 400, (body, answer.text)
        assert any(error["field"].startswith(field) for error in answer.json()["errors"]), answer.text
    assert http.get(settled.stack.url + "/v1/policy/updates/none").status_code == 404
    assert settled.client.policy() == before


def test_the_command_line_shows_the_policy_and_updates_it(settled, tmp_path):
    run, url = CliRunner().invoke, ["--url", settled.stack.url]
    good = tmp_path / "canary.json"
    good.write_text(settled.canary(settled.old).model_dump_json())
    done = run(main, ["policy", "update", "cli-1", "--canary", str(good), *url])
    assert done.exit_code == 0, done.output
    assert "done" in done.output
    failed = run(main, ["policy", "update", "cli-2", str(tmp_path / "nowhere"), "--backend", "a", *url])
    assert failed.exit_code == 1
    assert "nowhere" in failed.output
    shown = run(main, ["policy", "show", *url]).output
    assert "cli-1" in shown
    assert "1 of 1" not in shown.split("cli-2")[1].splitlines()[0]


def test_a_killed_worker_s_update_is_finished_by_another_and_nothing_stays_paused(settled):
    """Last: it leaves one worker fewer."""
    # Several, which make each other slower: one alone may end before a starved gateway has looked.
    busy = [threading.Thread(target=_long_call, args=(settled.engines["a"].url,)) for _ in range(4)]
    for call in busy:
        call.start()
    wait_until(lambda: settled.calls("running") == len(busy), PATIENCE_S, "the calls to run")
    # `wait` lasts as long as the calls; backend b, one at a time, has its turn after that.
    options = {"mode": "wait", "concurrency": 1, "canary": settled.canary(settled.new), "wait": 0}
    update = settled.client.update_policy("step-10", str(settled.new), **options)
    wait_until(lambda: settled.ask("a", "/is_paused")["is_paused"], PATIENCE_S, "backend a to be paused")
    midway = settled.client.policy_update(update.id)
    assert [backend.state.value for backend in midway.backends.values()] == ["pausing", "waiting"], midway
    with pytest.raises(ApiError) as conflict:
        settled.client.update_policy("step-11", str(settled.new))
    assert conflict.value.status == 409
    assert update.id in conflict.value.problem.detail

    owner = settled.stack.redis.client.get("policy:lease")
    victim = next(process for process in settled.workers.values() if f"/{process.pid}/" in f"/{owner}")
    victim.kill()
    for call in busy:
        call.join(PATIENCE_S)
        assert not call.is_alive()

    def ended() -> PolicyUpdate | None:
        record = settled.client.policy_update(update.id, wait=5)
        return record if record.state.ended else None

    record = wait_until(ended, PATIENCE_S, "the other worker to finish the update")
    assert record.state == "done", record
    assert all(backend.canary_max_error < 1e-3 for backend in record.backends.values())
    settled.check_settled("step-10")
    assert {rollout.state for rollout in settled.results(settled.submit(8, 5))} == {State.COMPLETED}


def _long_call(url: str) -> None:
    params = {"max_tokens": 1900, "ignore_eos": True}
    body = {"token_ids": [1, 2, 3], "sampling_params": params}
    httpx.post(f"{url}/inference/v1/generate", json=body, timeout=PATIENCE_S).raise_for_status()
