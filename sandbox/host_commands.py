"""`rollout sandbox-host`: the host of this node, by hand; an entry point of the group `rollout.commands`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from sandbox import paths
from sandbox.errors import SandboxError
from sandbox.host_client import HostClient

state_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Sockets, records and scratch. [default: $ROLLOUT_SANDBOX_DIR or /tmp/sbx-UID]",
)


@click.group("sandbox-host")
def sandbox_host() -> None:
    """Look after the daemon that owns this node's sandboxes.

    Workers start it when they need it; nobody has to.
    """


@sandbox_host.command()
@state_option
def run(state_dir: Path | None) -> None:
    """Serve in the foreground until SIGTERM or Ctrl-C, e.g. under a service manager."""
    state = state_dir or paths.state_dir()
    os.execv(sys.executable, [sys.executable, "-m", "sandbox.host", f"--state-dir={state}"])


@sandbox_host.command()
@click.option("--json", "as_json", is_flag=True, help="JSON on one line, for scripts.")
@state_option
def status(state_dir: Path | None, as_json: bool) -> None:
    """Show the host's counts and the sandboxes that somebody works with."""
    host = HostClient(state_dir)
    try:
        stats, sandboxes = asyncio.run(host.stats()), asyncio.run(host.list())
    except SandboxError as error:
        raise click.ClickException(str(error)) from error
    if not stats:
        raise click.ClickException(f"no sandbox host serves {host.state}")
    if as_json:
        click.echo(json.dumps({"host": stats, "sandboxes": sandboxes}))
        return
    click.echo(f"host {stats['pid']}, up {stats['uptime_s']:g} s, in {host.state}")
    breaches = {f"over the {kind} limit": count for kind, count in stats["breaches"].items()}
    shown = {key: value for key, value in stats.items() if isinstance(value, int)} | breaches
    del shown["pid"]
    click.echo(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items()))
    table = Table("id", "owner", "runtime", "pid", "warm", "seconds left", box=None)
    for info in sandboxes:
        cells = [str(info[key]) for key in ("id", "owner", "runtime", "pid", "warm")]
        table.add_row(*cells, f"{info['seconds_left']:.0f}")
    if sandboxes:
        Console(width=None if sys.stdout.isatty() else 10_000).print(table)  # in a pipe a row is a line


@sandbox_host.command()
@state_option
def stop(state_dir: Path | None) -> None:
    """End the host and every sandbox of this node; rollouts in them fail and are tried again."""
    try:
        asyncio.run(HostClient(state_dir).stop())
    except SandboxError as error:
        raise click.ClickException(str(error)) from error
