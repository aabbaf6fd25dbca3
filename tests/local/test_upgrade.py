"""`rollout upgrade` of a stack with rollouts under way, undisturbed and cut off at several places."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from click.testing import Result

from rollout.client import Client
from rollout.schema import RolloutRequest, State
from services.launch.record import Record
from services.launch.supervisor import MARK, Part, Supervisor, marked, stop
from services.launch.watch import Watch
from tests.helpers.fake_engine import fake_engine
from tests.helpers.stack import wait_until
from tests.local.test_stack import ROLLOUT, Started, record, refused, rollout

pytestmark = pytest.mark.timeout(600)
HANDLERS = "tests.helpers.diary:Diary"
LONG_S = 25
"""What a rollout takes that outlives its worker, in lines of a second each."""
STAYS = {"redis"}
NEW = {"gateway", "flower", "capture", "capture-2", "init fleet", "run fleet", "eval fleet"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    state = tmp_path_factory.mktemp("stack") / "run"
    with fake_engine(script="tests.helpers.diary:script", step_ms=0.2) as engine:
        up = rollout(
            *("up", "--state-dir", str(state), "--backend", engine.url, "--slots-init", "4"),
            env={"ROLLOUT_HANDLERS": HANDLERS, "ROLLOUT_CAPTURE_PROCESSES": "2"},
        )
        try:
            assert up.returncode == 0, up.stdout + up.stderr
            yield Started(state, up.stdout, record(state).url, 0, 0)
        finally:
            rollout("down", "--state-dir", str(state))


def upgrade(stack: Started) -> Result:
    """In this process: imports are most of what it takes who asks for one."""
    return refused("upgrade", "--state-dir", str(stack.state))


def look_after(stack: Started) -> None:
    """Have a supervisor started in place of one that was killed."""
    up = refused("up", "--state-dir", str(stack.state))
    assert "looks after the stack again" in up.stdout, up.stdout + up.stderr


@contextmanager
def under_way(stack: Started) -> Iterator[subprocess.Popen]:
    """An upgrade that has just replaced its first worker, and said so in a line that is read already."""
    command = [*ROLLOUT, "upgrade", "--state-dir", str(stack.state)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "eval fleet" in child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


def pids(stack: Started) -> dict[str, int]:
    return {part.name: part.pid for part in stack.record.parts}


def require_whole(stack: Started) -> Record:
    """Every part lives once, and nothing else of the stack but them, their children and its sandbox host."""
    now = stack.record
    assert {part.name for part in now.parts} == STAYS | NEW and len(now.live) == len(now.parts) == 8
    assert not now.due and now.supervisor.alive

    def workers():
        return [process for process in marked(now.mark) if "worker" in process.cmdline()]

    # One that is being replaced forks before it becomes another program.
    wait_until(lambda: len(workers()) == 3, 60, "three workers")
    with Client(now.url) as client:
        alive = client.status()["workers"]
    assert {stage: len(names) for stage, names in alive.items()} == {"init": 1, "run": 1, "eval": 1}, alive
    return now


class Trainer(threading.Thread):
    """Submits rollouts all the time, until told to end: some are in every stage at any moment."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._ends = url, threading.Event()
        self.ids: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        # They wait rather than compute: the longer others have the processors, the more of them there are.
        requests = [
            RolloutRequest(handler="noop", task={"init_s": 2.5, "run_s": 2.5, "eval_s": 2.5}, n=2),
            RolloutRequest(handler="diary", task={"lines": 3, "pause_s": 0.8}),
        ]
        try:
            with Client(self._url) as client:
                while not self._ends.wait(2.0):
                    self.ids += [item.id for item in client.submit(requests)]
        except Exception as error:
            self.error = error

    def finish(self) -> list[str]:
        """The ids of all that it has submitted, no call of which has failed."""
        self._ends.set()
        self.join(60)
        assert self.error is None and len(self.ids) > 20, (self.error, len(self.ids))
        return self.ids


