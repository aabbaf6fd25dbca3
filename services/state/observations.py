"""What is measured of rollouts in Redis itself: histograms of times, and how old things are now.

The scripts that end a stage count its time in the same step, so that the numbers of all workers are in one
place and stay exact when one is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import redis

from rollout.schema import TERMINAL_STATES, State
from services.state import keys
from services.state.scripts import Operations

BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400)
"""Upper bounds: from a no-op stage to the longest deadline that is usual."""
LIVE_STATES = tuple(state for state in State if state not in TERMINAL_STATES)
MOST_LEASES = 10_000
"""Rollouts of a stage that one look goes through at most: Redis serves nobody else meanwhile."""
BUCKETS_MS = tuple(round(bound * 1000) for bound in BUCKETS_S)
"""The same as the scripts have them."""


@dataclass
class Histogram:
    """Times that ended, by bucket."""

    counts: dict[float, int] = field(default_factory=dict)
    """Upper bound in seconds (infinity for the last) → times in that bucket alone."""
    sum_s: float = 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has it: `(upper bound, times up to it)`, ascending, `+Inf` last."""
        bounds = sorted({*BUCKETS_S, *(bound for bound in self.counts if bound != float("inf"))})
        rows, total = [], 0
        for bound in bounds:
            total += self.counts.get(bound, 0)
            rows.append((f"{bound:g}", float(total)))
        return [*rows, ("+Inf", float(total + self.counts.get(float("inf"), 0)))]


def stage_totals(histograms: Mapping[str, Histogram]) -> dict[str, tuple[float, int]]:
    """Seconds and number of the stages that ended, and, as `queued`, of the waiting before all of them."""
    totals: dict[str, tuple[float, int]] = {}
    for series, histogram in histograms.items():
        kind, _, stage = series.partition("_")
        if kind in ("stage", "queue"):
            label = "queued" if kind == "queue" else stage
            seconds, count = totals.get(label, (0.0, 0))
            totals[label] = seconds + histogram.sum_s, count + sum(histogram.counts.values())
    return totals


@dataclass(frozen=True)
class Ages:
    """How old things are, in seconds."""

    reaper_lag: float
    """Since the rollout that is due the longest should have been looked at."""
    leases: Mapping[str, int]
    """Stage → rollouts that workers hold."""
    lease_age: Mapping[str, float]
    """Stage → since the heartbeat that is longest ago; 0.0 without a lease."""
    oldest: Mapping[str, float]
    """Live state → since the submission of its oldest rollout; 0.0 without one."""


class Observations:
    """Reads what was measured."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._do = Operations(client, "ages")

    def histograms(self) -> dict[str, Histogram]:
        """By series: `stage_<stage>`, `queue_<stage>`, `total_<state>`; and, a number standing for so many
        seconds, `reward_<handler>` and `turns_<handler>`."""
        histograms: dict[str, Histogram] = {}
        for name, value in self._redis.hgetall(keys.HISTOGRAMS).items():
            series, _, bound = name.rpartition(":")
            histogram = histograms.setdefault(series, Histogram())
            if bound == "sum":
                histogram.sum_s = int(value) / 1000
            else:
                upper = float("inf") if bound == "inf" else int(bound) / 1000
                histogram.counts[upper] = int(value)
        return histograms

    def ages(self) -> Ages:
        """Look at everything that is live."""
        return Ages(**self._do("ages", most=MOST_LEASES, states=LIVE_STATES))
