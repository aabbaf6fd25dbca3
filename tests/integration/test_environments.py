"""Environments in a whole service: processes of Celery's workers, and numbers that go from RUN to EVAL."""

from __future__ import annotations

import pytest

from rollout.schema import RolloutRequest, State
from workers.handlers.environments import commands


def test_a_group_plays_in_a_foreign_package_and_a_task_without_a_world_is_dropped(client):
    if not commands.installed("gem"):
        pytest.skip("gem is not installed: rollout environments install gem")
    game = {"env": "game:GuessTheNumber-v0-easy"}
    limits = {"max_turns": 4, "max_response_tokens": 64}
    group = RolloutRequest(handler="gem", task=game, n=3, limits=limits)
    nowhere = RolloutRequest(handler="gem", task={"env": "game:Nowhere-v0"})
    *played, lost = client.run([group, nowhere])
    assert {rollout.state for rollout in played} == {State.COMPLETED}
    assert all(-0.1 <= rollout.reward == rollout.metrics["env_reward"] <= 1 for rollout in played)
    assert len({rollout.metrics["env_seed"] for rollout in played}) == 1
    assert (lost.state, lost.reward, lost.drop, lost.error.blame) == (State.FAILED, None, True, "task")
