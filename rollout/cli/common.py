"""What the commands share: where they write, how they find the gateway, and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from rollout.client import Client
from rollout.http import default_address

out = Console()
err = Console(stderr=True)
url_option = click.option("--url", help="The gateway. [default: $ROLLOUT_URL, or this checkout's service]")
PATIENCE_S, WORK_PATIENCE_S = 2.0, 30.0
"""For a gateway that is away: where a person waits for one answer, and where work is under way."""
GAP = 2
"""Characters between columns."""


def connect(url: str | None, retry_for: float = PATIENCE_S, **options: Any) -> Client:
    """A client of the gateway. Where the command line names none, standard error says which one it is."""
    if url is None:
        url, origin = default_address()
        err.print(f"{url}: {origin}", style="dim", highlight=False, markup=False, soft_wrap=True)
    return Client(url, retry_for=retry_for, **options)


@dataclass(frozen=True)
class Column:
    """One column, and how its cell is made of a row."""

    name: str
    cell: Callable[[Any], str | Text]
    number: bool = False
    """Whether it stands at the right."""
    drop: int = 0
    """Its place among those that are left out where the window is narrow; 0 = it never is."""


class Sheet:
    """The rows as a table, which leaves out columns where the window is narrow, rather than cut them all."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Any]) -> None:
        self._columns, self._rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {
            column: [_text(column.name), *(_text(column.cell(row)) for row in self._rows)]
            for column in self._columns
        }
        widths = {column: max(cell.cell_len for cell in cells) + GAP for column, cells in columns.items()}
        for column in sorted((c for c in columns if c.drop), key=lambda column: column.drop):
            if sum(widths.values()) - GAP <= options.max_width:
                break
            del widths[column]
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
        for column in widths:
            justify = "right" if column.number else "left"
            table.add_column(column.name.strip(), justify=justify, no_wrap=True, overflow="ellipsis")
        for cells in zip(*(columns[column][1:] for column in widths), strict=True):
            table.add_row(*cells)
        yield table


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def or_dash(value: float | None, form: str = "{}") -> str:
    """The value, or a dash where it is not known."""
    return "–" if value is None else form.format(value)
