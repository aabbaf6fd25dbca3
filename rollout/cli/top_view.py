"""How `rollout top` draws a look at the service: as much of each table as the window has room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rollout.cli.render import backend_state, end_of, engine_columns, note_of, number, state_text
from rollout.cli.sheet import Column, Sheet, or_dash
from rollout.cli.top_look import Look
from rollout.schema import Backend, Batch, Fleet, NodeLoad, Rollout

BAR = 12
"""Characters."""
STAGE_ROWS = 5
"""Lines of the first table, which is always shown whole: its head, three stages, a blank."""
REAPER_LATE_S = 10.0
LEAST_ROWS = 2
GIB = 1 << 30


def view(look: Look, url: str, height: int | None = None, problem: str | None = None) -> RenderableType:
    """Everything, cut to a window of so many lines.

    Args:
        height: None = no window: show all.
        problem: Why the numbers are old; None = they are not.
    """
    head = _head(look, url, problem)
    parts: list[RenderableType] = [*head, _stages(look), Text()]
    sections: list[tuple[str, Sequence[Any], Callable[[Sequence[Any]], Sheet]]] = [
        ("backends", look.backends, lambda rows: _backends(rows, look.tokens_per_s)),
        ("nodes", look.fleet.nodes, _nodes),
        ("batches", look.batches, _batches),
        ("ended lately", look.recent, lambda rows: _recent(rows, look.fleet.at)),
    ]
    left = None if height is None else height - len(head) - STAGE_ROWS
    for (title, rows, draw), shown in zip(sections, _shares(sections, left), strict=True):
        if shown is None:
            continue
        hidden = len(rows) - shown
        note = f"  ({hidden} more)" if hidden else ""
        parts.append(Text(f"{title}{note}", "bold") if rows else Text(f"{title}: none", "dim"))
        if rows:
            parts.append(draw(rows[:shown]))
    return Group(*parts)


def _shares(sections: Sequence[tuple[str, Sequence[Any], Any]], left: int | None) -> list[int | None]:
    """Rows that each section shows; None: not even its title. The first go first, the last takes the rest."""
    if left is None:
        return [len(rows) for _, rows, _ in sections]
    shares: list[int | None] = [None] * len(sections)
    for i, (_, rows, _) in enumerate(sections):
        # Title and head of the table.
        cost = 2 if rows else 1
        least = min(len(rows), LEAST_ROWS)
        if left >= cost + least:
            shares[i] = least
            left -= cost + least
    for i, (_, rows, _) in enumerate(sections):
        share = shares[i]
        if share is not None:
            more = min(len(rows) - share, left)
            # What comes later gets some too, unless there is nothing later.
            more = more if i == len(sections) - 1 else min(more, max(0, left // 2))
            shares[i] = share + more
            left -= more
    return shares


def _head(look: Look, url: str, problem: str | None) -> list[RenderableType]:
    whose = f"tenant {look.tenant}" if look.tenant else "all tenants"
    at = time.strftime("%H:%M:%S", time.localtime(look.fleet.at))
    flower = f"   flower {look.flower}" if look.flower else ""
    counts = [f"{count} {name}" for name, count in look.fleet.states.items() if count]
    rates = ", ".join(f"{value:.2g} {name}" for name, value in look.ended_per_s.items() if value)
    if not rates:
        rates = "none" if look.ended_per_s else "–"
    lines: list[RenderableType] = [
        _line(Text.assemble((f"rollout {look.version}", "bold"), f"   {url}   {whose}   {at}{flower}")),
        _line(Text(f"{', '.join(counts) or 'no rollouts'}   ended a second: {rates}")),
    ]
    warnings = _warnings(look.fleet)
    if problem:
        warnings.insert(0, problem)
    lines += [_line(Text(text, "bold red")) for text in warnings]
    return [*lines, Text()]


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _warnings(fleet: Fleet) -> list[str]:
    found = [f"no live worker of stage {name}" for name, load in fleet.stages.items() if not load.workers]
    if fleet.reaper_lag_s > REAPER_LATE_S:
        found.append(f"what is overdue is {fleet.reaper_lag_s:.0f} s late: does any worker reap?")
    return found


def _bar(busy: int, slots: int) -> Text:
    full = min(BAR, round(BAR * busy / slots)) if slots else 0
    return Text.assemble(("█" * full, "green"), ("░" * (BAR - full), "dim"))


def _count(workers: int) -> str | Text:
    return str(workers) if workers else Text("0", "bold red")


def _stages(look: Look) -> Sheet:
    columns = [
        Column("stage", lambda row: row[0]),
        Column("workers", lambda row: _count(row[1].workers), True, 3),
        Column("slots", lambda row: str(row[1].slots), True),
        Column("busy", lambda row: str(row[1].busy), True),
        Column(" ", lambda row: _bar(row[1].busy, row[1].slots), drop=1),
        Column("waiting", lambda row: str(row[1].waiting), True),
        Column("ended/s", lambda row: or_dash(look.stages_per_s.get(row[0]), "{:.3g}"), True),
        Column(
            "mean", lambda row: f"{row[1].seconds / row[1].ended:.2f} s" if row[1].ended else "–", True, 2
        ),
    ]
    return Sheet(columns, [*look.fleet.stages.items()])


def _backends(rows: Sequence[Backend], tokens: dict[str, float]) -> Sheet:
    def call_s(backend: Backend) -> float | None:
        stats = backend.stats
        if stats is None or not stats.requests or stats.request_seconds is None:
            return None
        return stats.request_seconds / stats.requests

    columns = [
        Column("id", lambda backend: backend.id),
        Column("state", backend_state),
        Column("model", lambda backend: backend.model.rpartition("/")[2], drop=7),
        Column("weights", lambda backend: backend.policy_version or "–", drop=3),
        Column("rollouts", lambda backend: str(backend.live_rollouts), True),
        *engine_columns(running=6, waiting=5, cache=4, cached=2),
        Column("tokens/s", lambda backend: or_dash(tokens.get(backend.id), "{:.0f}"), True),
        Column("call", lambda backend: or_dash(call_s(backend), "{:.2g} s"), True, 1),
    ]
    return Sheet(columns, rows)


def _nodes(rows: Sequence[NodeLoad]) -> Sheet:
    def note(node: NodeLoad) -> Text:
        if node.waits_for_run and not node.stopped:
            return Text("INIT waits for RUN", "yellow")
        return Text("; ".join(node.stopped), "red")

    columns = [
        Column("node", lambda node: node.node),
        Column("stages", lambda node: " ".join(node.stages) or Text("no worker", "red"), drop=3),
        Column("slots", lambda node: str(node.slots), True),
        Column("busy", lambda node: str(node.busy), True),
        Column(" ", lambda node: _bar(node.busy, node.slots), drop=1),
        Column("sandboxes", lambda node: or_dash(node.sandboxes), True, 6),
        Column("warm", lambda node: or_dash(node.warm), True, 2),
        Column("disk", lambda node: _gib(node.free_disk), True, 5),
        Column("memory", lambda node: _gib(node.free_memory), True, 4),
        Column("note", note),
    ]
    return Sheet(columns, rows)


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / GIB:.1f} GiB"


def _batches(rows: Sequence[Batch]) -> Sheet:
    def state(batch: Batch) -> Text:
        word = "paused" if batch.paused and not batch.state.ended else batch.state.value
        return Text(word, "dim" if batch.state.ended else "green")

    columns = [
        Column("id", lambda batch: batch.id),
        Column("state", state),
        Column("kept", lambda batch: f"{batch.kept} of {batch.wanted}", True),
        Column("open", lambda batch: str(batch.open), True, 3),
        Column("filtered", lambda batch: str(batch.filtered), True, 2),
        Column("in flight", lambda batch: str(batch.in_flight), True, 4),
        Column("prompts", lambda batch: str(batch.waiting_prompts), True, 1),
    ]
    return Sheet(columns, rows)


def _recent(rows: Sequence[Rollout], now: float) -> Sheet:
    columns = [
        Column("ago", lambda rollout: f"{max(0.0, now - end_of(rollout)):.0f} s", True, 4),
        Column("id", lambda rollout: rollout.id),
        Column("handler", lambda rollout: rollout.handler, drop=2),
        Column("state", lambda rollout: state_text(rollout.state)),
        Column("reward", lambda rollout: number(rollout.reward), True),
        Column("seconds", lambda rollout: f"{end_of(rollout) - rollout.created_at:.1f}", True, 3),
        Column("note", note_of, drop=1),
    ]
    return Sheet(columns, rows)
