"""How much capacity each stage should have, and each policy. Pure: numbers and a clock in, numbers out.

Need, by Little's law: what is in hand takes `busy` slots; to begin everything that waits within the target
`wait_s` takes another `waiting x service_s / wait_s`. More is given at once; less only when nothing in the
last `hold_s` needed more, so that a load that comes and goes does not make capacity flap, and never less than
is busy. Engines follow what is reserved on them and what waits for room there, by the same rules of up and
down.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from rollout.schema import Backend, Stage

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
    engines: float = 0.0
    """Share of what waits here that would in the next step only wait for room on an LLM backend."""


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
    # In more slots it would wait as well.
    waiting = math.floor(load.waiting * (1 - load.engines))
    # Of a stage that has ended nothing yet, each that waits is taken to need a slot of its own.
    service_s = goal.wait_s if load.service_s is None else load.service_s
    # No more slots than rollouts: shorter than its own work no wait can be made.
    backlog = min(waiting, math.ceil(waiting * service_s / goal.wait_s))
    slots = load.busy + backlog
    if waiting and load.oldest_s > goal.wait_s and load.busy >= load.slots:
        # The estimate was too low, or what is in hand takes longer than what ended lately.
        slots = max(slots, load.slots + 1)
    # What waits and finds a free slot needs no other one: a claim is under way.
    return slots + math.ceil(goal.spare * load.busy * (1 - load.engines))


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


def hold_back(loads: Mapping[str, Load], share: float) -> dict[str, Load]:
    """Note the share of what waits for INIT and RUN that would only wait for room on an engine.

    RUN would hold more slots without a use for them, and INIT prepare more for it. EVAL has work of its own.
    """
    return {
        stage: replace(load, engines=share if stage in (INIT, RUN) else 0.0) for stage, load in loads.items()
    }


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


class Waiting(NamedTuple):
    """What waits for room on the servers of a policy."""

    rollouts: int = 0
    tokens: float = 0.0
    """Context that they want to reserve there."""


def used(server: Backend, admit: float) -> float:
    """Share of an LLM server's room in use; above 1 where rollouts have grown since they were let in.

    As admission has it, which lets nobody in beyond the first limit that is reached. Where it knows of no
    limit, as the server has it: the share of its cache, or how many times over its calls would fill it. Where
    that says nothing either, a server with rollouts is full: it is not taken from them.

    Args:
        admit: Share of a cache that new rollouts may fill; 0 = placements do not count tokens.
    """
    most_tokens, stats = admit * (server.capacity_tokens or 0), server.stats
    limits = (server.load, most_tokens), (server.live_rollouts, server.max_rollouts)
    if known := [part / whole for part, whole in limits if whole]:
        return max(known)
    if stats is None or (stats.kv_usage is None and stats.running is None):
        return float(server.live_rollouts > 0)
    running = stats.running or 0
    calls = running + stats.waiting if stats.waiting else 0
    return max(stats.kv_usage or 0.0, calls / max(1, running))


def engine_need(
    own: Sequence[Backend],
    others: Sequence[Backend],
    waiting: Waiting,
    admit: float,
    servers_each: float = 1.0,
) -> tuple[int, int]:
    """Engines that there should be of a policy, and how many of them have to stay, whatever the bounds are.

    A server is the unit. What is in use fills the sum of the shares; what waits would fill its tokens over
    those that one server lets in, or its number over the most rollouts of one, whichever is more. Where no
    server's limits are known, be it that there is none, something that waits is a reason for one: the next
    look knows more. None is needed for what the servers of others can hold; but what waits found no room
    there, so then only what they hold too much counts. Those in use stay, and one while something waits.

    Args:
        own: Of engines that are scaled, `servers_each` of each.
        others: Servers that nobody scales, or that are of another kind.
    """
    tokens = [
        admit * server.capacity_tokens for server in (*own, *others) if admit and server.capacity_tokens
    ]
    rollouts = [server.max_rollouts for server in (*own, *others) if server.max_rollouts]
    limits = (waiting.tokens, tokens), (waiting.rollouts, rollouts)
    shares = [part / fmean(known) for part, known in limits if known]
    lacking = max(shares, default=1.0) if waiting.rollouts else 0.0
    own_used = sum(used(server, admit) for server in own)
    over = [used(server, admit) - 1 for server in others]
    beyond = sum(max(0.0, share) for share in over) if waiting.rollouts else sum(over)
    least = int(waiting.rollouts > 0)
    # But for what adding up fractions has made too much.
    needed, in_use = (math.ceil(n / servers_each - 1e-9) for n in (own_used + lacking + beyond, own_used))
    return max(needed, in_use, least), max(in_use, least)


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
