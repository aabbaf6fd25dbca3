"""`rollout harness`: build the pack of agent programs and list it; an entry point of `rollout.commands`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing, nullcontext
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from rollout.errors import RolloutError
from sandbox import paths
from services.launch import StackError
from workers.harnesses import catalogue, pack

err = Console(stderr=True)
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
@click.option("--json", "as_json", is_flag=True, help="JSON on one line, for scripts.")
def list_(as_json: bool) -> None:
    """List the harnesses, the versions that are pinned, and what of them is built."""
    rows = [_row(name) for name in catalogue.names()]
    if as_json:
        click.echo(json.dumps({"directory": str(pack.directory()), "harnesses": rows}))
        return
    table = Table("name", "version", "built", "packages", box=None, pad_edge=False)
    for row in rows:
        built = "yes" if row["built"] else "no"
        table.add_row(row["name"], row["version"], built, row["error"] or " ".join(row["packages"]))
    _print(table)
    click.echo(f"in {pack.directory()}")


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)  # in a pipe a row is a line


@harness.command("check")
@NAMES
def check_(names: tuple[str, ...]) -> None:
    """Have the programs NAME (default: all but `command`) do a task on a stack of their own, and judge them.

    A script is their model. The task has calls of tools, a long output and more than a context holds.
    """
    from workers.harnesses.check import check  # it takes seconds to import

    names = names or tuple(name for name in catalogue.names() if name != "command")
    columns = ("calls", "branches", "retries", "delivered", "drift", "compactions", "verdict")
    table, fine = Table("name", *columns, box=None, pad_edge=False), True
    try:
        with closing(check(names, lambda line: err.print(line, style="dim"))) as rows:
            for name, row in zip(names, rows, strict=True):
                table.add_row(name, *row)
                err.print(f"{name}: {row[-1]}", style="dim")
                fine &= row[-1].startswith("ok")
    except (StackError, RolloutError) as error:
        raise click.ClickException(str(error)) from error
    _print(table)
    if not fine:
        raise click.exceptions.Exit(1)
