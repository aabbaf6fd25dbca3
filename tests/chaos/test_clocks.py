"""The clock of Redis jumps, and that of a node is wrong: no rollout that is under way notices."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from rollout.schema import State
from services.state.fleet import FleetStore
from tests.chaos.harness import STAGES, Chaos
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import NODE, RedisServer
from tests.helpers.wrong_clock import WrongClock

HOURS_S = 2 * 3600.0
EACH = 8
SETTLE_S = 5.0
"""Longer than a lease, which is 3 s here: by then everything that is to go wrong has."""


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    return WrongClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def chaos(tmp_path_factory, clock):
    directory = tmp_path_factory.mktemp("clocks")
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as sandboxes:
        try:
            redis = RedisServer(directory, env={**os.environ, **clock.env})
            with Chaos(directory, Path(sandboxes), redis=redis) as service:
                service.start_stages()
                yield service
        finally:
            stop_host(Path(sandboxes))


@pytest.mark.parametrize("jump_s", [HOURS_S, -HOURS_S], ids=["forward", "back"])
def test_a_jump_of_redis_clock_costs_live_rollouts_nothing(chaos, clock, jump_s):
    """Past every lease and every deadline: those in the workers' hands, and those that wait."""
    held = {stage: chaos.submit_up_to(stage, EACH) for stage in STAGES}
    for stage, (_, gates) in held.items():
        chaos.wait_for_arrived(gates, stage, EACH)
    before = time.time() + _offset(chaos)
    clock.set(_offset(chaos) + jump_s)
    assert abs(time.time() + _offset(chaos) - before - jump_s) < 30, "the clock did not jump"
    time.sleep(SETTLE_S)
    for _, gates in held.values():
        for stage in STAGES:
            (gates / stage).touch()
    ids = [rollout_id for some, _ in held.values() for rollout_id in some]
    chaos.wait_for_ends(ids)
    for rollout_id in ids:
        item = chaos.client.get(rollout_id, include="summary")
        assert (item.state, item.attempt, item.error) == (State.COMPLETED, 1, None), item


def test_a_worker_that_dies_after_the_clock_went_back_is_missed_as_soon(chaos, clock):
    """Its leases were times of the clock as it was, hours ahead of now."""
    ids, gates = chaos.submit_up_to("run", EACH)
    chaos.wait_for_arrived(gates, "run", EACH)
    chaos.kill_workers(["run"])
    clock.set(_offset(chaos) - HOURS_S)
    chaos.start_stages(["run"])
    (gates / "run").touch()
    (gates / "eval").touch()
    chaos.wait_for_ends(ids)
    assert {chaos.client.get(rollout_id, include="summary").state for rollout_id in ids} == {State.COMPLETED}


def test_the_clock_of_a_node_does_not_matter(chaos, tmp_path_factory):
    behind = WrongClock(tmp_path_factory.mktemp("behind"))
    behind.set(-40)
    chaos.kill_workers(["run"])
    usual = dict(chaos.env)
    chaos.env.update(behind.env)
    try:
        chaos.start_stages(["run"])
    finally:
        chaos.env.clear()
        chaos.env.update(usual)
    ids, gates = chaos.submit_up_to("run", EACH)
    chaos.wait_for_arrived(gates, "run", EACH)
    assert f"{chaos.workers['run'].name}@{NODE}" in FleetStore(chaos.redis.client).alive()["run"]
    time.sleep(SETTLE_S)
    (gates / "run").touch()
    (gates / "eval").touch()
    chaos.wait_for_ends(ids)
    for rollout_id in ids:
        item = chaos.client.get(rollout_id, include="summary")
        assert (item.state, item.attempt) == (State.COMPLETED, 1)


def _offset(chaos) -> float:
    """How far Redis' clock is ahead of ours."""
    seconds, _ = chaos.redis.client.time()
    return round(seconds - time.time())
