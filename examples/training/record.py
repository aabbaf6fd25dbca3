"""What a run leaves: a line of JSON a step, a picture, a report."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from examples.training.feed import read_lines, rewrite

ENDS = 20
"""Steps at either end whose mean reward the report compares."""
STAGES = ("rollouts", "train", "save", "update")
SMOOTH = 0.1
"""Weight of the newest step in the smoothed line of rewards."""


class Log:
    """`log.jsonl`: a line for each step, in order, whatever was killed in between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = list(read_lines(path))

    def keep_until(self, step: int) -> None:
        """Forget lines after `step`, and one that a kill cut off."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        rewrite(self.path, self.rows)

    def add(self, row: dict) -> None:
        """Append a step; one that is there already is not written twice."""
        if self.rows and self.rows[-1]["step"] >= row["step"]:
            return
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def mean(values: Sequence[float | None]) -> float | None:
    """None when there is nothing to take the mean of."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def report(rows: Sequence[dict], settings: dict) -> dict:
    """`results` has the headline figures, the rest says where they come from."""
    gaps = [row["logprob_gap"] for row in rows if row["logprob_gap"] is not None]
    verdicts = {
        name: sum(len(row["groups"][name]) for row in rows) for name in ("kept", "filtered", "failed")
    }
    return {
        "example": "train",
        "results": {
            "reward_first20": _rounded(mean([row["reward"] for row in rows[:ENDS]])),
            "reward_last20": _rounded(mean([row["reward"] for row in rows[-ENDS:]])),
            "max_logprob_gap": max(gaps, default=None),
        },
        "steps": len(rows),
        "rollouts": sum(row["scored"] + row["dropped"] for row in rows),
        "groups": verdicts,
        "staleness_mean": _rounded(mean([row["staleness"] for row in rows])),
        "minutes": round(sum(sum(row["seconds"].values()) for row in rows) / 60, 1),
        "seconds_of_a_step": {
            name: _rounded(mean([row["seconds"].get(name) for row in rows])) for name in STAGES
        },
        "settings": settings,
        "machine": {
            "processors": os.cpu_count(),
            "system": platform.platform(terse=True),
            "load": os.getloadavg()[0],
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def plot(rows: Sequence[dict], path: Path, title: str) -> None:
    """Reward, informative share, staleness, log-prob gap and stage times over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    steps = [row["step"] for row in rows]
    figure, axes = pyplot.subplots(5, 1, figsize=(8, 11), sharex=True, layout="constrained")
    figure.suptitle(title)

    def line(axis, title: str, values: Sequence[float | None], **how) -> None:
        axis.plot(steps, [math.nan if value is None else value for value in values], **how)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)

    rewards = [row["reward"] for row in rows]
    line(axes[0], "mean reward", rewards, color="tab:blue", alpha=0.35)
    line(axes[0], "mean reward", smoothed(rewards), color="tab:blue")
    axes[0].set_ylim(0, 1.02)
    line(axes[1], "informative groups", [row["informative"] for row in rows], color="tab:green")
    axes[1].set_ylim(0, 1.02)
    line(axes[2], "staleness, updates", [row["staleness"] for row in rows], color="tab:orange", label="mean")
    line(
        axes[2],
        "staleness, updates",
        [row["staleness_max"] for row in rows],
        color="tab:red",
        lw=0.8,
        label="max",
    )
    axes[2].legend(loc="upper right")
    line(axes[3], "log-prob gap, nats", [row["logprob_gap"] or None for row in rows], color="tab:purple")
    axes[3].set_yscale("log")
    axes[4].stackplot(
        steps, [[row["seconds"].get(name, 0.0) for row in rows] for name in STAGES], labels=STAGES
    )
    axes[4].set_ylabel("seconds a step")
    axes[4].legend(loc="upper right")
    axes[4].set_xlabel("step")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """An exponential mean; gaps repeat what was there before."""
    out: list[float | None] = []
    for value in values:
        before = out[-1] if out else None
        if value is None or before is None:
            out.append(value if before is None else before)
        else:
            out.append((1 - SMOOTH) * before + SMOOTH * value)
    return out
