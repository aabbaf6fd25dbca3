"""Which groups a trainer learns from: filters by name, ours and those of entry points (`rollout.filters`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

import structlog

from rollout.batch import BatchRequest, FilterSpec, Verdict
from rollout.schema import Rollout, State
from rollout.trajectory import FinishReason

log = structlog.get_logger("filters")

GROUP = "rollout.filters"
TOLERANCE = 1e-9
"""Rewards that differ by less are the same: a group of them has no advantage."""


@dataclass(frozen=True)
class Decision:
    """What becomes of a group."""

    verdict: Verdict
    reason: str | None
    scored: int
    dropped: int


Filter = Callable[..., str | None]
"""(scored rollouts of a group, **options) → why the group is of no use, in a word or two, or None."""


def uniform_reward(rollouts: Sequence[Rollout]) -> str | None:
    """All rewards are the same, so every advantage is 0 (DAPO)."""
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    return "uniform_reward" if max(rewards) - min(rewards) <= TOLERANCE else None


def all_below(rollouts: Sequence[Rollout], reward: float = 0.0) -> str | None:
    """No rollout was better than that: the prompt is too hard for now."""
    return "all_below" if max(rollout.reward or 0.0 for rollout in rollouts) <= reward else None


def too_long(rollouts: Sequence[Rollout], share: float = 0.5) -> str | None:
    """More than this share of the rollouts was cut off by a limit on tokens or turns."""
    cut = {
        FinishReason.TOKEN_LIMIT,
        FinishReason.LENGTH,
        FinishReason.CONTEXT_LENGTH,
        FinishReason.TURN_LIMIT,
    }
    cut_off = sum(rollout.finish_reason in cut for rollout in rollouts)
    return "too_long" if cut_off > share * len(rollouts) else None


BUILT_IN: dict[str, Filter] = {kind.__name__: kind for kind in (uniform_reward, all_below, too_long)}


class Filters:
    """The filters of this process."""

    def __init__(self) -> None:
        self._filters = dict(BUILT_IN)
        for point in entry_points(group=GROUP):
            try:
                self._filters[point.name] = point.load()
            except Exception:
                log.exception("filter could not be loaded", entry_point=point.value)

    def names(self) -> list[str]:
        """The names of all filters."""
        return sorted(self._filters)

    def decide(self, config: BatchRequest, rollouts: Sequence[Rollout]) -> Decision:
        """The verdict on a group whose rollouts have all ended.

        A filter that is not here, or fails, keeps nobody waiting: the group fails with that as its reason.
        """
        scored = [rollout for rollout in rollouts if rollout.reward is not None and not rollout.drop]
        counts = len(scored), len(rollouts) - len(scored)
        if len(scored) < config.scored_needed:
            cancelled = any(rollout.state is State.CANCELLED for rollout in rollouts)
            return Decision(Verdict.FAILED, "cancelled" if cancelled else "too_few_scored", *counts)
        specs = config.filters
        if specs is None:
            specs = [FilterSpec(name="uniform_reward")] if config.n > 1 else []
        for spec in specs:
            chosen = self._filters.get(spec.name)
            try:
                reason = chosen(scored, **spec.options) if chosen else f"no filter {spec.name}"
            except Exception as error:
                log.exception("filter failed", filter=spec.name)
                return Decision(Verdict.FAILED, f"{spec.name}: {type(error).__name__}", *counts)
            if reason:
                return Decision(Verdict.FILTERED if chosen else Verdict.FAILED, reason[:100], *counts)
        return Decision(Verdict.KEPT, None, *counts)
