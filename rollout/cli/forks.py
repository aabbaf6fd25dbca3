"""`rollout fork`: from which turns of a rollout others can go on, and rollouts that do."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.text import Text

from rollout.cli import render
from rollout.cli.common import (
    WORK_PATIENCE_S,
    Column,
    Sheet,
    connect,
    json_option,
    node_shown,
    show_view,
    url_option,
    valid,
)
from rollout.cli.rollouts import complete_ids
from rollout.schema import Checkpoint, ForkRequest

FILES = {
    "none": "no sandbox",
    "same": "as the turn before",
    "copy": "copied",
    "reflink": "shared blocks",
    "packed": "packed",
}
COLUMNS = (
    Column("turn", lambda kept: str(kept.turn), number=True),
    Column("age", lambda kept: f"{max(0.0, time.time() - kept.at):.0f} s", number=True),
    Column("files", lambda kept: Text(kept.error, "red") if kept.error else FILES[kept.way]),
    Column("MB", lambda kept: f"{kept.bytes / 1e6:.1f}" if kept.bytes else "–", number=True),
    Column("node", lambda kept: node_shown(kept.node) if kept.node else "–"),
)


@click.command()
@click.argument("rollout_id", metavar="ID", shell_complete=complete_ids)
@click.option("--turn", type=click.IntRange(1), help="Share the turns up to this one. [default: list them]")
@click.option("-n", "--n", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many go on.")
@click.option("--tag", "tags", multiple=True, help="Tag to add; may be given several times.")
@click.option("--seed", type=click.IntRange(0), help="Of the sampling. [default: the rollout's]")
@click.option("--max-turns", type=click.IntRange(1), help="The shared ones count. [default: the rollout's]")
@click.option("--wait", is_flag=True, help="Write a line for each that ends, until all have.")
@json_option
@url_option
def fork(
    rollout_id: str, turn: int | None, n: int, wait: bool, as_json: bool, url: str | None, **given: Any
) -> None:
    """Start rollouts that go on from a turn of another. Without --turn: list the turns that are kept.

    They share its turns up to that one, and its sandbox's files as they were then. It keeps turns where its
    request says `checkpoints`.
    """
    if turn is None:
        with connect(url) as client:
            kept: list[Checkpoint] = client.checkpoints(rollout_id)
        show_view(Sheet(COLUMNS, kept), kept, as_json)
        if not kept:
            click.echo('no turn is kept: submit with "checkpoints": "every_turn" or "on_tools"', err=True)
        return
    parts = {"sampling": {"seed": given["seed"]}, "limits": {"max_turns": given["max_turns"]}}
    fields = {name: part for name, part in parts.items() if None not in part.values()}
    with valid():
        request = ForkRequest.model_validate(
            {"from": {"rollout": rollout_id, "turn": turn, "n": n}, "tags": given["tags"]} | fields
        )
    with connect(url, WORK_PATIENCE_S) as client:
        if not wait:
            started = client.submit(request)
            show_view(Text("\n".join(entry.id for entry in started)), started, as_json)
            return
        for rollout in client.rollouts(request, include="summary", progress=False):
            show_view(render.ended_line(rollout), rollout, as_json)
