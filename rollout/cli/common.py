"""What the commands share: where they write, how they find the gateway, completion, and tables."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rollout.client import Client
from rollout.errors import RolloutError
from rollout.http import without_password

out = Console()
err = Console(stderr=True)
url_option = click.option("--url", help="The gateway. [default: $ROLLOUT_URL, or this checkout's service]")
PATIENCE_S, WORK_PATIENCE_S = 2.0, 30.0
"""For a gateway that is away: where a person waits for one answer, and where work is under way."""
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on one line, for scripts.")
PIPE_CHARS = 10_000
"""Width of a pipe for tables: a row is a line."""
GAP = 2
"""Characters between columns."""
LEAST_CHARS = 10
"""Of a column that is cut."""


def connect(url: str | None, retry_for: float = PATIENCE_S, **options: Any) -> Client:
    """A client of the gateway. Where the command line names none, standard error says which one it is.

    Raises:
        RolloutError: None can be had; or it is to work, and does not answer now.
    """
    client = Client(url, retry_for=min(retry_for, PATIENCE_S), **options)
    if client.found:
        shown = f"{without_password(client.found[0])}: {client.found[1]}"
        err.print(shown, style="dim", highlight=False, markup=False, soft_wrap=True)
    if retry_for > PATIENCE_S:
        # No work is under way yet: a gateway that is away is told of at once.
        client.results("$", limit=1, include="summary")
        client.retry_for = retry_for
    return client


def completed(names: Callable[[Client], Iterable[str]]) -> Callable[..., list[str]]:
    """What the shell completes an argument with; nothing where the gateway does not tell within a second."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            with Client(ctx.params.get("url"), timeout=1.0, retry_for=0.0) as client:
                return [name for name in names(client) if name.startswith(incomplete)]
        except RolloutError:
            return []

    return complete


complete_handlers = completed(lambda client: [info.name for info in client.handlers()])


def show(view: RenderableType, value: Any = None, as_json: bool = False) -> None:
    """Print what is to be read, or `value` as JSON (models too). Ids run over the edge rather than be cut."""
    try:
        if as_json:
            click.echo(json.dumps(value, default=lambda model: model.model_dump(mode="json")))
        else:
            folded = out.is_terminal or not isinstance(view, Table)
            (out if folded else Console(width=PIPE_CHARS)).print(view, crop=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):
            sys.stdout.close()  # it would try to write the rest at the end
        raise click.ClickException(f"standard output cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class Column:
    """One column, and how its cell is made of a row."""

    name: str
    cell: Callable[[Any], str | Text]
    number: bool = False
    """Whether it stands at the right."""
    drop: int = 0
    """Its place among those that are left out where the window is narrow; 0 = it never is."""
    whole: bool = False
    """Whether it is never cut: an id is there to be copied."""


class Sheet:
    """The rows as a table, which leaves out columns where the window is narrow, rather than cut them all.

    Where that is not enough it cuts those that may be. In a pipe it has all columns whole.
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Any]) -> None:
        self._columns, self._rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {
            column: [_text(column.name), *(_text(column.cell(row)) for row in self._rows)]
            for column in self._columns
        }
        widths = {column: max(cell.cell_len for cell in cells) + GAP for column, cells in columns.items()}
        room = options.max_width if console.is_terminal or console is not out else sum(widths.values())
        for column in sorted((c for c in columns if c.drop), key=lambda column: column.drop):
            if sum(widths.values()) - GAP <= room:
                break
            del widths[column]
        for column in sorted((c for c in widths if not c.whole), key=lambda column: -widths[column]):
            least = GAP + max(LEAST_CHARS, len(column.name))
            over = sum(widths.values()) - GAP - room
            widths[column] -= max(0, min(over, widths[column] - least))
        table = Table(
            box=None,
            pad_edge=False,
            header_style="dim",
            padding=(0, GAP, 0, 0),
            width=sum(widths.values()) - GAP,
        )
        for column, width in widths.items():
            justify = "right" if column.number else "left"
            table.add_column(
                column.name.strip(), justify=justify, no_wrap=True, overflow="ellipsis", width=width - GAP
            )
        for cells in zip(*(columns[column][1:] for column in widths), strict=True):
            table.add_row(*cells)
        yield table


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def node_shown(name: str) -> str:
    """A node as its cluster names it, or a queue or worker with that: on Slurm our own names end with the
    job, because two jobs on one node share nothing."""
    return re.sub(r"-job\d+$", "", name)


def or_dash(value: float | None, form: str = "{}") -> str:
    """The value, or a dash where it is not known."""
    return "–" if value is None else form.format(value)
