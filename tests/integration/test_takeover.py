"""RUN of a worker that is gone goes on at its turn, in the same sandbox, with nothing done twice."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rollout.schema import RolloutRequest, State, new_id
from tests.helpers.fake_engine import fake_engine
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, wait_until

PATIENCE_S = 120


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service without a RUN worker yet."""
    env = {"ROLLOUT_HANDLERS": "tests.helpers.diary:Diary"}
    with (
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir,
        fake_engine(script="tests.helpers.diary:script", step_ms=0.2) as engine,
        Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir), env) as stack,
    ):
        stack.client.add_backend(engine.url, id="fake")
        stack.start_worker("init,eval", "others")
        yield stack
        stop_host(Path(sandbox_dir))


def turns(service, rollout_id: str) -> int:
    return service.redis.client.llen(f"rollout:{{{rollout_id}}}:turns:1")


def submit(service, lines: int, pause_s: float = 0.0) -> str:
    task = {"lines": lines, "pause_s": pause_s}
    (submitted,) = service.client.submit([RolloutRequest(handler="diary", id=new_id(), task=task)])
    return submitted.id


def ended(service, rollout_id: str):
    wait_until(
        lambda: service.client.get(rollout_id, include="summary").state.terminal, PATIENCE_S, "the end"
    )
    return service.client.get(rollout_id)


def test_a_killed_workers_rollout_goes_on_in_the_middle_of_a_tool_call(service):
    first = service.start_worker("run", "first")
    rollout_id = submit(service, lines=12, pause_s=0.4)
    wait_until(lambda: turns(service, rollout_id) > 8, PATIENCE_S, "some turns", first)
    first.kill()
    second = service.start_worker("run", "second")
    item = ended(service, rollout_id)
    second.stop()
    assert (item.state, item.reward, item.attempt) == (State.COMPLETED, 1.0, 1), item
    assert item.resumed == 1 and item.metrics["turns"] == 13
    assert any("goes on" in note.text for note in item.notes)
    assert not service.redis.client.keys("*:turns:*")
