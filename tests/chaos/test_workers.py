"""Workers that die and workers that sleep, with 50 and more leases in their hands."""

from __future__ import annotations

import signal

import pytest

from rollout.schema import State
from tests.chaos.harness import PATIENCE_S, STAGES
from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import wait_until

LEASES = 55
KILLS = CHAOS("kills of workers", short=1, long=2)
SPARED = 2
"""A rollout that saw so many workers end is carried alone, as tests/integration/test_poison.py shows."""


TARGETS = CHAOS(
    "stages whose workers are killed", short=[STAGES], long=[*((stage,) for stage in STAGES), STAGES]
)
"""Which workers are killed: one stage's after the other in the long form, and all at once."""


@pytest.mark.parametrize("stages", TARGETS, ids="-".join)
def test_workers_killed_with_many_leases_cost_attempts_and_no_rollout(chaos, stages):
    """Each has 50 and more leases in hand, of rollouts that can go no further than its stage."""
    batches = {stage: chaos.submit_up_to(stage, LEASES) for stage in STAGES}
    for _ in range(KILLS):
        for stage in stages:
            # By the one that is killed now: the leases of the one before have yet to run out.
            chaos.wait_for_held(batches[stage][0], stage, LEASES, chaos.workers[stage].name)
        chaos.kill_workers(stages)
        chaos.start_stages(stages)
    for stage, (ids, gates) in batches.items():
        alone = stage in stages and KILLS >= SPARED
        chaos.wait_for_held(ids, stage, 1 if alone else LEASES)
        for each in STAGES:
            (gates / each).touch()
    chaos.require_exact([rollout_id for ids, _ in batches.values() for rollout_id in ids])
    for stage in stages:
        for rollout_id in batches[stage][0]:
            item = chaos.client.get(rollout_id, include="summary")
            assert item.state is State.COMPLETED and item.attempt >= KILLS + 1


def test_a_worker_that_sleeps_past_its_leases_writes_nothing_when_it_wakes(chaos):
    gates = chaos.gates()
    (gates / "init").touch()
    ids = chaos.submit(LEASES, gates)
    chaos.wait_for_arrived(gates, "run", LEASES)
    sleeper = chaos.workers.pop("run")
    sleeper.popen.send_signal(signal.SIGSTOP)
    try:
        chaos.start_stages(["run"])
        chaos.wait_for_held(ids, "run", LEASES, chaos.workers["run"].name)
        (gates / "run").touch()
        (gates / "eval").touch()
        chaos.wait_for_ends(ids)
        ended = {i: chaos.client.get(i, include="summary").timeline for i in ids}
        sleeper.popen.send_signal(signal.SIGCONT)
        wait_until(
            lambda: sleeper.log.read_text(errors="replace").count("outcome refused") >= LEASES,
            PATIENCE_S,
            "the fence to refuse all outcomes",
            sleeper,
        )
    finally:
        sleeper.popen.send_signal(signal.SIGCONT)
        sleeper.kill()
    chaos.require_exact(ids)
    for rollout_id in ids:
        item = chaos.client.get(rollout_id, include="summary")
        assert item.timeline == ended[rollout_id], "nothing was written after the end"
        assert item.attempt == 2 and item.reward == 1.0
