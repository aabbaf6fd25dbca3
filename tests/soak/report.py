"""What a run of `tests.soak.million` came to: figures, a table, a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tests.soak.ledger import Ledger

MOST_GROWTH = 1.05
POINTS = 240
"""Of a line of the picture."""
WIDTH, HEIGHT, LEFT, GAP = 760, 130, 60, 34
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2")


def write(directory: Path, ledger: Ledger, cores: int | None) -> dict[str, Any]:
    """Write `report.json`, `report.md` and `million.svg`; the figures."""
    state, samples = ledger.state, directory / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    finished = ledger.count == ledger.total
    rests = state["rests"]
    growth = round(rests[-1]["redis_mb"] / rests[0]["redis_mb"], 3) if len(rests) > 1 else None
    zero = {
        "ended_twice": len(state["twice"]),
        "lost": state["answered"] - ledger.count,
        "wrong": len(state["wrong"]),
    }
    figures = {
        "submitted": state["answered"],
        "ended": ledger.count,
        **zero,
        "finished": finished,
        "redis_growth": growth,
        "memory_growth": state["growth"],
        "not_completed": state["not_completed"],
        "taken_back": state["taken_back"],
        "faults": {fault: len(times) for fault, times in state["kills"].items()},
        "recovery_s": {fault: _spread(times) for fault, times in state["kills"].items()},
        "rollouts_per_s": round(ledger.count / max(state["seconds"], 1e-3), 1),
        "hours": round(state["seconds"] / 3600, 2),
        "pieces": state["pieces"],
        "cores": cores,
    }
    figures["held"] = not any(zero.values()) and (growth is None or growth <= MOST_GROWTH or not finished)
    (directory / "report.json").write_text(json.dumps({**figures, "rests": rests}, indent=1))
    (directory / "report.md").write_text("| | |\n|---|---|\n" + "".join(map(_line, figures.items())))
    if len(rows) > 2:
        (directory / "million.svg").write_text(picture(rows, f"{ledger.count:,} rollouts"))
    return figures


def _spread(times: Sequence[float | None]) -> dict[str, float] | None:
    known = [seconds for seconds in times if seconds is not None]
    return {"median": statistics.median(known), "max": max(known)} if known else None


def _line(entry: tuple[str, Any]) -> str:
    name, value = entry
    text = f"{value:,}" if type(value) is int else json.dumps(value)
    return f"| `{name}` | {text} |\n"


def picture(rows: Sequence[dict[str, float]], title: str) -> str:
    """Rollouts a second, and memory of Redis and of the processes that are not killed, over time, as SVG."""
    step = max(1, len(rows) // POINTS)
    rows = rows[::step]
    hours = [row["t"] / 3600 for row in rows]
    rates = [(b["ended"] - a["ended"]) / max(b["t"] - a["t"], 1e-3) for a, b in pairwise(rows)]
    kinds = [name for name in rows[-1] if name not in ("t", "ended", "redis")]
    panels = [
        ("rollouts/s", {"": rates}),
        ("Redis, MB", {"": [row["redis"] for row in rows]}),
        ("process, MB", {kind: [row.get(kind, 0.0) for row in rows] for kind in kinds}),
    ]
    parts = [f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>']
    for number, (name, lines) in enumerate(panels):
        parts += _panel(name, lines, hours, GAP + number * (HEIGHT + GAP))
    height = GAP + len(panels) * (HEIGHT + GAP)
    parts.append(f'<text x="{WIDTH - 40}" y="{height - 18}">{hours[-1]:.1f} h</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
    return (
        head
        + 'font-size="11"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _panel(name: str, lines: dict[str, Sequence[float]], hours: Sequence[float], top: int) -> list[str]:
    most = max(max(values) for values in lines.values()) or 1.0
    wide, end = WIDTH - LEFT - 10, hours[-1] or 1.0
    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{wide}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{LEFT}" y="{top - 4}">{escape(name)}</text>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.0f}</text>',
        f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">0</text>',
    ]
    for number, (kind, values) in enumerate(lines.items()):
        points = " ".join(
            f"{LEFT + wide * hour / end:.1f},{top + HEIGHT * (1 - value / most):.1f}"
            for hour, value in zip(hours[-len(values) :], values, strict=True)
        )
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(
            f'<text x="{LEFT + 90 + number * 110}" y="{top - 4}" fill="{colour}">{escape(kind)}</text>'
        )
    return parts
