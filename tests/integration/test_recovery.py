"""Messages are doorbells: whatever is lost, the record brings the rollout to its end."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from rollout.schema import RolloutRequest, State
from tests.helpers.blocking import SyncHostClient
from tests.helpers.sandboxes import leftovers, stop_host
from tests.helpers.stack import Stack, wait_until

PATIENCE_S = 120
"""For what takes seconds on an idle machine."""
ENV = {
    "ROLLOUT_HANDLERS": "tests.helpers.chaos_handlers:all_handlers,tests.helpers.handlers:all_handlers",
    # One test waits for its end, and in no other must a busy worker lose one.
    "ROLLOUT_LEASE_S": "6",
}


@pytest.fixture(scope="module")
def spare(tmp_path_factory):
    """A stack of its own, whose workers these tests kill."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            with Stack(tmp_path_factory.mktemp("spare"), Path(sandbox_dir), ENV) as stack:
                stack.start_workers({"init": "init", "eval": "eval"})
                yield stack
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture
def run_worker(spare):
    """What serves RUN: the one that a test before has left, or a new one."""
    for process in spare.processes:
        if process.name.startswith("run") and process.popen.poll() is None:
            return process
    return spare.start_worker("run")


def runs_a_command(stack, gates):
    """The id of a rollout whose command runs in its sandbox until the gate of RUN is opened."""
    for stage in ("init", "eval"):
        (gates / stage).touch()
    (new,) = stack.client.submit(RolloutRequest(handler="gated_command", task={"gates": str(gates)}))
    wait_until((gates / f"run.{new.id}").exists, PATIENCE_S, "its RUN to stand at the gate")
    return new.id


def wait_for_state(stack, rollout_id, state):
    return wait_until(
        lambda: stack.client.get(rollout_id, include="summary").state is state, PATIENCE_S, f"state {state}"
    )


def test_cancel_of_a_queued_rollout_ends_it_without_a_worker(spare):
    """Nobody serves RUN here: the rollout is ready, with a sandbox on the node."""
    (new,) = spare.client.submit(RolloutRequest(handler="in_tool"))
    wait_for_state(spare, new.id, State.READY)
    assert leftovers(spare.sandbox_dir) != []
    answer = spare.client.cancel(new.id)
    assert answer["state"] == "cancelled" and not answer["cancelling"]
    wait_until(lambda: leftovers(spare.sandbox_dir) == [], 120, "the sandbox to be gone")


def test_a_lost_message_is_sent_again(spare, run_worker, tmp_path):
    (new,) = spare.client.submit(RolloutRequest(handler="gated", task={"gates": str(tmp_path)}))
    wait_for_state(spare, new.id, State.INITIALIZING)
    run_worker.popen.send_signal(signal.SIGSTOP)
    try:
        for stage in ("init", "run", "eval"):
            (tmp_path / stage).touch()
        wait_for_state(spare, new.id, State.READY)
        wait_until(lambda: spare.redis.client.delete("run"), PATIENCE_S, "the message to be in the queue")
    finally:
        run_worker.popen.send_signal(signal.SIGCONT)
    item = spare.client.wait(new.id, timeout=PATIENCE_S)
    assert item.state is State.COMPLETED and item.reward == 1.0 and item.attempt == 1


def test_a_killed_worker_costs_an_attempt_and_not_the_rollout(spare, run_worker, tmp_path):
    rollout_id = runs_a_command(spare, tmp_path)
    run_worker.kill()
    (tmp_path / "run").touch()
    spare.start_worker("run", "run-second")
    item = spare.client.wait(rollout_id, timeout=PATIENCE_S)
    assert item.state is State.COMPLETED and item.attempt == 2 and item.reward == 1.0
    assert [event.state for event in item.timeline].count(State.RUNNING) == 2
    wait_until(lambda: leftovers(spare.sandbox_dir) == [], 120, "both sandboxes to be gone")


def test_a_stopping_worker_hands_its_rollouts_back(spare, run_worker, tmp_path):
    (tmp_path / "init").touch()
    (new,) = spare.client.submit(RolloutRequest(handler="gated", task={"gates": str(tmp_path)}))
    wait_until((tmp_path / f"run.{new.id}").exists, PATIENCE_S, "its RUN to stand at the gate")
    run_worker.popen.terminate()
    assert run_worker.popen.wait(PATIENCE_S) == 0, "it does not wait for the rollout's end"
    assert spare.client.get(new.id).state in (State.QUEUED, State.INITIALIZING, State.READY)
    for stage in ("run", "eval"):
        (tmp_path / stage).touch()
    spare.start_worker("run", "run-heir")
    item = spare.client.wait(new.id, timeout=PATIENCE_S)
    assert item.state is State.COMPLETED and item.attempt == 1, "handing back uses no attempt up"


def test_a_killed_sandbox_host_costs_no_attempt(spare, run_worker, tmp_path):
    """Commands go on without it, and the next host takes the sandboxes over."""
    rollout_id = runs_a_command(spare, tmp_path)
    host = SyncHostClient(spare.sandbox_dir)
    os.kill(host.stats()["pid"], signal.SIGKILL)
    (tmp_path / "run").touch()
    item = spare.client.wait(rollout_id, PATIENCE_S)
    assert (item.state, item.attempt, item.reward) == (State.COMPLETED, 1, 1.0)
    assert host.stats()["adopted"] == 1
    wait_until(lambda: leftovers(spare.sandbox_dir) == [], 120, "the sandbox to be gone")
