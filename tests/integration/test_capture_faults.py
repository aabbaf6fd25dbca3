"""What goes wrong around a program must neither end as its score nor be seen in what is trained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.schema import State
from tests.helpers.capture import CaptureWorld, capture_world
from tests.integration.test_capture import in_sandbox, tree_of


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[CaptureWorld]:
    with capture_world(tmp_path_factory.mktemp("faults"), processes=2) as world:
        yield world


def test_a_program_goes_on_where_the_worker_of_run_is_stopped_in_order(world: CaptureWorld):
    plan = ["echo $((1 + 1)) >> a", "cat a", "sleep 1", "cat a", "! it is 2"]
    undisturbed = world.ended(in_sandbox(world, plan))
    with world.slow_engine(factor=100.0):
        rollout_id = in_sandbox(world, plan)
        world.await_calls(rollout_id, 2)
        world.replace_run_worker(stop=True)
        rollout = world.ended(rollout_id, 120)
    assert (rollout.state, rollout.reward, rollout.attempt) == (State.COMPLETED, 1.0, 1), rollout.error
    assert tree_of(rollout) == tree_of(undisturbed)