class Agent(threading.Thread):
    """Calls capture all the time, each time on a new connection, and once again where that was cut."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._ends = url, threading.Event()
        self.statuses: list[int] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._ends.wait(0.1):
                try:
                    self.statuses.append(self._call())
                except (OSError, HTTPException):
                    self.statuses.append(self._call())
        except Exception as error:
            self.error = error

    def _call(self) -> int:
        """Its status. Not by httpx, which takes far more of a processor."""
        connection = HTTPConnection(urlsplit(self._url).netloc, timeout=5)
        with closing(connection):
            connection.request("GET", "/v1/models")
            return connection.getresponse().status

    def finish(self) -> None:
        """No call found nobody."""
        self._ends.set()
        self.join(60)
        assert self.error is None and set(self.statuses) == {401}, (self.error, set(self.statuses))


def write_long(client: Client) -> str:
    """The id of a rollout that now runs, in its sandbox, and outlives the worker."""
    (item,) = client.submit([RolloutRequest(handler="diary", task={"lines": LONG_S, "pause_s": 1.0})])
    wait_until(lambda: client.get(item.id).state is State.RUNNING, 120, "a long rollout to run")
    return item.id


def test_an_upgrade_ends_no_rollout_repeats_none_and_can_be_done_again(stack):
    trainer = Trainer(stack.url)
    trainer.start()
    agent = Agent(stack.part("gateway").env["ROLLOUT_CAPTURE_URL"])
    agent.start()
    wait_until(lambda: len(trainer.ids) > 6, 120, "rollouts to be under way")
    before, supervisor, long = pids(stack), stack.record.supervisor, []
    with Client(stack.url) as client:
        for number in ("2", ""):
            rollout_id, begun = write_long(client), time.monotonic()
            with under_way(stack) as child:
                told = child.stdout.readline()  # of RUN
                if time.monotonic() - begun < LONG_S / 2:  # or others have the processors
                    long.append(rollout_id)
                out, err = child.communicate(timeout=240)
            assert child.returncode == 0, out + err
            told += out
            for stage in ("run", "init"):
                worker = rf"{stage}{number}@{re.escape(stack.record.node)}"
                assert re.search(rf"^ *[\d.]+ s  {stage} fleet: {worker} \(pid", told, re.M), told
            assert re.search(r"^upgraded after [\d.]+ s, with \d+ rollouts in hand$", told, re.M), told
            after = pids(stack)
            assert {part for part in before if before[part] != after[part]} == NEW
            before = after
        now = require_whole(stack)
        agent.finish()
        assert now.supervisor == supervisor, "it is the same process"
        assert b"--upgrade" in Path(f"/proc/{supervisor.pid}/cmdline").read_bytes(), "with new code"
        for rollout_id in [*trainer.finish(), *long]:
            item = client.wait(rollout_id, timeout=240)
            right = item.reward == 1.0 or item.handler == "noop"  # each line of a diary once
            assert (item.state, item.attempt, right) == (State.COMPLETED, 1, True), item
            assert item.resumed or rollout_id not in long, "another worker went on with it"


def test_one_of_two_is_refused_who_follows_may_be_killed_and_what_dies_in_the_middle_comes_back(stack):
    with under_way(stack):
        second = upgrade(stack)
        assert second.exit_code == 1 and "another `rollout upgrade` is at work" in second.stderr
    begun = stack.record
    assert begun.due, "it is in the middle"
    with under_way(stack) as again:
        stack.kill("redis")
        out, err = again.communicate(timeout=240)
    assert again.returncode == 0, out + err
    wait_until(lambda: len(stack.record.live) == 8, 60, "all to live")
    assert require_whole(stack).upgrades == begun.upgrades + 1


def test_a_supervisor_that_is_killed_in_the_middle_is_followed_by_one_that_finishes(stack):
    before = pids(stack)
    with under_way(stack) as child:
        os.kill(stack.record.supervisor.pid, signal.SIGKILL)
        assert child.wait(60) == 1 and "`rollout up` starts it again" in child.stderr.read()
    look_after(stack)

    def is_over():
        return not stack.record.due and len(stack.record.parts) == 8

    wait_until(is_over, 120, "the upgrade to be finished")
    require_whole(stack)
    assert not set(before.values()) & {pid for name, pid in pids(stack).items() if name in NEW}


def test_a_worker_that_does_not_start_stops_the_upgrade_and_the_old_one_stays(stack):
    def give(handlers: str) -> None:
        supervisor = stack.record.supervisor  # it would write over it
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not supervisor.alive, 60, "the supervisor to be gone")
        written = stack.record
        (part,) = (part for part in written.parts if part.name == "run fleet")
        part.env["ROLLOUT_HANDLERS"] = handlers
        written.save(stack.state / "stack.json")
        look_after(stack)

    before = pids(stack)
    give("missing:handlers")
    broken = upgrade(stack)
    assert broken.exit_code == 1, broken.stdout
    assert "the upgrade has stopped, and what it did not replace goes on: run fleet ended" in broken.stderr
    assert "No module named 'missing'" in broken.stderr, broken.stderr
    after = pids(stack)
    assert {name for name in NEW if before[name] != after[name]} == {"eval fleet"}
    with Client(stack.url) as client:
        done = client.run([RolloutRequest(handler="noop")], timeout=240)
        assert done[0].state is State.COMPLETED
    give(HANDLERS)
    mended = upgrade(stack)
    assert mended.exit_code == 0, mended.stdout + mended.stderr
    require_whole(stack)


def test_down_in_the_middle_leaves_nothing(stack):
    mark = stack.record.mark
    with under_way(stack) as child:
        shown = stack.down()
        assert child.wait(60) == 1 and "ended" in child.stderr.read()
    assert "ended gateway" in shown and list(marked(mark)) == []
    nothing = upgrade(stack)
    assert nothing.exit_code == 1 and f"no stack runs in {stack.state}" in nothing.stderr


def test_a_process_that_was_started_and_not_written_down_is_found_by_the_next_supervisor(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Supervisor, "listen", lambda self: None)
    written, command = Record(), ["sleep", "300"]
    old, new = (Part(name, command, {MARK: written.mark}, str(tmp_path / "log")) for name in ("old", "new"))
    written.parts = [old, new]
    old.start()
    written.save(tmp_path / "stack.json")
    new.start()
    try:
        # Empty for the first moment of a program.
        wait_until(psutil.Process(new.pid).environ, 10.0, "the environment of the new process")
        found = Watch(tmp_path).record.parts
        assert [(part.pid, part.started) for part in found] == [(p.pid, p.started) for p in (old, new)]
    finally:
        stop([old, new], 5.0)


def test_without_a_stack_nothing_is_upgraded(tmp_path):
    nothing = refused("upgrade", "--state-dir", str(tmp_path / "none"))
    assert nothing.exit_code == 1 and "no stack runs" in nothing.stderr and "`rollout up`" in nothing.stderr
