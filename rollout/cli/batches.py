"""`rollout batches`: look at batches and steer them."""

from __future__ import annotations

import click

from rollout.cli import render
from rollout.cli.common import connect, out, url_option

batch_id = click.argument("batch_id", metavar="ID")


@click.group(invoke_without_command=True)
@click.pass_context
def batches(ctx: click.Context) -> None:
    """Look at batches, pause, resume and cancel them. Without a command: list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_batches, limit=20, url=None)


@batches.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@url_option
def list_batches(limit: int, url: str | None) -> None:
    """Show the newest with their counters."""
    with connect(url) as client:
        out.print(render.batches_table(client.batches.list(limit)))


@batches.command()
@batch_id
@url_option
def show(batch_id: str, url: str | None) -> None:
    """Show one, with the reasons for which groups were not kept."""
    with connect(url) as client:
        batch = client.batches.get(batch_id)
    out.print(render.batches_table([batch]))
    for reason, count in sorted(batch.reasons.items(), key=lambda pair: -pair[1]):
        out.print(f"  {count} {reason}", highlight=False)


def _steer(action: str, text: str) -> None:
    @batches.command(action, help=text)
    @batch_id
    @url_option
    def command(batch_id: str, url: str | None) -> None:
        with connect(url) as client:
            out.print(render.batches_table([getattr(client.batches, action)(batch_id)]))


_steer("pause", "Start no more groups; what runs goes on.")
_steer("resume", "Start groups again.")
_steer("cancel", "End it with all that is under way.")
