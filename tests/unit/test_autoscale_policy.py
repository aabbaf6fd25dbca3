"""The autoscaler's decisions, on loads told to it and on simulated services under virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.autoscale.policy import (
    MOST_COMING,
    Bounds,
    Follower,
    Goal,
    Load,
    NodePolicy,
    NodeState,
    need,
    share_out,
    shift_blame,
)
from tests.helpers import virtual_time

GOAL = Goal(wait_s=30.0, spare=0.0, hold_s=300.0, slack=0.1)


def load(**fields):
    return Load(**{"waiting": 0, "oldest_s": 0.0, "busy": 0, "slots": 8, "service_s": 10.0, **fields})


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        # 60 rollouts of 10 s within 30 s: 20 slots, beside the 8 in use.
        ({"waiting": 60, "busy": 8}, 28),
        # No more slots than there are rollouts.
        ({"waiting": 5, "busy": 8, "service_s": 3600.0}, 13),
        # Of a stage that has ended nothing yet, each that waits gets a slot.
        ({"waiting": 5, "slots": 0, "service_s": None}, 5),
        # A wait over the target asks for more whatever the estimate says.
        ({"waiting": 1, "busy": 8, "service_s": 0.01, "oldest_s": 1.0}, 9),
        ({"waiting": 1, "busy": 12, "slots": 12, "service_s": 0.01, "oldest_s": 31.0}, 13),
    ],
)
def test_what_waits_is_to_begin_within_the_target(fields, slots):
    assert need(load(**fields), GOAL) == slots


def test_some_slots_are_kept_free_for_what_comes_next():
    assert need(load(busy=40), Goal(spare=0.1)) == 44


def test_a_queue_before_init_that_waits_for_run_counts_for_run():
    loads = {
        "init": load(waiting=60, oldest_s=50.0, blocked=True, busy=1),
        "run": load(waiting=8, busy=8, oldest_s=5.0),
        "eval": load(),
    }
    shifted = shift_blame(loads)
    assert need(shifted["init"], GOAL) == 1
    assert (shifted["run"].waiting, shifted["run"].oldest_s) == (68, 50.0)
    assert shifted["eval"] == loads["eval"]


def test_capacity_goes_up_at_once_and_down_only_after_the_hold():
    follower = Follower(GOAL, Bounds(0, 100))
    assert follower.target(0.0, 50, have=10, in_use=10) == 50
    assert follower.target(10.0, 5, have=50, in_use=5) == 50
    assert follower.target(299.0, 5, have=50, in_use=5) == 50
    # The need of 50 is more than 300 s ago now.
    assert follower.target(301.0, 5, have=50, in_use=5) == 5


def test_capacity_goes_down_to_the_most_of_the_hold_and_not_for_little():
    follower = Follower(GOAL, Bounds(0, 100))
    for now, needed in ((0, 30), (100, 20), (200, 5), (310, 5)):
        target = follower.target(float(now), needed, have=30, in_use=5)
    assert target == 20
    assert follower.target(311.0, 5, have=21, in_use=5) == 21, "a twentieth is not worth it"


def test_capacity_never_goes_below_what_is_in_use():
    follower = Follower(GOAL, Bounds(0, 100))
    follower.target(0.0, 2, have=40, in_use=12)
    assert follower.target(400.0, 2, have=40, in_use=12) == 12


def test_bounds_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="5:4"):
        Bounds(5, 4)


def test_nodes_are_ordered_for_the_stage_that_is_shortest_of_them():
    policy = NodePolicy(GOAL, Bounds(1, 100))
    nodes = NodeState(up=2, coming=0, slots={"init": 16, "run": 64, "eval": 16})
    assert policy.target(0.0, {"init": 20, "run": 300, "eval": 10}, {}, nodes) == (5, "run")


def test_nodes_on_their_way_are_not_ordered_again_and_a_full_cluster_not_for_ever():
    policy = NodePolicy(GOAL, Bounds(0, 1000))
    slots, have, ordered = {"run": 10}, 2, []
    coming = 0
    for tick in range(20):
        target, _ = policy.target(tick * 10.0, {"run": 5000}, {}, NodeState(have, coming, slots))
        ordered.append(target - have - coming)
        coming = target - have
    # None of them ever starts: after two orders no more are given.
    assert ordered == [8, 8] + [0] * 18
    # Enough for what is needed: 3 of the 4 are coming.
    policy = NodePolicy(GOAL, Bounds(0, 1000))
    assert policy.target(0.0, {"run": 40}, {}, NodeState(1, 3, slots))[0] == 4


def test_nodes_that_are_not_needed_any_more_are_given_up_while_they_still_wait_in_the_queue():
    policy = NodePolicy(GOAL, Bounds(1, 100))
    slots = {"run": 10}
    assert policy.target(0.0, {"run": 100}, {}, NodeState(2, 0, slots))[0] == 10
    assert policy.target(400.0, {"run": 15}, {"run": 15}, NodeState(2, 8, slots))[0] == 2


def test_slots_are_spread_evenly_and_none_gets_less_than_it_holds():
    workers = {"a": (4, 10, 6), "b": (4, 10, 0), "c": (4, 3, 0)}
    assert share_out(14, workers) == {"a": 6, "b": 5, "c": 3}
    assert share_out(99, workers) == {"a": 10, "b": 10, "c": 3}
    assert share_out(0, workers) == {"a": 6, "b": 1, "c": 1}
    assert share_out(11, {"a": (6, 10, 6), "b": (5, 10, 0)}) == {}


@given(
    ticks=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), min_size=1, max_size=80),
    least=st.integers(0, 10),
    span=st.integers(0, 200),
)
@settings(deadline=None)
def test_whatever_the_load_capacity_keeps_its_bounds_holds_what_is_busy_and_waits_before_it_shrinks(
    ticks, least, span
):
    bounds = Bounds(least, least + span)
    follower = Follower(GOAL, bounds)
    have, grown_at, now = least, None, 0.0
    for needed, busy in ticks:
        busy = min(busy, have)
        target = follower.target(now, needed, have, busy)
        assert bounds.least <= target <= bounds.most
        assert target >= min(busy, bounds.most)
        if target < have:
            assert now >= GOAL.hold_s
            assert grown_at is None or now - grown_at >= GOAL.hold_s
        elif target > have:
            assert target <= max(needed, bounds.least)
            grown_at = now
        have, now = target, now + 10.0


# -- simulated services ------------------------------------------------------------------------

TICK_S = 10.0


@dataclass
class Simulation:
    """RUN of a service on nodes of four slots, under virtual time. Rollouts take 5 to 15 s."""

    goal: Goal = field(default_factory=lambda: Goal(wait_s=30.0, spare=0.1, hold_s=300.0))
    bounds: Bounds = field(default_factory=lambda: Bounds(1, 60))
    starts_in_s: float = 45.0
    """From the order of a node until it serves."""
    per_node: int = 4
    up: int = 1
    coming: int = 0
    ordered: int = 0
    busy: int = 0
    queue: deque[float] = field(default_factory=deque)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(time of arrival, seconds waited)"""
    nodes: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self):
        self.chance = random.Random(7)
        self.tasks = set()
        self.policy = NodePolicy(self.goal, self.bounds)

    @property
    def now(self):
        return asyncio.get_running_loop().time()

    def spawn(self, work):
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def take(self):
        while self.queue and self.busy < self.up * self.per_node:
            came = self.queue.popleft()
            self.waits.append((came, self.now - came))
            self.busy += 1
            self.spawn(self.serve())

    async def serve(self):
        await asyncio.sleep(self.chance.uniform(5, 15))
        self.busy -= 1
        self.take()

    async def start_node(self):
        await asyncio.sleep(self.starts_in_s)
        self.coming -= 1
        self.up += 1
        self.take()

    async def scale(self):
        while True:
            oldest = self.now - self.queue[0] if self.queue else 0.0
            load = Load(len(self.queue), oldest, self.busy, self.up * self.per_node, 10.0)
            # Rollouts sit on as few nodes as hold them: the rest may be drained at once.
            busy = -(-self.busy // self.per_node)
            state = NodeState(self.up, self.coming, {"run": self.per_node})
            needs = {"run": need(load, self.goal)}
            target, _ = self.policy.target(self.now, needs, {"run": self.busy}, state)
            for _ in range(target - state.total):
                self.coming += 1
                self.ordered += 1
                self.spawn(self.start_node())
            if target < state.total:
                assert target >= busy, "a node that works was drained"
                self.up -= state.total - target
            self.nodes.append((self.now, self.up))
            await asyncio.sleep(TICK_S)

    async def arrive(self, rate, seconds):
        """Rollouts come at `rate(now)` a second."""
        end = self.now + seconds
        while self.now < end:
            per_s = rate(self.now)
            await asyncio.sleep(self.chance.expovariate(per_s) if per_s else 1.0)
            if per_s:
                self.queue.append(self.now)
                self.take()

    def run(self, rate, seconds, *extra):
        async def main():
            self.spawn(self.scale())
            for process in extra:
                self.spawn(process(self))
            await self.arrive(rate, seconds)

        virtual_time.run(main())
        return self

    def waited(self, since, until):
        return [wait for came, wait in self.waits if since <= came < until]

    def turns(self):
        """How often the number of nodes went up after it had gone down, or the other way."""
        steps = [b - a for (_, a), (_, b) in pairwise(self.nodes) if a != b]
        return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def test_a_step_of_load_is_served_within_the_target_once_nodes_have_started():
    done = Simulation().run(lambda now: 0.4 if now < 600 else 8.0, 2400)
    assert max(done.waited(0, 600)) < 30
    # 8 a second of 10 s each: 80 slots. A start takes 45 s, and then what has piled up is worked off.
    assert max(done.waited(900, 2400)) < 30
    assert 20 <= done.nodes[-1][1] <= 30


def test_a_burst_is_worked_off_and_its_nodes_go_again():
    done = Simulation().run(lambda now: 12.0 if 300 <= now < 360 else 0.2, 2400)
    assert max(nodes for _, nodes in done.nodes) > 10
    assert max(done.waited(600, 2400)) < 30
    assert done.nodes[-1][1] <= 2
    assert done.turns() <= 2, "up, down, and perhaps one for what comes now and then"


def test_load_that_comes_and_goes_faster_than_the_hold_does_not_make_nodes_flap():
    done = Simulation().run(lambda now: 4.0 if now % 240 < 120 else 0.4, 3600)
    first = 600
    assert max(done.waited(first, 3600)) < 30
    later = {nodes for at, nodes in done.nodes if at >= first}
    # The load changes tenfold every two minutes; by chance some of its peaks are higher than others.
    assert min(later) >= 0.6 * max(later)


def test_nodes_that_are_lost_are_replaced():
    async def lose(simulation):
        await asyncio.sleep(900)
        # What they held waits again, as if it had come just now.
        lost, simulation.up = simulation.up // 2, simulation.up - simulation.up // 2
        simulation.queue.extend([simulation.now] * (lost * simulation.per_node))

    done = Simulation().run(lambda now: 4.0, 2400, lose)
    before = next(nodes for at, nodes in done.nodes if at >= 890)
    assert next(nodes for at, nodes in done.nodes if at >= 905) <= before // 2 + 1
    assert max(done.waited(1200, 2400)) < 30
    assert done.nodes[-1][1] >= 10


def test_a_cluster_that_starts_nothing_is_not_asked_for_ever():
    done = Simulation(starts_in_s=1e9).run(lambda now: 8.0, 1200)
    assert done.ordered == MOST_COMING


def test_nothing_is_kept_without_load_where_none_is_asked_for():
    done = Simulation(bounds=Bounds(0, 60)).run(lambda now: 2.0 if now < 600 else 0.0, 1500)
    assert max(nodes for _, nodes in done.nodes) >= 5
    assert done.nodes[-1][1] == 0
