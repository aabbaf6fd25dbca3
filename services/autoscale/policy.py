"""How much capacity each stage should have. Pure: numbers and a clock in, numbers out.

Need, by Little's law: what is in hand takes `busy` slots; to begin everything that waits within the target
`wait_s` takes another `waiting x service_s / wait_s`. More is given at once; less only when nothing in the
last `hold_s` needed more, so that a load that comes and goes does not make capacity flap, and never less than
is busy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollout.schema import Stage

STAGES = INIT, RUN, _ = tuple(stage.value for stage in Stage)
MOST_AT_ONCE = 8
"""Nodes ordered by one decision."""
MOST_COMING = 16
"""Nodes that may be on their way: a full cluster is not asked for ever more."""


@dataclass(frozen=True)
class Load:
    """What one stage has to do now."""

    waiting: int
    """Rollouts that could be claimed for it."""
    oldest_s: float
    """For how long the one that has waited longest has."""
    busy: int
    """Rollouts in hand."""
    slots: int
    """Of its live workers, those of nodes that take nothing left out."""
    service_s: float | None
    """Mean seconds at work lately; None = none has ended yet."""
    blocked: bool = False
    """What waits waits for another stage: more slots here would stand idle."""


@dataclass(frozen=True)
class Goal:
    """What capacity is chosen for."""

    wait_s: float = 30.0
    """Target of the wait in each stage's queue, in seconds."""
    spare: float = 0.1
    """Share of the slots in use that is kept free on top of them, so that what comes next need not wait."""
    hold_s: float = 300.0
    """Capacity is lowered to the most that was needed in so many seconds."""
    slack: float = 0.1
    """It is not lowered for less than this share of it."""


@dataclass(frozen=True)
class Bounds:
    """Of slots, or of nodes."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"bounds {self.least}:{self.most}: 0 <= least <= most must hold")

    def clamp(self, value: int) -> int:
        return min(max(value, self.least), self.most)


def need(load: Load, goal: Goal) -> int:
    """Slots that the stage should have for what it has to do now; 0 = none."""
    if load.blocked:
        return load.busy
    # Of a stage that has ended nothing yet, each that waits is taken to need a slot of its own.
    service_s = goal.wait_s if load.service_s is None else load.service_s
    # No more slots than rollouts: shorter than its own work no wait can be made.
    backlog = min(load.waiting, math.ceil(load.waiting * service_s / goal.wait_s))
    slots = load.busy + backlog
    if load.waiting and load.oldest_s > goal.wait_s and load.busy >= load.slots:
        # The estimate was too low, or what is in hand takes longer than what ended lately.
        slots = max(slots, load.slots + 1)
    # What waits and finds a free slot needs no other one: a claim is under way.
    return slots + math.ceil(goal.spare * load.busy)


def shift_blame(loads: Mapping[str, Load]) -> dict[str, Load]:
    """Count what waits for INIT, where INIT waits for RUN, as waiting for RUN.

    INIT is bounded ahead of RUN: a queue before it then says that RUN is short of slots.
    """
    shifted = dict(loads)
    init, run = loads[INIT], loads[RUN]
    if init.blocked and init.waiting:
        shifted[RUN] = replace(
            run, waiting=run.waiting + init.waiting, oldest_s=max(run.oldest_s, init.oldest_s)
        )
    return shifted


class Follower:
    """Turns what is needed now into what there should be: up at once, down with patience."""

    def __init__(self, goal: Goal, bounds: Bounds) -> None:
        self._goal, self._bounds = goal, bounds
        self._since: float | None = None
        self._needs: deque[tuple[float, int]] = deque()
        """Time and value of what was needed in the last `hold_s` seconds, where it may become the most."""

    def target(self, now: float, needed: int, have: int, in_use: int) -> int:
        """What there should be.

        Args:
            now: Monotonic seconds.
            needed: For the load of this moment.
            have: What there is, what has been ordered included.
            in_use: What must stay, whatever the bounds are.
        """
        most = self._most_needed(now, needed)
        if needed > have:
            return max(have, self._bounds.clamp(needed))
        if have < self._bounds.least:
            return self._bounds.least
        if most is None:
            return have
        lower = max(self._bounds.clamp(most), in_use)
        # Over its bound it goes down however little that is.
        if lower >= have or (have - lower <= self._goal.slack * have and have <= self._bounds.most):
            return have
        return lower

    def _most_needed(self, now: float, needed: int) -> int | None:
        """The most that was needed in the last `hold_s` seconds; None = they have not passed yet."""
        self._since = now if self._since is None else self._since
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((now, needed))
        while self._needs[0][0] < now - self._goal.hold_s:
            self._needs.popleft()
        return self._needs[0][1] if now - self._since >= self._goal.hold_s else None


@dataclass(frozen=True)
class NodeState:
    """Nodes of one kind."""

    up: int
    """Serving."""
    coming: int
    """Ordered and not serving yet: waiting in Slurm's queue, or starting."""
    slots: Mapping[str, int]
    """Stage → slots that one of them brings."""

    @property
    def total(self) -> int:
        return self.up + self.coming


class NodePolicy:
    """How many nodes there should be for what the stages need."""

    def __init__(self, goal: Goal, bounds: Bounds) -> None:
        self._follower = Follower(goal, bounds)

    def target(
        self, now: float, needs: Mapping[str, int], busy: Mapping[str, int], nodes: NodeState
    ) -> tuple[int, str]:
        """Nodes there should be, those on their way included, and the stage that asks for them.

        Args:
            needs: Stage → slots that it should have of these nodes.
            busy: Stage → slots in use: nodes for so many stay, whatever the bounds are.
        """
        asking, needed = _filled(needs, nodes.slots)
        _, in_use = _filled(busy, nodes.slots)
        target = self._follower.target(now, needed, nodes.total, min(in_use, nodes.up))
        if target > nodes.total:
            room = max(0, MOST_COMING - nodes.coming)
            target = nodes.total + min(target - nodes.total, MOST_AT_ONCE, room)
        return target, asking if needed else ""


def _filled(slots: Mapping[str, int], per_node: Mapping[str, int]) -> tuple[str, int]:
    """The stage that fills the most nodes with so many slots, and how many those are."""
    nodes = {
        stage: math.ceil(count / per_node[stage]) for stage, count in slots.items() if per_node.get(stage)
    }
    return max(nodes.items(), key=lambda pair: pair[1], default=("", 0))


def share_out(slots: int, workers: Mapping[str, tuple[int, int, int]]) -> dict[str, int]:
    """Spread a stage's slots over its workers, evenly, each between 1 and what it may have.

    Args:
        workers: Name → (slots now, most it may have, rollouts in hand). None is given less than it holds, as
            far as the sum allows.

    Returns:
        Slots of those that change.
    """
    shares = {name: min(most, max(1, held)) for name, (_, most, held) in workers.items()}
    rest = slots - sum(shares.values())
    # The one with the least goes next; a heap is not worth it for the size of a fleet.
    while rest > 0 and (open_ := [name for name in shares if shares[name] < workers[name][1]]):
        least = min(shares[name] for name in open_)
        for name in sorted(name for name in open_ if shares[name] == least)[:rest]:
            shares[name] += 1
            rest -= 1
    return {name: value for name, value in shares.items() if value != workers[name][0]}
