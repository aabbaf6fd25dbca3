"""`rollout status|list|show|watch|agent|fork|cancel`: look at rollouts, drive one, fork one, and end them."""

from __future__ import annotations

import math
import shlex
import time
from contextlib import suppress
from typing import Any

import click
from rich.console import Group
from rich.text import Text

from rollout.cli import render
from rollout.cli.common import (
    WORK_PATIENCE_S,
    Column,
    Sheet,
    complete_handlers,
    completed,
    connect,
    err,
    json_option,
    node_shown,
    out,
    show_view,
    url_option,
    valid,
)
from rollout.client import ApiError, Client
from rollout.http import NOT_FOUND
from rollout.schema import Blame, ForkPoint, ForkRequest, Rollout, State

MOST_OF_GROUP = 1000
KEPT = (
    Column("turn", lambda kept: str(kept.turn), number=True),
    Column("age", lambda kept: f"{max(0.0, time.time() - kept.at):.0f} s", number=True),
    Column("files", lambda kept: Text(kept.error, "red") if kept.error else kept.way),
    Column("MB", lambda kept: f"{kept.bytes / 1e6:.1f}" if kept.bytes else "–", number=True),
    Column("node", lambda kept: node_shown(kept.node) if kept.node else "–"),
)
"""Of the turns that a rollout keeps."""
complete_ids = completed(lambda client: [rollout.id for rollout in client.list(limit=500).rollouts])


@click.command()
@json_option
@url_option
def status(as_json: bool, url: str | None) -> None:
    """Show states, queues, workers and backends, and what to do next."""
    with connect(url) as client:
        state, ready = client.status(), client.ready()
    missing = ready.get("missing", [])
    steps = render.next_steps(state, missing)
    show_view(render.status_view(state, steps), {**state, **ready, "next": steps}, as_json)
    if not ready["ready"]:
        err.print(f"[yellow]not ready:[/] {'; '.join(missing)}", soft_wrap=True)


@click.command("list")
@click.option("--state", type=click.Choice([s.value for s in State]))
@click.option("--handler", shell_complete=complete_handlers)
@click.option("--group", "group_id")
@click.option("--tag")
@click.option("--policy-version", metavar="V", help="Only those that weights of this version sampled from.")
@click.option("--blame", type=click.Choice([b.value for b in Blame]), help="Only failures laid to this.")
@click.option("--dropped/--not-dropped", "drop", default=None, help="Only those that are, or are not.")
@click.option("--reward-min", type=float, metavar="R", help="Only rewards from this one on.")
@click.option("--reward-max", type=float, metavar="R", help="Only rewards up to this one.")
@click.option("--limit", default=50, show_default=True, help="Most rollouts to show.")
@json_option
@url_option
def list_(limit: int, as_json: bool, url: str | None, **filters: Any) -> None:
    """List rollouts, one line each."""
    with connect(url) as client:
        rollouts = select(client, limit + 1, **filters)
    more, rollouts = len(rollouts) > limit, rollouts[:limit]
    show_view(render.rollouts_table(rollouts), rollouts, as_json)
    if more:
        err.print(f"[dim]there are more than {limit}: raise --limit[/]")


def select(client: Client, limit: int, **filters: Any) -> list[Rollout]:
    """Summaries of so many rollouts that fit all the filters."""
    rollouts: list[Rollout] = []
    cursor = None
    while len(rollouts) < limit:
        page = client.list(limit=min(limit - len(rollouts), 500), cursor=cursor, **filters)
        rollouts += page.rollouts
        cursor = page.cursor
        if cursor is None:
            break
    return rollouts


@click.command()
@click.argument("rollout_id", metavar="ID", shell_complete=complete_ids)
@click.option("--timeline", is_flag=True, help="What happened to it: states, workers, backends, errors.")
@json_option
@url_option
def show(rollout_id: str, timeline: bool, as_json: bool, url: str | None) -> None:
    """Show a rollout to read: turns, tool calls, outputs, reward, tokens, times. Or a group: its rollouts."""
    with connect(url) as client:
        try:
            rollout = client.get(rollout_id, include="summary" if timeline else "trajectory")
        except ApiError as error:
            group = select(client, MOST_OF_GROUP, group_id=rollout_id) if error.status == NOT_FOUND else []
            if not group:
                raise
            show_view(Group(render.rollouts_table(group), "", render.summary_table(group)), group, as_json)
            return
        view = render.timeline_view if timeline else render.rollout_view
        show_view(view(rollout), rollout, as_json)
        flower = timeline and not as_json and client.status().get("flower")
        if flower and (pattern := flower.get("rollout")):
            click.secho(f"flower  {pattern.replace('{rollout_id}', rollout_id)}", dim=True)


