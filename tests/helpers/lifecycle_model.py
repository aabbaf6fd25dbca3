"""What `services/state/rollouts/rollouts.lua` promises, said again in plain Python: an oracle for its tests.

One rollout is a `Life`; `Lifecycle` holds all of them with the queue of what is due and the completions.
Times are milliseconds of a clock that only `Lifecycle.now` moves. Written from the promises in
docs/architecture.md, not from the script: where the two differ, one of them is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.schema import Stage, State
from tests.helpers.fair_model import FairOrder

NO_SANDBOX = "-"
WAITS_FOR = {State.QUEUED: Stage.INIT, State.READY: Stage.RUN, State.EVALUATING: Stage.EVAL}
ENTERS = {Stage.INIT: State.INITIALIZING, Stage.RUN: State.RUNNING, Stage.EVAL: State.EVALUATING}


@dataclass
class Life:
    """One rollout."""

    deadline: float
    max_attempts: int
    due: float
    tenant: str
    rank: tuple[float, int]
    state: State = State.QUEUED
    attempt: int = 1
    fence: int = 0
    held: bool = False
    lease: float = 0.0
    kicks: int = 0
    cancelled_at: float | None = None
    """When a cancel was asked for that its worker has yet to hear of."""
    node: str | None = None
    ahead: str | None = None
    """Where it counts between the start of INIT and RUN."""
    pinned: bool = False
    rewards: int = 0
    answers: dict[int, str] = field(default_factory=dict)
    """Fence → the state that its finish was answered with."""
    repeatable: bool = False
    """Whether its handler lets each stage be taken up by another worker."""
    turns: int = 0
    """Entries in the log of this attempt."""
    passed_on: bool = False
    """In RUN, and waits for a worker that takes it over."""
    deaths: int = 0
    """Workers lost in a row while they held it in `deaths_in`, at `deaths_at` turns."""
    deaths_in: Stage | None = None
    deaths_at: int = 0
    spared: int = 0
    """Attempts that a lost worker cost and that do not count."""
    changes: int = 1
    """Entries of the timeline."""

    @property
    def awaited(self) -> Stage | None:
        """The stage that it waits for, if nobody holds it."""
        if self.passed_on:
            return Stage.RUN
        return None if self.held else WAITS_FOR.get(self.state)


class Lifecycle:
    """All rollouts of one Redis."""

    def __init__(
        self,
        *,
        lease: float,
        requeue: float,
        longest: float,
        patience: float,
        priority_step: float,
        order: FairOrder,
    ) -> None:
        """
        Args:
            lease: A holder silent for so long loses its rollout.
            requeue: Time in a queue after which a message is sent again, doubling up to `longest`.
            patience: How long a holder may go on after a cancel or the deadline.
            priority_step: Waiting that is worth one step of priority.
            order: Empty; it is kept from here.
        """
        self.priority_step, self.order = priority_step, order
        self.now = 0.0
        self.lease, self.requeue, self.longest, self.patience = lease, requeue, longest, patience
        self.lives: dict[str, Life] = {}
        self.completions: list[str] = []
        self.retries = 0

    # -- operations, as `RolloutStore` has them -------------------------------------------------

    def submit(
        self,
        rollout_id: str,
        deadline: float,
        max_attempts: int,
        tenant: str,
        priority: int,
        repeatable: bool = False,
    ) -> str:
        if rollout_id in self.lives:
            return self.lives[rollout_id].state.value
        rank = (self.now - priority * self.priority_step, len(self.lives))
        life = Life(self.now + deadline, max_attempts, self.now + self.requeue, tenant, rank)
        life.repeatable = repeatable
        self.lives[rollout_id] = life
        self._line_up(rollout_id, life)
        return "new"

    def claim(self, rollout_id: str, attempt: int, stage: Stage) -> str:
        life = self.lives.get(rollout_id)
        if life is None:
            return "gone"
        if life.state.terminal:
            return "ended"
        if attempt != life.attempt or life.awaited is not stage:
            return "stale"
        if self.now >= life.deadline:
            life.due = self.now
            return "overdue"
        self._take(rollout_id, life, stage)
        return "ok"

    def claim_next(self, node: str, most_on_node: int | None, most_without: int | None) -> str:
        """The id of the rollout that is taken, or `full` or `nobody`."""
        for place, most in ((node, most_on_node), (NO_SANDBOX, most_without)):
            if most is not None and self.ahead(place) >= most:
                return "full"
        while (first := self.order.first()) is not None:
            rollout_id, tenant = first
            life = self.lives[rollout_id]
            if self.now < life.deadline:
                self.order.charge(tenant)
                self._take(rollout_id, life, Stage.INIT)
                life.ahead = node
                return rollout_id
            self.order.remove(rollout_id, tenant)
            life.due = self.now
        return "nobody"

    def ahead(self, place: str) -> int:
        """How many rollouts count at a place."""
        return sum(life.ahead == place for life in self.lives.values())

    def owns(self, rollout_id: str, fence: int) -> bool:
        life = self.lives[rollout_id]
        return life.held and life.fence == fence

    def heartbeat(self, rollout_id: str, fence: int) -> str:
        life = self.lives[rollout_id]
        if not self.owns(rollout_id, fence):
            return "lost"
        stop_at = life.deadline if life.cancelled_at is None else min(life.deadline, life.cancelled_at)
        # Whoever ignores a cancel or the deadline keeps its rollout for a while only.
        life.lease = min(self.now + self.lease, stop_at + self.patience)
        life.due = life.lease
        if life.cancelled_at is not None:
            return "cancel"
        return "overdue" if self.now >= life.deadline else "ok"

    def finish(self, rollout_id: str, fence: int, stage: Stage, to: str) -> str:
        life = self.lives[rollout_id]
        if fence in life.answers and max(life.answers) == fence:
            return life.answers[fence]
        if not self.owns(rollout_id, fence):
            return "lost"
        if life.cancelled_at is not None and to not in ("completed", "failed", "timed_out"):
            to = "cancelled"
        if to == "again" and life.attempt - life.spared >= life.max_attempts:
            to = "failed"
        if to not in ("again", "handback", "passed on", "cancelled") and life.deaths_in is stage:
            life.deaths, life.deaths_in, life.deaths_at = 0, None, 0
        if to == "passed on":
            life.answers[fence] = State.RUNNING.value
            self._pass_on(rollout_id, life)
            return State.RUNNING.value
        if stage is Stage.RUN:
            life.turns = 0
        if to == "again":
            life.attempt += 1
            self.retries += 1
            entered = State.QUEUED
        elif to == "handback":
            entered = State.EVALUATING if stage is Stage.EVAL else State.QUEUED
        else:
            entered = State(to)
        life.answers[fence] = entered.value
        if entered is State.QUEUED:
            life.node, life.pinned, life.turns = None, False, 0
        if to == "completed":
            life.rewards += 1
        self._enter(rollout_id, life, entered)
        if entered.terminal:
            self._end(rollout_id, life)
        else:
            self._wait(life)
        if entered is State.QUEUED and to == "handback":
            self._line_up(rollout_id, life)
        return entered.value

    def cancel(self, rollout_id: str) -> str:
        life = self.lives.get(rollout_id)
        if life is None:
            return "gone"
        if life.state.terminal:
            return "ended"
        if life.held:
            life.cancelled_at = self.now if life.cancelled_at is None else life.cancelled_at
            return "cancelling"
        self._enter(rollout_id, life, State.CANCELLED)
        self._end(rollout_id, life)
        return "cancelled"

    def overdue(self) -> set[tuple[str, str, int, str]]:
        """What the reaper has to do: `(action, id, attempt, stage)`."""
        return {
            verdict
            for rollout_id, life in self.lives.items()
            if not life.state.terminal and life.due <= self.now
            for verdict in [self._judge(rollout_id, life)]
            if verdict is not None
        }

    def _judge(self, rollout_id: str, life: Life) -> tuple[str, str, int, str] | None:
        if life.held and life.lease > self.now:
            life.due = life.lease
            return None
        if self.now >= life.deadline:
            return self._ended(rollout_id, life, State.TIMED_OUT)
        if life.cancelled_at is not None:
            return self._ended(rollout_id, life, State.CANCELLED)
        if life.awaited is not None:
            life.kicks += 1
            life.due = self.now + min(self.requeue * 2**life.kicks, self.longest)
            if life.state is State.QUEUED:
                self._line_up(rollout_id, life)
            return ("send", rollout_id, life.attempt, life.awaited.value)
        return self._bury(rollout_id, life)

    def _bury(self, rollout_id: str, life: Life) -> tuple[str, str, int, str]:
        """A worker is lost. Each is another one, so no other rollout can have been what ended it."""
        (stage,) = (stage for stage, entered in ENTERS.items() if entered is life.state)
        known = life.deaths if life.deaths_in is stage and life.turns <= life.deaths_at else 0
        life.deaths, life.deaths_in, life.deaths_at = known + 1, stage, life.turns
        if life.deaths >= 3:
            return self._ended(rollout_id, life, State.FAILED)
        if life.repeatable and life.deaths == 1:
            return self._resume(rollout_id, life, stage)
        if life.attempt - life.spared >= life.max_attempts:
            return self._ended(rollout_id, life, State.FAILED)
        life.attempt += 1
        self.retries += 1
        if not life.repeatable and life.max_attempts > 1 and life.spared < 6:
            life.spared += 1
        if life.state is State.EVALUATING:
            self._enter(rollout_id, life, State.EVALUATING)
            self._wait(life)
            return ("send", rollout_id, life.attempt, "eval")
        self._restart(rollout_id, life)
        return ("restart", rollout_id, life.attempt, "init")

    def _resume(self, rollout_id: str, life: Life, stage: Stage) -> tuple[str, str, int, str]:
        if stage is Stage.RUN:
            self._pass_on(rollout_id, life)
        elif stage is Stage.INIT:
            self._restart(rollout_id, life)
        else:
            self._enter(rollout_id, life, State.EVALUATING)
            self._wait(life)
        return ("resume", rollout_id, life.attempt, stage.value)

    def _restart(self, rollout_id: str, life: Life) -> None:
        life.node, life.pinned, life.turns = None, False, 0
        self._enter(rollout_id, life, State.QUEUED)
        self._wait(life)
        self._line_up(rollout_id, life)

    def _pass_on(self, rollout_id: str, life: Life) -> None:
        """Whoever held it is shut out by a new fence."""
        life.fence += 1
        self._enter(rollout_id, life, State.RUNNING)
        self._wait(life)
        life.passed_on = True

    # -- what they share ------------------------------------------------------------------------

    def _line_up(self, rollout_id: str, life: Life) -> None:
        if rollout_id not in self.order.line(life.tenant):
            self.order.add(rollout_id, life.tenant, life.rank)

    def _take(self, rollout_id: str, life: Life, stage: Stage) -> None:
        life.fence += 1
        life.held, life.lease = True, self.now + self.lease
        life.due = life.lease
        self._enter(rollout_id, life, ENTERS[stage])

    def _enter(self, rollout_id: str, life: Life, state: State) -> None:
        if life.state is State.QUEUED:
            self.order.remove(rollout_id, life.tenant)
        if life.ahead is not None and state is State.READY:
            life.ahead = life.ahead if life.node else NO_SANDBOX
        elif life.state in (State.INITIALIZING, State.READY):
            life.ahead = None
        life.state, life.passed_on = state, False
        life.changes += 1

    def _wait(self, life: Life) -> None:
        life.held, life.kicks, life.due = False, 0, self.now + self.requeue

    def _end(self, rollout_id: str, life: Life) -> None:
        life.held, life.pinned = False, False
        self.completions.append(rollout_id)

    def _ended(self, rollout_id: str, life: Life, state: State) -> tuple[str, str, int, str]:
        self._enter(rollout_id, life, state)
        self._end(rollout_id, life)
        return ("ended", rollout_id, life.attempt, "")

    def counts(self) -> dict[str, int]:
        """Number of rollouts in each state."""
        counts = dict.fromkeys((state.value for state in State), 0)
        for life in self.lives.values():
            counts[life.state.value] += 1
        return counts
