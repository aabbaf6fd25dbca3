"""`rollout harness`: build the pack of agent programs and list it; an entry point of `rollout.commands`."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from operator import itemgetter
from typing import Any

import click
from rich.console import Group
from rich.text import Text

from rollout.cli.common import Column, Sheet, err, json_option, show_view
from rollout.errors import RolloutError
from sandbox import paths
from services.launch import StackError
from workers.harnesses import catalogue, pack

FAULTS = (pack.PackError, catalogue.UnknownHarness)
NAMES = click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=lambda *_: catalogue.names())


@click.group()
def harness() -> None:
    """Build, list and check the agent programs that rollouts can be driven by."""


@harness.command()
@NAMES
@click.option("--python", metavar="PROGRAM", help="Python 3.12 or newer to copy. [default: one found here]")
def build(names: tuple[str, ...], python: str | None) -> None:
    """Install the programs NAME (default: all) from npm and PyPI, for sandboxes to show read-only.

    What is there already stays as it is. One that cannot be installed is named, and the others are.
    """
    failed = []
    for name in names or catalogue.names():
        begun = time.monotonic()
        try:
            found = catalogue.find(name)
            with err.status(name) if err.is_terminal else nullcontext():
                made = pack.build(found, lambda line: err.print(line, style="dim"), python)
            own = pack.part(found)
        except FAULTS as error:
            click.echo(f"{name}: FAILED: {error}", err=True)
            failed.append(name)
            continue
        took = f"built in {time.monotonic() - begun:.0f} s" if made else "there already"
        click.echo(f"{name} {own.version}: {took}" if own else f"{name}: nothing to build")
    if paths.sandbox_user() and (closed := paths.closed_to_others(pack.directory())):
        click.echo(f"WARNING: sandboxes of root are another user's, who may not enter {closed}", err=True)
    if failed:
        raise click.ClickException(f"could not be built: {', '.join(failed)}; see above")


def _row(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "version": "–", "packages": [], "built": True, "error": None}
    try:
        if own := pack.part(catalogue.find(name)):
            row |= {"version": own.version, "packages": own.packages, "built": own.built}
    except FAULTS as error:
        row |= {"built": False, "error": str(error)}
    return row


@harness.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the harnesses, the versions that are pinned, and what of them is built."""
    rows = [_row(name) for name in catalogue.names()]
    columns = (
        Column("name", lambda row: row["name"], whole=True),
        Column("version", lambda row: row["version"]),
        Column("built", lambda row: "yes" if row["built"] else "no"),
        Column("packages", lambda row: row["error"] or " ".join(row["packages"])),
    )
    place = str(pack.directory())
    view = Group(Sheet(columns, rows), Text(f"in {place}"))
    show_view(view, {"directory": place, "harnesses": rows}, as_json)


@harness.command("check")
@NAMES
def check_(names: tuple[str, ...]) -> None:
    """Have the programs NAME (default: all but `command`) do a task on a stack of their own, and judge them.

    A script is their model. The task has calls of tools, a long output and more than a context holds.
    """
    from workers.harnesses.check import check  # it takes seconds to import

    names = names or tuple(name for name in catalogue.names() if name != "command")
    columns = ("name", "calls", "branches", "retries", "delivered", "drift", "compactions", "verdict")
    judged: list[tuple[str, ...]] = []
    try:
        with closing(check(names, lambda line: err.print(line, style="dim"))) as rows:
            for name, row in zip(names, rows, strict=True):
                judged.append((name, *row))
                err.print(f"{name}: {row[-1]}", style="dim")
    except (StackError, RolloutError) as error:
        raise click.ClickException(str(error)) from error
    show_view(Sheet([Column(name, itemgetter(at)) for at, name in enumerate(columns)], judged))
    if not all(row[-1].startswith("ok") for row in judged):
        raise click.exceptions.Exit(1)
