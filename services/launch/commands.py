"""`rollout up`, `upgrade`, `down` and `demo`: entry points of the group `rollout.commands`."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rollout.client import Client
from rollout.errors import RolloutError
from rollout.schema import State
from services.launch import StackError, paths
from services.launch.demo import demo as run_demo
from services.launch.local import KEY_FILE, Options, Stack
from services.launch.parts import STAGES
from services.launch.upgrade import upgrade as run_upgrade
from services.settings import SettingsError

NEEDED = ("flask", "gunicorn", "celery", "redis", "psutil", "aiohttp", "transformers")
"""Packages of the extras `gateway` and `worker`; looked for, not imported."""

IN_HAND = (State.INITIALIZING, State.RUNNING, State.EVALUATING)


def _check_extras() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"this needs {', '.join(missing)}: pip install 'rollout-service[gateway,worker]'"
        )


@contextmanager
def _guarded(after: str = "everything that was started has been ended") -> Iterator[None]:
    """Errors become one message and exit code 1; Ctrl-C and TERM give 130, and say what is the case then."""
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (StackError, SettingsError, RolloutError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo(f"interrupted; {after}", err=True)
        raise click.exceptions.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, old)


runtime_option = click.option(
    "--sandbox-runtime",
    type=click.Choice(["auto", "apptainer", "bubblewrap", "local-unsafe"]),
    help="[default: ROLLOUT_SANDBOX_RUNTIME or auto]",
)
state_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Records, logs, Redis' data. [default: $ROLLOUT_HOME/run]",
)


@click.command()
@click.option("--foreground", is_flag=True, help="Stay; Ctrl-C ends everything.")
@click.option("--slots-init", type=click.IntRange(1), help="Rollouts at once in INIT. [default: 16]")
@click.option("--slots-run", type=click.IntRange(1), help="… in RUN. [default: ROLLOUT_WORKER_SLOTS or 64]")
@click.option("--slots-eval", type=click.IntRange(1), help="… in EVAL. [default: 16]")
@click.option("--backend", "backend_url", help="An LLM server of your own, instead of the demo model's.")
@click.option("--no-backend", is_flag=True, help="No LLM server; register one later.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Of the gateway. [default: 8080, else a free one]"
)
@click.option("--no-flower", is_flag=True)
@click.option(
    "--compat-port",
    type=click.IntRange(1, 65535),
    help="A port that needs NO KEY, for clients of ProRL and NeMo Gym, and serves their routes alone.",
)
@click.option("--compat-tenant", help="Whose calls those are that come by it.")
@click.option("--compat-host", help="Address that it listens on. [default: 127.0.0.1]")
@click.option(
    "--compat-servers/--no-compat-servers",
    default=None,
    help="Whether they may add LLM servers, which all tenants use. [default: they may]",
)
@runtime_option
@state_option
def up(foreground: bool, no_backend: bool, no_flower: bool, state_dir: Path | None, **asked: Any) -> None:
    """Start the whole service on this machine: Redis, gateway, three fleets, Flower, an LLM backend."""
    if asked["backend_url"] and no_backend:
        raise click.UsageError("--backend and --no-backend exclude each other")
    _check_extras()
    options = Options(
        state_dir=(state_dir or paths.state_dir()).absolute(),
        slots={stage: asked.pop(f"slots_{stage}") for stage in STAGES},
        embedded_backend=not no_backend,
        flower=not no_flower,
        **asked,
    )
    begun = time.monotonic()
    stack = Stack(options.state_dir, click.echo)
    with _guarded():
        record = stack.up(options)
        click.echo(f"up after {time.monotonic() - begun:.1f} s. Logs: {options.state_dir / 'logs'}")
        click.echo(
            "Clients of this account find it and its key by themselves; others need\n"
            f"export ROLLOUT_URL={record.url} ROLLOUT_API_KEY=$(cat {options.state_dir / KEY_FILE})"
        )
        if foreground:
            try:
                stack.wait()
            finally:
                _report(stack)


@click.command()
@state_option
def upgrade(state_dir: Path | None) -> None:
    """Replace what `up` started by the code that is installed now; rollouts go on.

    Workers, gateway, Flower and the supervisor are replaced one after another. Redis, the LLM backend and the
    sandbox host stay.
    """
    directory, begun = (state_dir or paths.state_dir()).absolute(), time.monotonic()
    with _guarded("the stack's supervisor goes on; another `rollout upgrade` begins anew"):
        record = run_upgrade(directory, click.echo)
        with Client(record.url, api_key=(directory / KEY_FILE).read_text().strip()) as client:
            states = client.status()["states"]
    in_hand = sum(states[stage] for stage in IN_HAND)
    click.echo(f"upgraded after {time.monotonic() - begun:.1f} s, with {in_hand} rollouts in hand")


@click.command()
@state_option
def down(state_dir: Path | None) -> None:
    """End what `up` started, and nothing else."""
    directory = (state_dir or paths.state_dir()).absolute()
    with _guarded():
        if not _report(Stack(directory, click.echo)):
            click.echo(f"nothing runs: {directory} holds no record of a stack")


def _report(stack: Stack) -> bool:
    """End the stack and print what was ended; False when there was no record."""
    ended = stack.down()
    if ended is None:
        return False
    for name in ended.parts:
        click.echo(f"ended {name}")
    if ended.strays:
        click.echo(f"ended {ended.strays} further processes that these had started")
    if not ended.parts and not ended.strays:
        click.echo("everything had ended before")
    return True


@click.command()
@click.option("--n", default=64, show_default=True, type=click.IntRange(1, 1000), help="Rollouts.")
@runtime_option
def demo(n: int, sandbox_runtime: str | None) -> Any:
    """Run real rollouts of the demo model on a stack of their own, show them, leave nothing running.

    What is left is demo.html below $ROLLOUT_HOME or .local: the page of one of them.
    """
    _check_extras()
    with _guarded():
        fine = run_demo(n, sandbox_runtime, Console(), click.echo)
    if not fine:
        raise click.exceptions.Exit(1)
