"""What a run of `tests.soak.million` came to: its figures, and a picture."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.soak.ledger import Ledger

MOST_GROWTH = 1.05
POINTS = 240
"""Of a line of the picture, at most."""
WIDTH, HEIGHT, LEFT, GAP = 760, 120, 50, 34
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
Point = tuple[float, float]


def write(directory: Path, ledger: Ledger) -> dict[str, Any]:
    """Write `report.json` and `million.svg`; the figures."""
    state, rests = ledger.state, ledger.state["rests"]
    zero = {
        "ended_twice": len(state["twice"]),
        "lost": state["answered"] - ledger.count,
        "wrong": len(state["wrong"]),
    }
    finished = ledger.count == ledger.total
    growth = round(rests[-1]["redis_mb"] / rests[0]["redis_mb"], 3) if len(rests) > 1 else None
    took = {fault: [s for _, s in entries if s is not None] for fault, entries in state["faults"].items()}
    figures = {
        **{"submitted": state["answered"], "ended": ledger.count, **zero, "finished": finished},
        **{"redis_growth": growth, "memory_growth": state["growth"]},
        "faults": {fault: len(entries) for fault, entries in state["faults"].items()},
        "recovery_s": {
            f: {"median": round(statistics.median(s), 1), "max": max(s)} for f, s in took.items() if s
        },
        **{"rollouts_per_s": round(ledger.count / max(state["seconds"], 1.0), 1), "pieces": state["pieces"]},
        **{"hours": round(state["seconds"] / 3600, 2), "cores": os.cpu_count()},
        **{name: state[name] for name in ("not_completed", "taken_back", "missed")},
        "held": not any(zero.values()) and not (finished and growth and growth > MOST_GROWTH),
    }
    more = {"rests": rests, "twice": state["twice"], "those_wrong": state["wrong"]}
    (directory / "report.json").write_text(json.dumps(figures | more, indent=1))
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    (directory / "million.svg").write_text(picture(rows, state["faults"], f"{ledger.count:,} rollouts"))
    return figures


def picture(rows: list[dict[str, float]], faults: dict[str, list[Point]], title: str) -> str:
    """Over time: rollouts a second, memory of Redis and of processes that are not killed, recoveries; SVG."""
    rows = rows[:: max(1, len(rows) // POINTS)]
    rates = [(b["t"], (b["ended"] - a["ended"]) / max(b["t"] - a["t"], 0.1)) for a, b in pairwise(rows)]
    kinds = [name for name in rows[-1] if name not in ("t", "ended", "redis")]
    panels = {
        "rollouts/s": {"": rates},
        "Redis, MB": {"": [(row["t"], row["redis"]) for row in rows]},
        "processes, MB": {kind: [(row["t"], row[kind]) for row in rows if kind in row] for kind in kinds},
        "recovery, s": {fault: [p for p in points if p[1] is not None] for fault, points in faults.items()},
    }
    end, parts = (
        max(rows[-1]["t"], 1.0),
        [f'<text x="{LEFT}" y="15">{title}, {rows[-1]["t"] / 3600:.1f} h</text>'],
    )
    for place, (name, lines) in enumerate(panels.items()):
        parts += _panel(name, lines, end, GAP + place * (HEIGHT + GAP), dots=name.startswith("recovery"))
    box = f"0 0 {WIDTH} {GAP + len(panels) * (HEIGHT + GAP)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _panel(name: str, lines: dict[str, Sequence[Point]], end: float, top: int, dots: bool) -> list[str]:
    most = max((value for points in lines.values() for _, value in points), default=1.0) or 1.0
    wide = WIDTH - LEFT - 10
    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{wide}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{LEFT}" y="{top - 4}">{name}</text>',
        f'<text x="{LEFT - 4}" y="{top + 10}" text-anchor="end">{most:.0f}</text>',
    ]
    for place, (kind, points) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        at = [(LEFT + wide * t / end, top + HEIGHT * (1 - value / most)) for t, value in points]
        parts.append(f'<text x="{LEFT + 110 + place * 110}" y="{top - 4}" fill="{colour}">{kind}</text>')
        if dots:
            parts += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="2" fill="{colour}"/>' for x, y in at]
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
    return parts
