"""`rollout export`: rollouts as a page that opens without a server, or in the formats of others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
from pydantic import ValidationError

from rollout.cli.common import connect, url_option
from rollout.cli.rollouts import MOST_OF_GROUP, complete_ids, select
from rollout.client import ApiError, Client
from rollout.errors import problems_of
from rollout.exports import FORMATS, placed, write
from rollout.exports.steps import file_name
from rollout.http import NOT_FOUND
from rollout.schema import Rollout

HTML = "html"
SUFFIXES = {".html": HTML, ".eval": "inspect", ".json": "atif"}
SHOWN_BY = {"harbor": "harbor view", "inspect": "inspect view --log-dir"}
"""Programs that show what was written, given the directory that it is in."""


@click.command()
@click.argument("what", metavar="ID|GROUP|FILE", shell_complete=complete_ids)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="[default: named after what it is of]")
@click.option(
    "--format", "kind", type=click.Choice([HTML, *FORMATS]), help="[default: by the end of -o, else html]"
)
@click.option("--force", is_flag=True, help="Replace the file that is there.")
@url_option
def export(what: str, output: Path | None, kind: str | None, force: bool, url: str | None) -> None:
    """Write rollouts as one HTML page that needs no server, or for tools of others.

    They are a rollout, a group, or what is in FILE, as `submit -o` and `fetch -o` write it. atif of several
    rollouts is a directory, and so is harbor: a job, by default jobs/NAME.
    """
    if output and not (kind := kind or SUFFIXES.get(output.suffix)):
        raise click.UsageError(f"give --format: only {', '.join(SUFFIXES)} say themselves what is wanted")
    kind, file = kind or HTML, Path(what)
    of_file = file.is_file()
    if of_file and kind == HTML:
        raise click.UsageError("a page is made by the service, by an id: give --format for a file")
    name = file_name(file.name.split(".")[0] if of_file else what)
    output = output or Path("jobs" if kind == "harbor" else "", name + FORMATS.get(kind, ".html"))
    try:
        if of_file:
            count = write(_read(file), output, kind, replace=force)
        else:
            with connect(url) as client:
                count = _ask(client, what, output, kind, force)
    except OSError as error:
        raise click.ClickException(f"{error.filename or output}: {error.strerror or error}") from None
    shown = f"; {SHOWN_BY[kind]} {output.absolute().parent} shows it" if kind in SHOWN_BY else ""
    click.echo(f"{output}: {count} rollout{'s' * (count != 1)}{shown}")


def _ask(client: Client, what: str, output: Path, kind: str, force: bool) -> int:
    """Write the rollout or, where none has the id, the group of that name; say how many it has."""
    try:
        ids = [client.get(what, include="summary").id]
    except ApiError as error:
        group = select(client, MOST_OF_GROUP + 1, group_id=what) if error.status == NOT_FOUND else []
        if not group:
            raise
        if len(group) > MOST_OF_GROUP:
            fetch = f"`rollout fetch --group {what} -o FILE`"
            raise click.ClickException(f"over {MOST_OF_GROUP} rollouts: {fetch}, then export FILE") from None
        ids = [rollout.id for rollout in sorted(group, key=lambda rollout: rollout.index)]
    if kind != HTML:
        return write(map(partial(client.get, include="trajectory"), ids), output, kind, replace=force)
    with placed(output, force) as target:
        target.write_bytes(client.page(what, group=ids != [what]))
    return len(ids)


def _read(file: Path) -> Iterator[Rollout]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield Rollout.model_validate_json(line)
            except ValidationError as error:
                place = f"{file}, line {number}, is no rollout"
                raise click.ClickException(f"{place}: {problems_of(error)}") from None
