"""How many engines a policy should have, and that sandbox nodes are not ordered for what only they lack."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.schema import Backend, BackendStats
from services.autoscale.policy import (
    Bounds,
    Goal,
    Load,
    NodePolicy,
    NodeState,
    Waiting,
    engine_need,
    hold_back,
    need,
    used,
)

GOAL = Goal(wait_s=30.0, spare=0.1, hold_s=300.0)
ADMIT = 0.5


def server(load=0.0, most_tokens=None, rollouts=0, most=None, **stats):
    """A server that lets in so many tokens, and says so much of itself."""
    return Backend.model_construct(
        id="s",
        load=load,
        capacity_tokens=most_tokens and round(most_tokens / ADMIT),
        live_rollouts=rollouts,
        max_rollouts=most,
        stats=BackendStats(at=1.0, **stats) if stats else None,
    )


FULL = server(1000, 1000, 4)
HALF = server(500, 1000, 2)


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (server(300, 600, 9), 0.5),
        (server(900, 600), 1.5),
        # The limit that is reached first keeps others out.
        (server(300, 600, 9, 10), 0.9),
        (server(300, None, 5, 10, kv_usage=0.99), 0.5),
        # No limit is known: the engine's own word, its queue included.
        (server(rollouts=5, running=4, waiting=0, kv_usage=0.25), 0.25),
        (server(rollouts=5, running=4, waiting=2, kv_usage=0.9), 1.5),
        (server(rollouts=5, running=0, waiting=3), 3.0),
        (server(rollouts=5, running=3), 0.0),
        # It says nothing: whoever is there is not to be disturbed.
        (server(rollouts=1), 1.0),
        (server(rollouts=1, generation_tokens=5), 1.0),
        (server(), 0.0),
    ],
)
def test_what_is_in_use_is_told_by_the_first_measure_that_is_known(one, share):
    assert used(one, ADMIT) == pytest.approx(share)


def test_where_placements_count_rollouts_tokens_say_nothing():
    assert used(server(3, 1000, 3, 4), 0.0) == 0.75
    assert used(server(3, 1000, 3, kv_usage=0.5), 0.0) == 0.5


@pytest.mark.parametrize(
    ("own", "others", "waiting", "each", "needed"),
    [
        ([FULL, HALF], [], Waiting(), 1, (2, 2)),
        ([HALF, HALF], [], Waiting(), 1, (1, 1)),
        ([FULL], [], Waiting(1, 10), 1, (2, 1)),
        ([FULL], [], Waiting(9, 2500), 1, (4, 1)),
        # By rollouts, where tokens are not known; whichever is more, where both are.
        ([server(rollouts=4, most=4)], [], Waiting(9), 1, (4, 1)),
        ([server(1000, 1000, 4, 4)], [], Waiting(9, 1000), 1, (4, 1)),
        # Nobody's size is known, or there is nobody: one more.
        ([server(rollouts=3)], [], Waiting(9, 9000), 1, (2, 1)),
        ([], [], Waiting(9, 9000), 1, (1, 1)),
        ([], [], Waiting(), 1, (0, 0)),
        # Four servers a job.
        ([FULL, FULL, FULL, HALF], [], Waiting(1, 600), 4, (2, 1)),
        # What others can hold needs none of ours, unless it waits in spite of them.
        ([HALF], [HALF], Waiting(), 1, (1, 1)),
        ([server(0, 1000)], [FULL], Waiting(), 1, (0, 0)),
        ([], [HALF], Waiting(1, 700), 1, (1, 1)),
        ([], [FULL], Waiting(4, 1500), 1, (2, 1)),
    ],
)
def test_engines_are_needed_for_what_is_reserved_and_what_waits(own, others, waiting, each, needed):
    assert engine_need(own, others, waiting, ADMIT, each) == needed


COUNTS = st.none() | st.integers(0, 20)
SERVERS = st.builds(
    server,
    load=st.floats(0, 5000),
    most_tokens=st.none() | st.integers(500, 2000),
    rollouts=st.integers(0, 20),
    most=st.none() | st.integers(1, 20),
    running=COUNTS,
    waiting=COUNTS,
    kv_usage=st.none() | st.floats(0, 1),
)
WAITING = st.just(Waiting()) | st.builds(Waiting, st.integers(1, 200), st.floats(0, 100_000))


@given(
    ticks=st.lists(st.tuples(st.lists(SERVERS, max_size=6), WAITING), min_size=1, max_size=60),
    others=st.lists(SERVERS, max_size=2),
    least=st.integers(0, 3),
    span=st.integers(0, 12),
)
@settings(deadline=None)
def test_whatever_the_load_engines_in_use_stay_the_bounds_hold_and_none_goes_before_the_hold(
    ticks, others, least, span
):
    bounds = Bounds(least, least + span)
    policy = NodePolicy(GOAL, bounds)
    have, grown_at, now = least, None, 0.0
    for servers, waiting in ticks:
        own = servers[:have]
        needed, in_use = engine_need(own, others, waiting, ADMIT)
        assert needed >= in_use >= sum(used(one, ADMIT) for one in own) - 1e-6
        assert needed >= 1 or not waiting.rollouts
        target, _ = policy.target(
            now, {"engines": needed}, {"engines": in_use}, NodeState(have, 0, {"engines": 1})
        )
        assert bounds.least <= target <= bounds.most
        assert target >= min(in_use, have, bounds.most)
        assert target >= 1 or not (waiting.rollouts and have and bounds.most)
        if needed > have:
            assert target == min(max(needed, bounds.least), bounds.most, have + 8), "up at once"
            grown_at = now if target > have else grown_at
        if target < have:
            assert now >= GOAL.hold_s and (grown_at is None or now - grown_at >= GOAL.hold_s)
        have, now = target, now + 20.0


def test_a_load_that_comes_and_goes_within_the_hold_does_not_make_engines_flap():
    policy, have, seen = NodePolicy(GOAL, Bounds(1, 8)), 1, []
    for tick in range(400):
        # Each minute a step of training: its rollouts fill three engines and end again.
        rollouts = 3000 if tick % 6 < 3 else 0
        on = min(rollouts, have * 1000)
        own = [server(on / have, 1000)] * have
        needed, in_use = engine_need(own, [], Waiting(int(rollouts > on), rollouts - on), ADMIT)
        have, _ = policy.target(
            tick * 10.0, {"engines": needed}, {"engines": in_use}, NodeState(have, 0, {"engines": 1})
        )
        seen.append(have)
    assert seen[:3] == [3, 3, 3] and set(seen) == {3}


def test_what_would_only_wait_for_room_on_an_engine_is_no_reason_for_more_slots():
    loads = {
        stage: Load(waiting=60, oldest_s=50.0, busy=8, slots=8, service_s=10.0)
        for stage in ("init", "run", "eval")
    }
    assert {stage: need(load, GOAL) for stage, load in loads.items()} == dict.fromkeys(loads, 29)
    held = {stage: need(load, GOAL) for stage, load in hold_back(loads, 1.0).items()}
    assert held == {"init": 8, "run": 8, "eval": 29}
    # Half of it is of a policy whose engines have room.
    assert need(hold_back(loads, 0.5)["run"], GOAL) == 8 + 10 + 1
