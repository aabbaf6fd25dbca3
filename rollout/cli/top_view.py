"""How `rollout top` draws a look at the service: as much of each table as the window has room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rollout.cli.render import backend_state, number, state_text
from rollout.cli.top_look import Look
from rollout.schema import Backend, Batch, Fleet, NodeLoad, Rollout

BAR = 12
GAP = 2
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


class Sheet:
    """A table that leaves out columns where the window is narrow, rather than cut all of them."""

    def __init__(self, *columns: str, left: Sequence[str] = (), first_out: Sequence[str] = ()) -> None:
        """
        Args:
            left: Columns of text; the others are numbers.
            first_out: Columns that may be left out, in this order.
        """
        self._columns = columns
        self._left = left
        self._first_out = first_out
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [[Text(name) for name in self._columns], *self._rows]
        widths = {name: max(row[i].cell_len for row in rows) + GAP for i, name in enumerate(self._columns)}
        for name in self._first_out:
            if sum(widths.values()) - GAP <= options.max_width:
                break
            del widths[name]
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
        for name in widths:
            justify = "left" if name in self._left else "right"
            table.add_column(name.strip(), justify=justify, no_wrap=True, overflow="ellipsis")
        for row in self._rows:
            table.add_row(*(cell for cell, name in zip(row, self._columns, strict=True) if name in widths))
        yield table


def _bar(busy: int, slots: int) -> Text:
    full = min(BAR, round(BAR * busy / slots)) if slots else 0
    return Text.assemble(("█" * full, "green"), ("░" * (BAR - full), "dim"))


def _stages(look: Look) -> Sheet:
    table = Sheet(
        *("stage", "workers", "slots", "busy", " ", "waiting", "ended/s", "mean"),
        left=("stage", " "),
        first_out=(" ", "mean", "workers"),
    )
    for name, load in look.fleet.stages.items():
        rate = look.stages_per_s.get(name)
        table.add_row(
            name,
            str(load.workers) if load.workers else Text("0", "bold red"),
            str(load.slots),
            str(load.busy),
            _bar(load.busy, load.slots),
            str(load.waiting),
            "–" if rate is None else f"{rate:.3g}",
            f"{load.seconds / load.ended:.2f} s" if load.ended else "–",
        )
    return table


def _backends(rows: Sequence[Backend], tokens: dict[str, float]) -> Sheet:
    texts = ("id", "state", "model", "weights")
    numbers = ("rollouts", "running", "waiting", "cache", "cached", "tokens/s", "call")
    out = ("call", "cached", "weights", "cache", "waiting", "running", "model")
    table = Sheet(*texts, *numbers, left=texts, first_out=out)
    for one in rows:
        stats = one.stats
        rate = tokens.get(one.id)
        call = None
        if stats is not None and stats.requests and stats.request_seconds is not None:
            call = stats.request_seconds / stats.requests
        table.add_row(
            Text(one.id),
            backend_state(one),
            Text(one.model.rpartition("/")[2]),
            Text(one.policy_version or "–"),
            str(one.live_rollouts),
            _or_dash(stats and stats.running),
            _or_dash(stats and stats.waiting),
            _or_dash(stats and stats.kv_usage, "{:.0%}"),
            _or_dash(stats and stats.cached_ratio, "{:.0%}"),
            _or_dash(rate, "{:.0f}"),
            _or_dash(call, "{:.2g} s"),
        )
    return table


def _or_dash(value: float | None, form: str = "{}") -> str:
    return "–" if value is None else form.format(value)


def _nodes(rows: Sequence[NodeLoad]) -> Sheet:
    table = Sheet(
        *("node", "stages", "slots", "busy", " ", "sandboxes", "warm", "disk", "memory", "note"),
        left=("node", "stages", " ", "note"),
        first_out=(" ", "warm", "stages", "memory", "disk", "sandboxes"),
    )
    for one in rows:
        note = Text("; ".join(one.stopped), "red")
        if one.waits_for_run and not one.stopped:
            note = Text("INIT waits for RUN", "yellow")
        table.add_row(
            Text(one.node),
            " ".join(one.stages) or Text("no worker", "red"),
            str(one.slots),
            str(one.busy),
            _bar(one.busy, one.slots),
            _or_dash(one.sandboxes),
            _or_dash(one.warm),
            _gib(one.free_disk),
            _gib(one.free_memory),
            note,
        )
    return table


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / GIB:.1f} GiB"


def _batches(rows: Sequence[Batch]) -> Sheet:
    table = Sheet(
        *("id", "state", "kept", "open", "filtered", "in flight", "prompts"),
        left=("id", "state"),
        first_out=("prompts", "filtered", "open", "in flight"),
    )
    for one in rows:
        state = "paused" if one.paused and not one.state.ended else one.state.value
        table.add_row(
            Text(one.id),
            Text(state, "dim" if one.state.ended else "green"),
            f"{one.kept} of {one.wanted}",
            str(one.open),
            str(one.filtered),
            str(one.in_flight),
            str(one.waiting_prompts),
        )
    return table


def _recent(rows: Sequence[Rollout], now: float) -> Sheet:
    table = Sheet(
        *("ago", "id", "handler", "state", "reward", "seconds", "note"),
        left=("id", "handler", "state", "note"),
        first_out=("note", "handler", "seconds", "ago"),
    )
    for one in rows:
        end = one.finished_at or one.updated_at
        note = one.error.message if one.error else one.drop_reason or ""
        table.add_row(
            f"{max(0.0, now - end):.0f} s",
            Text(one.id),
            Text(one.handler),
            state_text(one.state),
            number(one.reward),
            f"{end - one.created_at:.1f}",
            Text(note.splitlines()[0] if note else ""),
        )
    return table
