"""What the commands share: where they write, how they find the gateway, completion, and tables."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rollout.client import Client
from rollout.errors import RolloutError, problems_of
from rollout.http import without_password

out = Console()
err = Console(stderr=True)
url_option = click.option("--url", help="The gateway. [default: $ROLLOUT_URL, or this checkout's service]")
PATIENCE_S, WORK_PATIENCE_S = 2.0, 30.0
"""For a gateway that is away: where a person waits for one answer, and where work is under way."""
output_option = click.option(
    *("-o", "--output"),
    type=click.File("w", encoding="utf-8"),
    default="-",
    help="Where the rollouts go, one JSON object a line. [default: stdout]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on one line, for scripts.")
PIPE_CHARS = 10_000
"""Width of a pipe."""
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
        click.secho(f"{without_password(client.found[0])}: {client.found[1]}", err=True, dim=True)
    if retry_for > PATIENCE_S:
        # No work is under way yet: a gateway that is away is told of at once.
        client.results("$", limit=1, include="summary")
        client.retry_for = retry_for
    return client


class ReadingGroup(click.Group):
    """Commands of which `list`, or else `show`, is what the group does by itself, with that one's options."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, invoke_without_command=True, **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks_help = args[:1] and args[0] in ctx.help_option_names
        if not ctx.resilient_parsing and not asks_help and (not args or args[0].startswith("-")):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    @property
    def default(self) -> str:
        """The command that the group is without one."""
        return "list" if "list" in self.commands else "show"


@contextmanager
def valid() -> Iterator[None]:
    """What the user gave makes a request, or one message says why not."""
    try:
        yield
    except ValidationError as error:
        raise click.ClickException(problems_of(error)) from None


_asked = partial(Client, timeout=1.0, retry_for=0.0)


def completed(
    names: Callable[[Any], Iterable[str]],
    source: Callable[..., AbstractContextManager[Any]] = _asked,
    option: str = "url",
) -> Callable[..., list[str]]:
    """What the shell completes an argument with; nothing where the source, named by `option`, is mute."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        with suppress(RolloutError, click.ClickException), source(ctx.params.get(option)) as asked:
            return [name for name in names(asked) if name.startswith(incomplete)]
        return []

    return complete


complete_handlers = completed(lambda client: [info.name for info in client.handlers()])


def show_view(view: RenderableType, value: Any = None, as_json: bool = False) -> None:
    """Print what is to be read, or `value` as JSON (models too).

    In a terminal ids run over the edge rather than be cut. In a pipe a row is a line, whole.
    """
    try:
        if as_json:
            click.echo(json.dumps(value, default=lambda model: model.model_dump(mode="json")))
        elif out.is_terminal:
            out.print(view, crop=False)
        else:
            pipe = Console(width=PIPE_CHARS)
            with pipe.capture() as captured:
                pipe.print(view)
            print("\n".join(line.rstrip(" ") for line in captured.get().split("\n")), end="", flush=True)
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

    Where that is not enough it cuts those that may be.
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Any]) -> None:
        self._columns, self._rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {
            column: [_text(column.name), *(_text(column.cell(row)) for row in self._rows)]
            for column in self._columns
        }
        widths = {column: max(cell.cell_len for cell in cells) + GAP for column, cells in columns.items()}
        room = options.max_width + GAP
        for column in sorted((c for c in columns if c.drop), key=lambda column: column.drop):
            if sum(widths.values()) <= room:
                break
            del widths[column]
        for column in sorted((c for c in widths if not c.whole), key=lambda column: -widths[column]):
            least = GAP + max(LEAST_CHARS, len(column.name))
            widths[column] -= max(0, min(sum(widths.values()) - room, widths[column] - least))
        whole = sum(widths.values()) - GAP
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0), width=whole)
        for column, width in widths.items():
            table.add_column(
                column.name.strip(),
                justify="right" if column.number else "left",
                no_wrap=True,
                overflow="ellipsis",
                width=width - GAP,
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
