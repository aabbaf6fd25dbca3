"""`rollout status|list|show|watch|cancel`: look at rollouts, and end them."""

from __future__ import annotations

import json
import time
from collections import deque

import click
from rich.console import Group

from rollout.cli import render
from rollout.cli.common import WORK_PATIENCE_S, connect, err, out, url_option
from rollout.schema import Rollout, State


@click.command()
@url_option
def status(url: str | None) -> None:
    """Show states, queues and backends."""
    with connect(url) as client:
        out.print(render.status_view(client.status()))
        ready = client.ready()
    if not ready.pop("ready"):
        err.print(f"[yellow]not ready:[/] {json.dumps(ready)}", soft_wrap=True)


@click.command("list")
@click.option("--state", type=click.Choice([s.value for s in State]))
@click.option("--handler")
@click.option("--group", "group_id")
@click.option("--tag")
@click.option("--limit", default=50, show_default=True, help="Most rollouts to show.")
@url_option
def list_(
    state: str | None, handler: str | None, group_id: str | None, tag: str | None, limit: int, url: str | None
) -> None:
    """List rollouts, one line each."""
    rollouts: list[Rollout] = []
    cursor = None
    with connect(url) as client:
        while len(rollouts) < limit:
            page = client.list(state, handler, group_id, tag, min(limit - len(rollouts), 500), cursor)
            rollouts += page.rollouts
            cursor = page.cursor
            if cursor is None:
                break
    out.print(render.rollouts_table(rollouts))
    if cursor is not None:
        err.print(f"[dim]there are more than {limit}: raise --limit[/]")


@click.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--timeline", is_flag=True, help="What happened to it: states, workers, backends, errors.")
@url_option
def show(rollout_id: str, timeline: bool, url: str | None) -> None:
    """Show a rollout to read: turns, tool calls, outputs, reward, tokens, times."""
    with connect(url) as client:
        if timeline:
            out.print(render.timeline_view(client.get(rollout_id, include="summary")))
            if link := render.flower_link(client.status(), rollout_id):
                out.print(link, soft_wrap=True)
        else:
            out.print(render.rollout_view(client.get(rollout_id)))


@click.command()
@click.option("--tag", help="Only results with this tag.")
@click.option("--seconds", type=float, help="Stop after so many seconds. [default: until Ctrl-C]")
@url_option
def watch(tag: str | None, seconds: float | None, url: str | None) -> None:
    """Follow the service: states, queues, backends, latest results."""
    from rich.live import Live

    end = None if seconds is None else time.monotonic() + seconds
    latest: deque[Rollout] = deque(maxlen=10)
    with connect(url, WORK_PATIENCE_S) as client, Live(console=out, auto_refresh=False) as live:
        cursor = "$"
        try:
            while end is None or time.monotonic() < end:
                page = client.results(cursor, wait=1.0, limit=200, tag=tag, include="summary")
                cursor = page.cursor
                latest.extend(page.rollouts)
                view = Group(
                    render.status_view(client.status()), "", render.rollouts_table(list(reversed(latest)))
                )
                live.update(view, refresh=True)
                if page.rollouts:  # the long-poll answers at once then; twice a second is enough to look at
                    time.sleep(0.5)
        except KeyboardInterrupt:
            pass


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--group", "group_id", help="All rollouts of a group.")
@click.option("--tag", help="All rollouts with a tag.")
@url_option
def cancel(ids: tuple[str, ...], group_id: str | None, tag: str | None, url: str | None) -> None:
    """Cancel rollouts by id, by group or by tag."""
    if sum(map(bool, (ids, group_id, tag))) != 1:
        raise click.UsageError("give ids, or --group, or --tag: exactly one of them")
    with connect(url) as client:
        done = client.cancel_many(list(ids) or None, group_id, tag)
    out.print(f"cancelled {done['cancelled']}; {done['already_ended']} had ended")
