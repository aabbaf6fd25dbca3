"""The `rollout` command. Client commands live here; operator commands come from entry points.

An entry point of the group `rollout.commands` (name = the command, value = a click command) adds
one. It is imported only when it is used, so that a trainer's light install can list them all.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import IO, Any, TypeVar

import click
from pydantic import ValidationError
from rich.console import Console, Group

from rollout import __version__, _render
from rollout.archive_commands import archive
from rollout.batch_commands import batches
from rollout.client import Client, RolloutError
from rollout.schema import Canary, LoraAdapter, Rollout, State, UpdateState
from rollout.submit_commands import submit, tasks
from rollout.top_command import top

COMMAND_GROUP = "rollout.commands"
EXTRAS_HINT = "pip install 'rollout-service[gateway,worker]'"
OPERATOR_HELP = {
    "up": "Start the whole service on this machine.",
    "down": "End what `up` started.",
    "demo": "Run real rollouts on a stack of its own and show them.",
    "keys": "Make, rotate and revoke API keys.",
    "tenants": "Show tenants, and set what each may use.",
    "handlers": "List handlers, or begin one of your own.",
    "run": "Run a file of tasks with a handler, here or by the service.",
    "images": "Build, list, inspect and prune images of sandboxes.",
    "slurm": "Run the service on a Slurm cluster.",
    "autoscale": "Have the capacity of each stage follow its queue.",
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
    return click.option("--url", help="The gateway. [default: $ROLLOUT_URL, or your running service]")(
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
@click.option("--timeline", is_flag=True, help="What happened to it: states, workers, backends, errors.")
@url_option
def show(rollout_id: str, timeline: bool, url: str | None) -> None:
    """Show a rollout to read: turns, tool calls, outputs, reward, tokens, times."""
    with Client(url) as client:
        if timeline:
            out.print(_render.timeline_view(client.get(rollout_id, include="summary")))
            if link := _render.flower_link(client.status(), rollout_id):
                out.print(link, soft_wrap=True)
        else:
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


main.add_command(top)
main.add_command(batches)
main.add_command(submit)
main.add_command(tasks)


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


# ---------------------------------------------------------------------------------- backends


@main.group(invoke_without_command=True)
@click.pass_context
def backends(ctx: click.Context) -> None:
    """List, add, drain and remove LLM servers. Without a command: list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_backends, url=None)


@backends.command("list")
@url_option
def list_backends(url: str | None) -> None:
    """Show each with its load, its health and the weights it serves."""
    with Client(url) as client:
        found = client.backends()
    if found:
        out.print(_render.backends_table(found))
    else:
        err.print("there is no backend: add one with `rollout backends add SERVER`")


@backends.command("add")
@click.argument("server", metavar="SERVER")
@click.option("--id", "backend_id", help="Name for it. [default: made from the address]")
@click.option("--model", help="Name to ask for. [default: the first one the server lists]")
@click.option("--tokenizer", help="Path or hub name. [default: as the server says]")
@click.option("--logprobs-mode", type=click.Choice(["raw_logprobs", "processed_logprobs"]))
@click.option("--capacity-tokens", type=click.IntRange(1), help="Size of its cache. [default: as it says]")
@click.option("--max-rollouts", type=click.IntRange(1), help="Most at once. [default: as its cache has room]")
@url_option
def add_backend(server: str, backend_id: str | None, url: str | None, **fields: Any) -> None:
    """Register the LLM server at the address SERVER, or have it described anew."""
    with Client(url) as client:
        out.print(_render.backends_table([client.add_backend(server, id=backend_id, **fields)]))


@backends.command()
@click.argument("backend_id", metavar="ID")
@url_option
def drain(backend_id: str, url: str | None) -> None:
    """Give it no new rollouts; those on it go on."""
    with Client(url) as client:
        live = client.drain_backend(backend_id).live_rollouts
    out.print(f"{backend_id} takes no new rollouts; {live} go on there", highlight=False)


@backends.command()
@click.argument("backend_id", metavar="ID")
@url_option
def undrain(backend_id: str, url: str | None) -> None:
    """Give it new rollouts again."""
    with Client(url) as client:
        client.drain_backend(backend_id, drain=False)
    out.print(f"{backend_id} takes new rollouts", highlight=False)


@backends.command("remove")
@click.argument("backend_id", metavar="ID")
@click.option("--if-idle", is_flag=True, help="Only when no rollout is on it.")
@url_option
def remove_backend(backend_id: str, if_idle: bool, url: str | None) -> None:
    """Forget it; rollouts on it move to another at their next call."""
    with Client(url) as client:
        client.remove_backend(backend_id, force=not if_idle)
    out.print(f"{backend_id} is removed", highlight=False)


# ---------------------------------------------------------------------------------- policy


@main.group(invoke_without_command=True)
@click.pass_context
def policy(ctx: click.Context) -> None:
    """Show the weights in use, or bring new ones. Without a command: show them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(show_policy, url=None)


@policy.command("show")
@url_option
def show_policy(url: str | None) -> None:
    """Show the current policy and the latest updates."""
    with Client(url) as client:
        out.print(_render.policy_view(client.policy()))


@policy.command("update")
@click.argument("version")
@click.argument("path", required=False)
@click.option("--mode", type=click.Choice(["keep", "wait", "abort"]), default="keep", show_default=True)
@click.option(
    "--canary", type=click.File("r", encoding="utf-8"), help="JSON: token_ids, logprobs, tolerance."
)
@click.option("--lora", help="PATH is an adapter, to be exchanged under this name.")
@click.option("--backend", "chosen", multiple=True, help="Only this one; may be given several times.")
@click.option("--concurrency", type=click.IntRange(0), default=0, help="Backends at once. [default: all]")
@click.option("--reset-prefix-cache", is_flag=True, help="Use nothing again that old weights computed.")
@click.option("--wait", default=600.0, show_default=True, help="Seconds to wait for the end.")
@url_option
def update_policy(
    version: str,
    path: str | None,
    canary: IO[str] | None,
    lora: str | None,
    chosen: tuple[str, ...],
    url: str | None,
    **fields: Any,
) -> None:
    """Bring the weights in directory PATH to the backends and label them VERSION.

    Without PATH the backends have the weights already and are only labelled. Ends with 1 unless every backend
    serves the new weights.
    """
    try:
        fields["canary"] = Canary.model_validate_json(canary.read()) if canary else None
        fields["lora"] = LoraAdapter(name=lora) if lora else None
        with Client(url) as client:
            update = client.update_policy(version, path, backends=list(chosen) or None, **fields)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise click.ClickException(problems) from None
    out.print(_render.update_view(update))
    if update.state is not UpdateState.DONE:
        raise click.exceptions.Exit(1)


main.add_command(archive)


if __name__ == "__main__":
    main()
