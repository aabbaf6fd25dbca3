"""`rollout batches`: look at batches and steer them."""

from __future__ import annotations

import click
from rich.table import Table

from rollout.cli.common import out, url_option
from rollout.client import Client
from rollout.schema import Batch

batch_id = click.argument("batch_id", metavar="ID")


@click.group(invoke_without_command=True)
@click.pass_context
def batches(ctx: click.Context) -> None:
    """Look at batches, pause, resume and cancel them. Without a command: list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_batches, limit=20, url=None)


def _table(found: list[Batch]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("batch", "state", "kept"):
        table.add_column(name, no_wrap=True)  # who narrows the terminal loses the rest first
    for name in ("filtered", "failed", "cancelled", "carried", "open", "in flight", "prompts"):
        table.add_column(name)
    for one in found:
        table.add_row(
            one.id,
            one.state.value + (" (paused)" if one.paused else ""),
            f"{one.kept}/{one.wanted}",
            str(one.filtered),
            str(one.failed),
            str(one.cancelled),
            f"+{one.carried_in} -{one.carried_out}",
            str(one.open),
            str(one.in_flight),
            str(one.waiting_prompts),
        )
    return table


@batches.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@url_option
def list_batches(limit: int, url: str | None) -> None:
    """Show the newest with their counters."""
    with Client(url) as client:
        out.print(_table(list(client.batches.list(limit))))


@batches.command()
@batch_id
@url_option
def show(batch_id: str, url: str | None) -> None:
    """Show one, with the reasons for which groups were not kept."""
    with Client(url) as client:
        found = client.batches.get(batch_id)
    out.print(_table([found]))
    for reason, count in sorted(found.reasons.items(), key=lambda pair: -pair[1]):
        out.print(f"  {count} {reason}", highlight=False)


def _steer(action: str, text: str) -> None:
    @batches.command(action, help=text)
    @batch_id
    @url_option
    def command(batch_id: str, url: str | None) -> None:
        with Client(url) as client:
            out.print(_table([getattr(client.batches, action)(batch_id)]))


_steer("pause", "Start no more groups; what runs goes on.")
_steer("resume", "Start groups again.")
_steer("cancel", "End it with all that is under way.")
