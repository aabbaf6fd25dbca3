"""What the autoscaler can do: slots of running workers, and nodes of a service on Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from celery import Celery

from services.autoscale.policy import STAGES, NodeState, share_out
from services.launch import SlurmError
from services.launch.slurm.plan import NODE, UpOptions
from services.launch.slurm.stack import DRAIN_GRACE_S, JobView, SlurmStack
from services.state.fleet import Worker

log = structlog.get_logger("autoscale")

REPLY_S = 5.0
"""For workers to answer a control command; one that does not is told again at the next decision."""


class LiveSlots:
    """Slots within what each worker was started with (`-c`), by the control command `set_slots`."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def apply(self, stage: str, slots: int, workers: Sequence[Worker]) -> dict[str, int]:
        """Spread a stage's slots over its workers.

        Returns:
            New slots of each worker that took them.
        """
        own = {one.name: (one.slots, one.most_slots, one.held) for one in workers if stage in one.stages}
        taken: dict[str, int] = {}
        changes = share_out(slots, own)
        for number in sorted(set(changes.values())):
            names = [name for name, wanted in changes.items() if wanted == number]
            replies = self._app.control.broadcast(
                "set_slots", {"slots": number}, names, reply=True, timeout=REPLY_S, limit=len(names)
            )
            for name, answer in (pair for one in replies or () for pair in one.items()):
                if "ok" in answer:
                    taken[name] = number
                else:
                    log.warning("a worker refused its slots", worker=name, slots=number, answer=answer)
        return taken


@dataclass(frozen=True)
class Kind:
    """Nodes that serve the same stages. Only those of all stages can hold sandboxes."""

    stages: tuple[str, ...] = STAGES

    @property
    def name(self) -> str:
        return "nodes" if self.stages == STAGES else "+".join(self.stages)


class NodePool(Protocol):
    """Where nodes come from."""

    def look(self, kind: Kind, workers: Sequence[Worker]) -> NodeState:
        """What there is, those on their way included, those on their way out not."""

    def set(self, kind: Kind, target: int, workers: Sequence[Worker]) -> str:
        """Have so many; what was done, in words."""


class SlurmNodes:
    """Jobs of the service in a run directory, as `rollout slurm scale` and `drain` treat them."""

    def __init__(self, stack: SlurmStack, grace_s: float = DRAIN_GRACE_S) -> None:
        """
        Args:
            grace_s: For the rollouts of a drained node, before they are handed back.
        """
        self._stack, self._grace_s = stack, grace_s

    def look(self, kind: Kind, workers: Sequence[Worker]) -> NodeState:
        """Raises SlurmError when Slurm does not answer or no service runs."""
        views = self._active(kind)
        serving = self._serving(kind, workers)
        up = [view for view in views if view.member and view.member.name in serving]
        return NodeState(
            up=len(up),
            coming=len(views) - len(up),
            slots={stage: self._slots(stage) for stage in kind.stages},
        )

    def set(self, kind: Kind, target: int, workers: Sequence[Worker]) -> str:
        """Raises SlurmError when Slurm refuses."""
        views = self._active(kind)
        if target > len(views):
            job = self._stack.add(target - len(views), kind.stages)
            return f"submitted {target - len(views)} (job {job})"
        held = _held(workers)
        # Those that still wait in Slurm's queue cost nothing; of the others, the ones with the least in hand.
        views.sort(key=lambda view: held.get(view.member.name, 0) if view.member else -1)
        leaving = views[: len(views) - target]
        if not leaving:
            return "nothing to do"
        names = [view.member.name if view.member else view.job.id for view in leaving]
        self._stack.drain(names, self._grace_s)
        return f"draining {', '.join(names)}"

    def _active(self, kind: Kind) -> list[JobView]:
        return self._stack.active(NODE, list(kind.stages))

    def _slots(self, stage: str) -> int:
        saved = self._stack.run.options()
        if saved is None:
            raise SlurmError(f"no service runs from {self._stack.run.path}; `rollout slurm up` starts one")
        return UpOptions.from_json(saved)[0].slots_of(stage)

    @staticmethod
    def _serving(kind: Kind, workers: Sequence[Worker]) -> set[str]:
        """Nodes with a live worker of each of their stages."""
        there: dict[str, set[str]] = {}
        for one in workers:
            there.setdefault(one.node, set()).update(one.stages)
        return {node for node, stages in there.items() if stages.issuperset(kind.stages)}


def _held(workers: Sequence[Worker]) -> Mapping[str, int]:
    """Rollouts in hand by node."""
    held: dict[str, int] = {}
    for one in workers:
        held[one.node] = held.get(one.node, 0) + one.held
    return held
