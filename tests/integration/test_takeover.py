"""RUN of a worker that is gone goes on at its turn, in the same sandbox, with nothing done twice.

The rows of "What survives what" in docs/reliability.md, each with real parts. Leases run out as in
`lose_leases`, but where the test is about that.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from rollout.schema import Rollout, RolloutRequest, State, new_id
from tests.chaos.harness import Engine, diary_engine, put_back, remember
from tests.helpers.blocking import SyncHostClient
from tests.helpers.diary import words
from tests.helpers.sandboxes import kill_from_outside, stop_host
from tests.helpers.stack import Process, Stack, wait_until

PATIENCE_S = 120
NOBODY = "-"
SOON = {"ROLLOUT_SHUTDOWN_GRACE_S": "1"}
"""A worker that is stopped waits no longer for a successor."""


class Service(Stack):
    """A service with two RUN workers, of which either can go on where the other is gone."""

    def __init__(self, directory: Path, sandbox_dir: Path) -> None:
        # Few tests wait for its end, and in no other must a busy worker lose one.
        env = {"ROLLOUT_HANDLERS": "tests.helpers.diary:all_handlers", "ROLLOUT_LEASE_S": "6"}
        super().__init__(directory, sandbox_dir, env)
        self.host = SyncHostClient(sandbox_dir)
        self.engines = {name: Engine(self, name, diary_engine) for name in ("east", "west")}
        self.started = 0
        self.run: list[Process] = []
        self.others = self.start_others()

    def start_others(self) -> Process:
        """The worker of INIT and EVAL."""
        self.others = self._launch_worker("init,eval", self._name("others"))
        return self.others

    def _name(self, kind: str) -> str:
        self.started += 1
        return f"{kind}{self.started}"

    def of_run(self, count: int, **env: str) -> list[Process]:
        """So many workers of RUN, and no more.

        Each new one costs seconds: tests stand in an order in which most find what they need.
        """
        env = {"ROLLOUT_SHUTDOWN_GRACE_S": "60"} | env
        self.run = [worker for worker in self.run if worker.popen.poll() is None]
        while len(self.run) > count:
            self.run.pop().kill()
        while len(self.run) < count:
            self.run.append(self._launch_worker("run", self._name("run"), env=env))
        for worker in (*self.run, self.others):
            self._await_worker(worker)
        return self.run

    # -- rollouts -----------------------------------------------------------------------------

    def submit(
        self, lines: int, pause_s: float = 0.0, handler: str = "diary", gates: Path | None = None, **limits
    ):
        """A diary's id. It goes on until the test lets it end, or stands at the gates."""
        rollout_id = new_id()
        task = {"lines": lines, "pause_s": pause_s}
        task |= {"gates": str(gates)} if gates else {"until": str(self._end(rollout_id))}
        limits = {"max_turns": 400} | limits
        self.client.submit(RolloutRequest(handler=handler, id=rollout_id, task=task, limits=limits))
        return rollout_id

    def _end(self, rollout_id: str) -> Path:
        return self.directory / f"end.{rollout_id}"

    def let_end(self, *rollout_ids: str) -> None:
        """Diaries have what lines they were asked for, or those that they have written by now."""
        for rollout_id in rollout_ids:
            self._end(rollout_id).touch()

    def field(self, rollout_id: str, name: str) -> str | None:
        return self.redis.client.hget(f"rollout:{{{rollout_id}}}", name)

    def turns(self, rollout_id: str) -> int:
        """Entries in its log, about three a turn."""
        return self.redis.client.llen(f"rollout:{{{rollout_id}}}:turns:1")

    def await_turns(self, rollout_id: str, more: int = 8) -> None:
        """Until so many entries more than now are in its log."""
        before = self.turns(rollout_id)
        wait_until(lambda: self.turns(rollout_id) >= before + more, PATIENCE_S, f"turns of {rollout_id}")

    def holder(self, rollout_id: str) -> Process:
        """The worker of RUN that has it."""
        owner = self.field(rollout_id, "owner").partition("@")[0]
        return next(worker for worker in self.run if worker.name == owner)

    def await_another(self, rollout_id: str, gone: Process) -> None:
        """Until a worker has it that is not the one which is gone."""
        names = [worker.name for worker in self.run if worker is not gone]
        wait_until(
            lambda: (self.field(rollout_id, "owner") or "").partition("@")[0] in names,
            PATIENCE_S,
            f"another worker to take {rollout_id}",
        )

    def ended(self, rollout_id: str) -> Rollout:
        self.let_end(rollout_id)
        wait_until(lambda: self.field(rollout_id, "finished"), PATIENCE_S, f"the end of {rollout_id}")
        return self.client.get(rollout_id)

    # -- faults -------------------------------------------------------------------------------

    def kill(self, worker: Process) -> None:
        """SIGKILL, and its leases are over."""
        worker.kill()
        self.lose_leases(worker)

    def lose_leases(self, worker: Process) -> None:
        """What it held is due now, and not seconds later."""
        client = self.redis.client
        for key in client.scan_iter("rollout:{*}", count=1000):
            if key.endswith("}") and (client.hget(key, "owner") or "").partition("@")[0] == worker.name:
                client.hset(key, "lease", 0)
                client.zadd("rollouts:due", {key[9:-1]: 0})

    def kill_holder(self, rollout_id: str) -> Process:
        """Kill the worker that has it; another one comes in its place."""
        worker = self.holder(rollout_id)
        self.kill(worker)
        return worker

    def freeze_in_a_tool_call(self, rollout_id: str, asked: int) -> Process:
        """Stop the worker that has it while the log has all that engines have sampled since `asked`."""
        worker = self.holder(rollout_id)

        def stands() -> bool:
            worker.popen.send_signal(signal.SIGSTOP)
            item = self.client.get(rollout_id)
            calls = {call["state"] for call in self.calls()}
            if "running" not in calls and self.done() - asked == item.trajectory.turns:
                return True
            worker.popen.send_signal(signal.SIGCONT)
            return False

        wait_until(stands, PATIENCE_S, "a tool call")
        return worker

    def kill_host(self) -> None:
        pid = self.host.stats()["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), PATIENCE_S, "the host to be gone")

    def sandbox(self, rollout_id: str) -> dict | None:
        """What the host has of it."""
        its = [box for box in self.host.list() if box["owner"].startswith(f"{rollout_id}/")]
        return its[0] if its else None

    def calls(self) -> list[dict]:
        """Model calls that the engines have had."""
        return [call for engine in self.engines.values() for call in httpx.get(f"{engine.url}/calls").json()]

    def done(self) -> int:
        """How many of them were answered."""
        return sum(call["state"] == "done" for call in self.calls())


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            with Service(tmp_path_factory.mktemp("stack"), Path(sandbox_dir)) as service:
                yield service
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture(autouse=True)
def nothing_left(service):
    """Of a test that has ended there is no log, and in the end no sandbox."""
    yield
    assert not service.redis.client.keys("*:turns:*")
    wait_until(lambda: not service.host.list(), PATIENCE_S, "the sandboxes to be gone")


def require_whole(item: Rollout, attempt: int = 1) -> Rollout:
    """It was completed, and the sandbox's file is what its trajectory says."""
    assert (item.state, item.reward, item.attempt) == (State.COMPLETED, 1.0, attempt), (
        item.error,
        notes(item),
        item.trajectory and words(item.trajectory),
    )
    assert item.metrics["turns"] == item.metrics["lines"] + 1
    calls = [s.call_id for chain in item.trajectory.chains for s in chain.segments if s.sampled]
    assert len(set(calls)) == item.metrics["turns"]
    return item


def notes(item: Rollout) -> str:
    return "\n".join(note.text for note in item.notes)


# -- a worker of RUN ----------------------------------------------------------------------------


def test_a_killed_workers_rollout_goes_on_in_the_middle_of_a_tool_call(service):
    service.of_run(2)
    asked = service.done()
    rollout_id = service.submit(lines=12, pause_s=0.4)
    service.await_turns(rollout_id)
    service.freeze_in_a_tool_call(rollout_id, asked).kill()
    backend = service.field(rollout_id, "backend")
    item = require_whole(service.ended(rollout_id))
    assert (
        item.resumed == 1 and "was lost in state running" in notes(item) and "goes on at turn" in notes(item)
    )
    assert item.backend == backend, "its prefix is cached there"
    assert service.done() - asked == item.metrics["turns"], "no token was sampled twice"


def test_in_the_middle_of_a_model_call_only_that_call_is_made_again(service):
    service.of_run(2)
    asked = service.done()
    rollout_id = service.submit(lines=6, pause_s=0.8)
    service.await_turns(rollout_id)

    def fault(kind: str) -> None:
        for engine in service.engines.values():
            httpx.post(f"{engine.url}/fault", json={"kind": kind, "calls": 1})

    def running() -> set[str]:
        return {call["call_id"] for call in service.calls() if call["state"] == "running"}

    def hangs() -> bool:
        before = running()
        time.sleep(0.3)
        return bool(before & running())

    fault("hang")
    try:
        wait_until(hangs, PATIENCE_S, "a call that hangs")
        service.kill_holder(rollout_id)
    finally:
        fault("none")
    item = require_whole(service.ended(rollout_id))
    cancelled = [call for call in service.calls() if call["state"] == "cancelled"]
    assert item.resumed == 1 and len(cancelled) == 1 and cancelled[0]["sampled"] == 0
    assert service.done() - asked == item.metrics["turns"], "no other call was made twice"


def test_wherever_in_a_turn_a_worker_is_killed_its_rollouts_end_as_if_it_were_not(service):
    """Short turns, so that some are between two."""
    service.of_run(1)
    ids = [service.submit(lines=30) for _ in range(6)]
    for rollout_id in ids:
        wait_until(lambda: service.turns(rollout_id) > 8, PATIENCE_S, "some turns")  # noqa: B023
    service.kill_holder(ids[0])
    service.of_run(1)
    service.let_end(*ids)
    items = [require_whole(service.ended(rollout_id)) for rollout_id in ids]
    assert sum(item.resumed for item in items) >= 3


def test_a_worker_that_sleeps_past_its_lease_does_and_writes_nothing_when_it_wakes(service):
    service.of_run(2)
    rollout_id = service.submit(lines=10, pause_s=0.3)
    service.await_turns(rollout_id)
    sleeper = service.holder(rollout_id)
    sleeper.popen.send_signal(signal.SIGSTOP)
    try:
        service.lose_leases(sleeper)
        service.await_another(rollout_id, sleeper)
        service.await_turns(rollout_id, 4)
        sleeper.popen.send_signal(signal.SIGCONT)
        wait_until(
            lambda: "outcome refused" in sleeper.log.read_text(errors="replace"),
            PATIENCE_S,
            "the refusal",
            sleeper,
        )
        assert not service.field(rollout_id, "finished"), "it woke while the other one went on"
        fences = [event.fence for event in service.client.get(rollout_id).timeline]
        item = require_whole(service.ended(rollout_id))
    finally:
        sleeper.popen.send_signal(signal.SIGCONT)
    assert item.resumed == 1 and item.error is None
    assert [event.fence for event in item.timeline][: len(fences)] == fences


@pytest.mark.parametrize("successor", [True, False])
def test_a_worker_that_is_stopped_hands_its_rollout_over(service, successor):
    """At once where somebody is there for it; else at the end of its grace, and whoever comes goes on."""
    if successor:
        service.of_run(2)
    else:
        service.of_run(0)
        service.of_run(1, **SOON)
    rollout_id = service.submit(lines=14, pause_s=0.4)
    wait_until(lambda: service.turns(rollout_id) > 6, PATIENCE_S, "some turns")
    first = service.holder(rollout_id)
    began = time.monotonic()
    first.ask_to_stop()
    first.popen.wait(PATIENCE_S)
    assert time.monotonic() - began < 30, "half of the grace"
    service.of_run(1, **SOON)
    item = require_whole(service.ended(rollout_id))
    assert (item.resumed, item.error) == (1, None)
    assert "handed back: worker" in notes(item) and "was lost" not in notes(item)


def test_a_service_that_ends_in_order_and_comes_again_does_it_anew_in_the_same_attempt(service):
    """After the one that leaves a worker which does not wait for a successor."""
    (worker,) = service.of_run(1, **SOON)
    rollout_id = service.submit(lines=8, pause_s=0.4)
    service.await_turns(rollout_id)
    for process in (worker, service.others):
        process.ask_to_stop()
    for process in (worker, service.others):
        process.stop()
    service.host.stop()
    service.redis.kill()
    service.redis = service.redis.restarted()
    service.start_others()
    service.of_run(1)
    item = require_whole(service.ended(rollout_id))
    assert "handed back: worker" in notes(item) and item.error is None


def test_without_its_sandbox_it_begins_anew(service):
    service.of_run(2)
    rollout_id = service.submit(lines=8, pause_s=0.3)
    service.await_turns(rollout_id)
    kill_from_outside(service.sandbox(rollout_id)["pid"])
    item = require_whole(service.ended(rollout_id), attempt=2)
    assert "sandbox is blamed" in notes(item)


def test_variables_of_the_kernel_and_a_job_in_the_background_survive(service):
    service.of_run(2)
    rollout_id = service.submit(lines=10, pause_s=0.3, handler="workbench")
    service.await_turns(rollout_id, 14)
    service.kill_holder(rollout_id)
    item = require_whole(service.ended(rollout_id))
    assert item.resumed == 1 and item.metrics["jobs"] == 1


def test_the_time_limit_of_run_goes_on_where_another_worker_does(service):
    service.of_run(2)
    rollout_id = service.submit(lines=80, pause_s=0.5, run_timeout_s=32)
    service.await_turns(rollout_id, 6)
    time.sleep(18.0)  # with these most of the limit, however many turns that is
    service.kill_holder(rollout_id)
    before = service.turns(rollout_id) // 3
    item = service.ended(rollout_id)
    assert (item.state, item.attempt, item.resumed, item.drop) == (State.TIMED_OUT, 1, 1, False)
    assert item.metrics["turns"] <= before + 28, "of what is left, at two a second; the whole limit has 64"
    assert item.metrics["as_said"] == 1.0


def test_what_waits_for_a_worker_is_cancelled_at_once_and_ended_by_its_deadline(service):
    service.of_run(1)
    ids = [service.submit(lines=30, pause_s=0.3) for _ in range(2)]
    for rollout_id in ids:
        wait_until(lambda: service.turns(rollout_id) > 4, PATIENCE_S, "some turns")  # noqa: B023
    service.kill_holder(ids[0])
    wait_until(lambda: all(service.field(i, "owner") == NOBODY for i in ids), PATIENCE_S, "both to wait")
    assert all(map(service.sandbox, ids))
    assert service.client.cancel(ids[0])["state"] == "cancelled"
    # As far off as the deadlines of tests in real time would make the test long.
    soon = int(1000 * (time.time() + 0.5))
    service.redis.client.hset(f"rollout:{{{ids[1]}}}", "deadline", soon)
    service.redis.client.zadd("rollouts:due", {ids[1]: soon})
    item = service.ended(ids[1])
    assert (item.state, item.drop_reason, item.reward) == (State.TIMED_OUT, "deadline", None)
    assert item.finished_at - soon / 1000 < 10
    wait_until(lambda: not any(map(service.sandbox, ids)), PATIENCE_S, "the sandboxes to be released")


# -- workers of INIT and EVAL -------------------------------------------------------------------


def test_init_and_eval_are_done_again_in_the_same_attempt_where_the_handler_says_so(service, tmp_path):
    service.of_run(1)
    attempts = {"gated_diary": 1, "once_diary": 2}
    # A directory each: those of INIT stay there, those of EVAL have got as far.
    at = {stage: tmp_path / stage for stage in ("init", "eval")}
    for directory in at.values():
        directory.mkdir()
        (directory / "run").touch()
    (at["eval"] / "init").touch()
    ids = {
        (handler, stage): service.submit(lines=2, handler=handler, gates=gates)
        for handler in attempts
        for stage, gates in at.items()
    }
    for (_, stage), rollout_id in ids.items():
        wait_until((at[stage] / f"{stage}.{rollout_id}").exists, PATIENCE_S, f"{rollout_id} to be in {stage}")
    lost = service.others
    lost.kill()
    service.lose_leases(lost)
    service.start_others()
    service.of_run(1)
    for directory in at.values():
        for stage in at:
            (directory / stage).touch()
    for (handler, stage), rollout_id in ids.items():
        item = require_whole(service.ended(rollout_id), attempt=attempts[handler])
        assert item.resumed == (1 if handler == "gated_diary" else 0)
        assert f"was lost in state {'initializing' if stage == 'init' else 'evaluating'}" in notes(item)


def test_an_eval_that_was_lost_while_it_released_the_sandbox_has_ended(service, tmp_path):
    service.of_run(1)
    for stage in ("init", "run"):
        (tmp_path / stage).touch()
    rollout_id = service.submit(lines=2, handler="gated_diary", gates=tmp_path)
    wait_until((tmp_path / f"eval.{rollout_id}").exists, PATIENCE_S, "it to be scored")
    pid = service.host.stats()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        (tmp_path / "eval").touch()
        wait_until(lambda: service.field(rollout_id, "decided"), PATIENCE_S, "the score", service.others)
        service.kill(service.others)
    finally:
        os.kill(pid, signal.SIGCONT)
    service.start_others()
    item = require_whole(service.ended(rollout_id))
    assert item.resumed == 0


# -- other parts --------------------------------------------------------------------------------


def test_what_redis_lost_of_a_log_is_written_again_by_a_worker_that_lives(service):
    (worker,) = service.of_run(1)
    rollout_id = service.submit(lines=25, pause_s=0.1)
    service.await_turns(rollout_id)
    # What is remembered may be older than a lease by the time at which it is put back.
    worker.popen.send_signal(signal.SIGSTOP)
    ends = int(1000 * (time.time() + 600))
    service.redis.client.hset(f"rollout:{{{rollout_id}}}", "lease", ends)
    service.redis.client.zadd("rollouts:due", {rollout_id: ends})
    copy = remember(service.redis)
    worker.popen.send_signal(signal.SIGCONT)
    service.await_turns(rollout_id, 9)
    service.redis.kill()
    service.redis = put_back(service.redis, copy)
    item = require_whole(service.ended(rollout_id))
    assert item.resumed == 0


def test_where_redis_and_the_worker_lose_what_was_done_the_rollout_begins_anew(service):
    """Nobody knows what was done in the sandbox: it is not gone on with."""
    (worker,) = service.of_run(1)
    rollout_id = service.submit(lines=25, pause_s=0.1)
    service.await_turns(rollout_id)
    copy = remember(service.redis)
    service.await_turns(rollout_id, 12)
    worker.kill()
    service.redis.kill()
    service.redis = put_back(service.redis, copy)
    service.lose_leases(worker)
    service.of_run(1)
    item = require_whole(service.ended(rollout_id), attempt=2)
    assert "infrastructure is blamed" in notes(item) and "Redis has lost what came between" in notes(item)


def test_the_gateway_and_the_sandbox_host_are_not_missed(service):
    """Both, and then the worker: the next host has adopted the sandbox in which it goes on."""
    service.of_run(2)
    rollout_id = service.submit(lines=16, pause_s=0.3)
    service.await_turns(rollout_id)
    service.kill_host()
    service.gateway.kill()
    service.await_turns(rollout_id, 3)
    service.kill_holder(rollout_id)
    service.processes.remove(service.gateway)
    service.gateway = service.start_gateway()
    item = require_whole(service.ended(rollout_id))
    assert item.resumed == 1 and service.host.stats()["adopted"] >= 1


def test_without_its_backend_another_one_goes_on_with_what_was_sampled(service):
    service.of_run(2)
    rollout_id = service.submit(lines=10, pause_s=0.3)
    service.await_turns(rollout_id)
    before = service.client.get(rollout_id).trajectory.chains[0].token_ids
    engine = service.engines[service.field(rollout_id, "backend")]
    engine.kill()
    service.kill_holder(rollout_id)
    item = require_whole(service.ended(rollout_id))
    engine.start()
    assert item.resumed == 1 and item.backend != engine.name
    assert item.trajectory.chains[0].token_ids[: len(before)] == before