@click.command()
@click.option("--tag", help="Only results with this tag.")
@click.option("--seconds", type=float, help="Stop after so many seconds. [default: until Ctrl-C]")
@json_option
@url_option
def watch(tag: str | None, seconds: float | None, as_json: bool, url: str | None) -> None:
    """Write a line for each rollout that ends; `rollout top` shows the whole service."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    cursor = "$"
    with suppress(KeyboardInterrupt), connect(url, WORK_PATIENCE_S) as client:
        while time.monotonic() < end:
            page = client.results(cursor, wait=1.0, limit=200, tag=tag, include="summary")
            cursor = page.cursor
            for rollout in page.rollouts:
                show_view(render.ended_line(rollout), rollout, as_json)


@click.command()
@click.argument("rollout_id", metavar="ID", shell_complete=complete_ids)
@json_option
@url_option
def agent(rollout_id: str, as_json: bool, url: str | None) -> None:
    """Print what a program of yours needs to drive a rollout, for `eval`; --json has the reward's key."""
    with connect(url) as client:
        access = client.agent(rollout_id)
    lines = (f"export {name}={shlex.quote(value)}" for name, value in access.environment().items())
    click.echo(access.model_dump_json() if as_json else "\n".join(lines))


@click.command()
@click.argument("rollout_id", metavar="ID", shell_complete=complete_ids)
@click.option("--turn", type=click.IntRange(1), help="Share the turns up to this one. [default: list them]")
@click.option("-n", "--n", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many go on.")
@click.option("--tag", "tags", multiple=True, help="Tag to add; may be given several times.")
@click.option("--wait", is_flag=True, help="Write a line for each that ends, until all have.")
@json_option
@url_option
def fork(
    rollout_id: str,
    turn: int | None,
    n: int,
    tags: tuple[str, ...],
    wait: bool,
    as_json: bool,
    url: str | None,
) -> None:
    """Start rollouts that go on from a turn of another. Without --turn: list the turns that are kept.

    They share its turns up to that one, and its sandbox's files as they were then. It keeps turns where its
    request says `checkpoints`.
    """
    if turn is None:
        with connect(url) as client:
            kept = client.checkpoints(rollout_id)
        show_view(Sheet(KEPT, kept), kept, as_json)
        if not kept:
            click.echo('no turn is kept: submit with "checkpoints": "every_turn" or "on_tools"', err=True)
        return
    with valid():
        request = ForkRequest(from_=ForkPoint(rollout=rollout_id, turn=turn, n=n), tags=list(tags))
    with connect(url, WORK_PATIENCE_S) as client:
        if not wait:
            started = client.submit(request)
            show_view(Text("\n".join(entry.id for entry in started)), started, as_json)
            return
        for rollout in client.rollouts(request, include="summary", progress=False):
            show_view(render.ended_line(rollout), rollout, as_json)


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=complete_ids)
@click.option("--group", "group_id", help="All rollouts of a group.")
@click.option("--tag", help="All rollouts with a tag.")
@url_option
def cancel(ids: tuple[str, ...], group_id: str | None, tag: str | None, url: str | None) -> None:
    """Cancel rollouts by id, by group or by tag. Ends with 1 when there is none of that name."""
    if sum(map(bool, (ids, group_id, tag))) != 1:
        raise click.UsageError("give ids, or --group, or --tag: exactly one of them")
    with connect(url) as client:
        done = client.cancel_many(list(ids) or None, group_id, tag)
    out.print(f"cancelled {done['cancelled']}; {done['already_ended']} had ended")
    if ids and done["unknown"]:
        names = ", ".join(done["unknown_ids"]) or f"for {done['unknown']} of these ids"
        raise click.ClickException(f"there is no rollout {names}; --group cancels a group, --tag by tag")
    if not any(done.values()):
        raise click.ClickException(f"no rollout has the {'group' if group_id else 'tag'} {group_id or tag}")
