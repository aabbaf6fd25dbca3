"""The `rollout` command. Client commands live here; operator commands come from entry points.

An entry point of the group `rollout.commands` (name = the command, value = a click command) adds
one. It is imported only when it is used, so that a trainer's light install can list them all.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import IO, Any, TypeVar

import click
from pydantic import ValidationError
from rich.console import Console, Group

from rollout import __version__, _render
from rollout.client import Client, RolloutError
from rollout.operations import with_ids
from rollout.schema import Rollout, RolloutRequest, State

COMMAND_GROUP = "rollout.commands"
EXTRAS_HINT = "pip install 'rollout-service[gateway,worker]'"
OPERATOR_HELP = {
    "up": "Start the whole service on this machine.",
    "down": "End what `up` started.",
    "demo": "Run real rollouts on a stack of its own and show them.",
    "images": "Build, list, inspect and prune images of sandboxes.",
    "sandbox-host": "Look after the daemon that owns the sandboxes of this node.",
}
"""Shown without importing the command; others get a line that names their package."""

F = TypeVar("F", bound=Callable[..., Any])
out = Console()
err = Console(stderr=True)


class _Commands(click.Group):
    """Own commands first, then those of entry points, each imported on its first use."""

    def _operator(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=COMMAND_GROUP)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *sorted(set(self._operator()) - set(self.commands))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        point = self._operator().get(cmd_name)
        if command is not None or point is None:
            return command
        try:
            return point.load()
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`rollout {cmd_name}` needs the Python package {error.name!r}: {EXTRAS_HINT}"
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, cmd.get_short_help_str(80)) for name, cmd in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        points = sorted(self._operator().values(), key=lambda point: point.name)
        if points:
            with formatter.section("Operator commands"):
                formatter.write_dl([(p.name, OPERATOR_HELP.get(p.name, f"From {p.module}.")) for p in points])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RolloutError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rollout")
def main() -> None:
    """Submit rollouts of LLM agents and follow them."""


def url_option(function: F) -> F:
    return click.option("--url", help="The gateway. [default: $ROLLOUT_URL or http://127.0.0.1:8080]")(
        function
    )


# ---------------------------------------------------------------------------------- reading


@main.command()
@url_option
def status(url: str | None) -> None:
    """Show states, queues and backends."""
    with Client(url, retry_for=2.0) as client:
        out.print(_render.status_view(client.status()))
        ready = client.ready()
    if not ready.pop("ready"):
        err.print(f"[yellow]not ready:[/] {json.dumps(ready)}", soft_wrap=True)


@main.command("list")
@click.option("--state", type=click.Choice([s.value for s in State]))
@click.option("--handler")
@click.option("--group", "group_id")
@click.option("--tag")
@click.option("--limit", default=50, show_default=True, help="Most rollouts to show.")
@url_option
def list_(
    state: str | None, handler: str | None, group_id: str | None, tag: str | None, limit: int, url: str | None
) -> None:
    """List rollouts, one line each."""
    found: list[Rollout] = []
    cursor = None
    with Client(url) as client:
        while len(found) < limit:
            page = client.list(state, handler, group_id, tag, min(limit - len(found), 500), cursor)
            found += page.rollouts
            cursor = page.cursor
            if cursor is None:
                break
    out.print(_render.rollouts_table(found))
    if cursor is not None:
        err.print(f"[dim]there are more than {limit}: raise --limit[/]")


@main.command()
@click.argument("rollout_id", metavar="ID")
@url_option
def show(rollout_id: str, url: str | None) -> None:
    """Show a rollout to read: turns, tool calls, outputs, reward, tokens, times."""
    with Client(url) as client:
        out.print(_render.rollout_view(client.get(rollout_id)))


@main.command()
@click.option("--tag", help="Only completions with this tag.")
@click.option("--seconds", type=float, help="Stop after so many seconds. [default: until Ctrl-C]")
@url_option
def watch(tag: str | None, seconds: float | None, url: str | None) -> None:
    """Follow the service: states, queues, backends, latest completions."""
    from rich.live import Live

    end = None if seconds is None else time.monotonic() + seconds
    latest: deque[Rollout] = deque(maxlen=10)
    with Client(url) as client, Live(console=out, auto_refresh=False) as live:
        cursor = "$"
        try:
            while end is None or time.monotonic() < end:
                page = client.completions(cursor, wait=1.0, limit=200, tag=tag, include="summary")
                cursor = page.cursor
                latest.extend(page.rollouts)
                view = Group(
                    _render.status_view(client.status()), "", _render.rollouts_table(list(reversed(latest)))
                )
                live.update(view, refresh=True)
                if page.rollouts:  # the long-poll answers at once then; twice a second is enough to look at
                    time.sleep(0.5)
        except KeyboardInterrupt:
            pass


# ---------------------------------------------------------------------------------- submitting


@main.command()
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8"),
    default="-",
    help="Where the rollouts go, one JSON object a line. [default: stdout]",
)
@click.option("--handler", help="Each line of FILE is then a task for this handler, not a whole request.")
@click.option("--n", type=click.IntRange(1, 1000), help="Rollouts per line.")
@click.option("--tag", "tags", multiple=True, help="Tag to add; may be given several times.")
@url_option
def submit(
    file: IO[str], output: IO[str], handler: str | None, n: int | None, tags: tuple[str, ...], url: str | None
) -> None:
    """Submit the requests in FILE (JSON lines; - is stdin) and write each rollout as it ends."""
    requests = with_ids(read_requests(file, handler, n, list(tags)))
    if not requests:
        raise click.ClickException(f"{file.name} holds no request: give one JSON object a line")
    pending = {rollout_id for request in requests for rollout_id in request.rollout_ids()[1]}
    with Client(url) as client, _render.Meter(len(pending), err) as meter:
        try:
            for rollout in client.run_stream(requests):
                pending.discard(rollout.id)
                output.write(rollout.model_dump_json() + "\n")
                output.flush()
                meter.add(rollout)
        except KeyboardInterrupt:
            meter.__exit__(None, None, None)  # the question needs the terminal to itself
            _cancel_rest(client, pending)
            raise click.exceptions.Exit(130) from None


def _cancel_rest(client: Client, pending: set[str]) -> None:
    """After Ctrl-C: cancel what has not ended, unless a person at the terminal says no."""
    try:
        asked = sys.stdin.isatty() and sys.stderr.isatty()
        if asked and not click.confirm(
            f"Cancel the {len(pending)} rollouts not ended?", default=True, err=True
        ):
            err.print("[dim]they go on; `rollout list` shows them[/]")
            return
    except (click.Abort, KeyboardInterrupt):
        pass  # Ctrl-C again means yes
    done = client.cancel_many(ids=sorted(pending))
    err.print(f"cancelled {done['cancelled']}; {done['already_ended']} had ended")


def read_requests(file: IO[str], handler: str | None, n: int | None, tags: list[str]) -> list[RolloutRequest]:
    """Requests from JSON lines; with `handler`, each line is the task object alone.

    Raises:
        click.ClickException: A line is no JSON object or no valid request; it is named.
    """
    requests = []
    for position, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError(f"expected a JSON object, got {type(data).__name__}")
            fields = {"handler": handler, "task": data} if handler else data
            if n is not None:
                fields["n"] = n
            if tags:
                fields["tags"] = [*fields.get("tags", []), *tags]
            requests.append(RolloutRequest.model_validate(fields))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise click.ClickException(f"{file.name}, line {position}: {problems}") from None
        except ValueError as error:
            raise click.ClickException(f"{file.name}, line {position}: {error}") from None
    return requests


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--group", "group_id", help="All rollouts of a group.")
@click.option("--tag", help="All rollouts with a tag.")
@url_option
def cancel(ids: tuple[str, ...], group_id: str | None, tag: str | None, url: str | None) -> None:
    """Cancel rollouts by id, by group or by tag."""
    if sum(map(bool, (ids, group_id, tag))) != 1:
        raise click.UsageError("give ids, or --group, or --tag: exactly one of them")
    with Client(url) as client:
        done = client.cancel_many(list(ids) or None, group_id, tag)
    out.print(f"cancelled {done['cancelled']}; {done['already_ended']} had ended")


if __name__ == "__main__":
    main()
