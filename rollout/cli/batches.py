"""`rollout batches`: look at batches and steer them."""

from __future__ import annotations

from collections import Counter

import click
from rich.console import Group
from rich.text import Text

from rollout.cli import render
from rollout.cli.common import ReadingGroup, completed, connect, json_option, show_view, url_option

batch_id = click.argument(
    "batch_id",
    metavar="ID",
    shell_complete=completed(lambda client: [batch.id for batch in client.batches.list(50)]),
)


@click.group(cls=ReadingGroup)
def batches() -> None:
    """Look at batches, pause, resume and cancel them. Without a command: list them."""


@batches.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@json_option
@url_option
def list_batches(limit: int, as_json: bool, url: str | None) -> None:
    """Show the newest batches with their counters."""
    with connect(url) as client:
        newest = client.batches.list(limit)
    show_view(render.batches_table(newest), newest, as_json)


@batches.command()
@batch_id
@json_option
@url_option
def show(batch_id: str, as_json: bool, url: str | None) -> None:
    """Show a batch, with the reasons for which groups were not kept."""
    with connect(url) as client:
        batch = client.batches.get(batch_id)
    reasons = [Text(f"  {count} {reason}") for reason, count in Counter(batch.reasons).most_common()]
    show_view(Group(render.batches_table([batch]), *reasons), batch, as_json)


def _steer(action: str, text: str) -> None:
    @batches.command(action, help=text)
    @batch_id
    @url_option
    def command(batch_id: str, url: str | None) -> None:
        with connect(url) as client:
            show_view(render.batches_table([getattr(client.batches, action)(batch_id)]))


_steer("pause", "Start no more groups of a batch; those that run go on.")
_steer("resume", "Start groups of a paused batch again.")
_steer("cancel", "End a batch, and cancel its rollouts that have not ended.")
