"""A worker that does not know a handler, as in the middle of a rolling upgrade."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from rollout.schema import RolloutRequest, State
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, stop_all, wait_until

NEW = "tests.helpers.chaos_handlers:all_handlers,tests.helpers.handlers:all_handlers"


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Its RUN and EVAL know the handler; each test has its own INIT."""
    with tempfile.TemporaryDirectory(prefix="ru-", dir="/tmp") as sandboxes:
        try:
            with Stack(tmp_path_factory.mktemp("stack"), Path(sandboxes)) as stack:
                stack.start_worker("run,eval", env={"ROLLOUT_HANDLERS": NEW})
                wait_until(
                    lambda: "gated" in {info.name for info in stack.client.handlers()}, 120, "the handler"
                )
                yield stack
        finally:
            stop_host(Path(sandboxes))


def submit(stack, **more):
    (rollout,) = stack.client.submit(RolloutRequest(handler="gated", limits={"max_attempts": 1}, **more))
    return rollout.id


def test_a_rollout_goes_on_to_a_worker_that_knows_its_handler_without_using_up_an_attempt(stack):
    # In the middle of an upgrade: the new RUN and EVAL workers are there, of INIT an old one.
    old = stack.start_worker("init", "old")
    rollout_id = submit(stack)
    wait_until(lambda: "no handler 'gated'" in old.log.read_text(), 120, "the old worker to meet it", old)
    assert not stack.client.get(rollout_id, include="summary").state.terminal
    new = stack.start_worker("init", "new", env={"ROLLOUT_HANDLERS": NEW})
    done = stack.client.wait(rollout_id, 60)
    stop_all([old, new])
    assert (done.state, done.attempt, done.reward) == (State.COMPLETED, 1, 1.0)


def test_one_that_no_worker_knows_fails_in_the_end_says_so_and_nobody_spins(stack):
    old = stack.start_worker("init", "impatient", env={"ROLLOUT_HANDLER_WAIT_S": "4"})
    began = time.monotonic()
    done = stack.client.wait(submit(stack), 90)
    assert (done.state, done.error.blame, done.error.type) == (
        State.FAILED,
        "infrastructure",
        "UnknownHandler",
    )
    assert "this worker has no handler 'gated'" in done.error.message
    assert done.drop and done.reward is None and done.attempt == 1
    assert time.monotonic() - began > 4
    assert old.log.read_text().count("no handler 'gated'") < 20, "ever more rarely"
