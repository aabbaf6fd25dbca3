"""How `rollout top` draws a look at the service: as much of each table as the window has room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rollout.cli.common import Column, Sheet, node_shown, or_dash
from rollout.cli.render import backends_table, batches_table, rollouts_table, time_left
from rollout.cli.top_look import EVERYBODY, Look, Progress, mean_reward
from rollout.schema import NodeLoad, PolicyStatus

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
    reward = mean_reward(look.recent)
    lately = "ended lately" + ("" if reward is None else f", mean reward {reward:.3f}")
    parts: list[RenderableType] = [*head, _stages(look), Text()]
    sections: list[tuple[str, Sequence[Any], Callable[[Sequence[Any]], Sheet]]] = [
        *([("policies", look.policies, _policies)] if len(look.policies) > 1 else []),
        ("backends", look.backends, lambda rows: backends_table(rows, look.rates["tokens"])),
        ("nodes", look.fleet.nodes, _nodes),
        ("batches", look.batches, lambda rows: batches_table(rows, look.at)),
        ("groups", look.groups, lambda rows: _groups(rows, look.at)),
        ("live", look.live, lambda rows: rollouts_table(rows, look.at)),
        (lately, look.recent, lambda rows: rollouts_table(rows, look.at)),
    ]
    lines = None if height is None else height - len(head) - STAGE_ROWS
    for i, share in _shares([len(rows) for _, rows, _ in sections], lines).items():
        title, rows, draw = sections[i]
        note = f"  ({len(rows) - share} more)" if len(rows) > share else ""
        parts.append(Text(f"{title}{note}", "bold") if rows else Text(f"{title}: none", "dim"))
        if rows:
            parts.append(draw(rows[:share]))
    return Group(*parts)


def _shares(sizes: Sequence[int], lines: int | None) -> dict[int, int]:
    """Rows that sections of these sizes show, by place; for one that is left out not even its title has room.

    The first go first, the last takes the rest.
    """
    if lines is None:
        return dict(enumerate(sizes))
    shares: dict[int, int] = {}
    for i, size in enumerate(sizes):
        least = min(size, LEAST_ROWS)
        cost = least + (2 if size else 1)  # its title, and the head of its table
        if lines >= cost:
            shares[i] = least
            lines -= cost
    for i, least in shares.items():
        # What comes later gets some too, unless there is nothing later.
        more = min(sizes[i] - least, lines if i == len(sizes) - 1 else lines // 2)
        shares[i] += more
        lines -= more
    return shares


def _head(look: Look, url: str, problem: str | None) -> list[Text]:
    fleet = look.fleet
    tenant = "all tenants" if look.tenant == EVERYBODY else f"tenant {look.tenant}"
    at = time.strftime("%H:%M:%S", time.localtime(look.at))
    counts = [f"{count} {name}" for name, count in fleet.states.items() if count]
    ended = look.rates["ended"]
    rates = ", ".join(f"{value:.2g} {name}" for name, value in ended.items() if value)
    rates = rates or ("none" if ended else "–")
    warnings = [problem] if problem else []
    warnings += [f"no live worker of stage {name}" for name, load in fleet.stages.items() if not load.workers]
    if fleet.reaper_lag_s > REAPER_LATE_S:
        warnings.append(f"what is overdue is {fleet.reaper_lag_s:.0f} s late: does any worker reap?")
    lines = [
        Text.assemble((f"rollout {look.version}", "bold"), f"   {url}   {tenant}   {at}"),
        *([Text(f"flower {look.flower}")] if look.flower else []),
        Text(f"{', '.join(counts) or 'no rollouts'}   ended a second: {rates}"),
        *(Text(text, "bold red") for text in warnings),
        Text(),
    ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _bar(busy: int, slots: int) -> Text:
    full = min(BAR, round(BAR * busy / slots)) if slots else 0
    return Text.assemble(("█" * full, "green"), ("░" * (BAR - full), "dim"))


def _policies(rows: Sequence[PolicyStatus]) -> Sheet:
    columns = [
        Column("policy", lambda row: row.name),
        Column("version", lambda row: row.current.version if row.current else "–"),
        Column(
            "update", lambda row: f"{row.update.version} {row.update.state}" if row.update else "–", drop=1
        ),
        Column("backends", lambda row: str(len(row.backends) or "") or Text("0", "bold red"), True),
        Column("waiting", lambda row: str(row.waiting), True),
        Column("longest", lambda row: f"{row.longest_wait_s:.0f} s" if row.waiting else "–", True, 2),
    ]
    return Sheet(columns, rows)


def _stages(look: Look) -> Sheet:
    columns = [
        Column("stage", lambda row: row[0]),
        Column("workers", lambda row: str(row[1].workers or "") or Text("0", "bold red"), True, 3),
        Column("slots", lambda row: str(row[1].slots), True),
        Column("busy", lambda row: str(row[1].busy), True),
        Column(" ", lambda row: _bar(row[1].busy, row[1].slots), drop=1),
        Column("waiting", lambda row: str(row[1].waiting), True),
        Column("ended/s", lambda row: or_dash(look.rates["stages"].get(row[0]), "{:.3g}"), True),
        Column(
            "mean", lambda row: f"{row[1].seconds / row[1].ended:.2f} s" if row[1].ended else "–", True, 2
        ),
    ]
    return Sheet(columns, [*look.fleet.stages.items()])


def _groups(rows: Sequence[Progress], now: float) -> Sheet:
    columns = [
        Column("group", lambda group: group.id),
        Column("ended", lambda group: f"{group.ended}/{group.size}", True),
        Column(" ", lambda group: _bar(group.ended, group.size), drop=1),
        Column("reward", lambda group: or_dash(group.reward, "{:.3f}"), True),
        Column("end in", lambda group: time_left(group.ended, group.size, now - group.since), True),
    ]
    return Sheet(columns, rows)


def _nodes(rows: Sequence[NodeLoad]) -> Sheet:
    def note(node: NodeLoad) -> Text:
        if node.waits_for_run and not node.stopped:
            return Text("INIT waits for RUN", "yellow")
        return Text("; ".join(node.stopped), "red")

    columns = [
        Column("node", lambda node: node_shown(node.node)),
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
