"""`rollout autoscale`: an entry point of the group `rollout.commands`."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from pathlib import Path

import click
import redis
import structlog

from rollout.schema.base import DEFAULT_POLICY
from services import logs
from services.autoscale.engines import SlurmEngines
from services.autoscale.policy import STAGES, Bounds, Goal
from services.autoscale.scaler import Autoscaler, Kind, Options, SlurmNodes
from services.launch import SlurmError, paths
from services.launch.slurm.stack import DRAIN_GRACE_S, SlurmStack
from services.queues import make_celery
from services.settings import Settings, SettingsError
from services.state.backends.store import PlacementPolicy
from services.state.redis import connect

log = structlog.get_logger("autoscale")
RANGE = re.compile(r"(\d+):(\d+)")
ENGINES = re.compile(r"(?:([a-z0-9][a-z0-9._-]{0,62})=)?(\d+:\d+)")


def _bounds(text: str, option: str) -> Bounds:
    match = RANGE.fullmatch(text)
    if match is None:
        raise click.UsageError(f"{option} {text}: write LEAST:MOST, such as 2:16")
    try:
        return Bounds(int(match[1]), int(match[2]))
    except ValueError as error:
        raise click.UsageError(f"{option} {text}: {error}") from error


def _kinds(nodes: str | None, stages: tuple[str, ...]) -> dict[Kind, Bounds]:
    kinds: dict[Kind, Bounds] = {STAGES: _bounds(nodes, "--nodes")} if nodes else {}
    for text in stages:
        stage, _, bounds = text.partition("=")
        if stage not in STAGES:
            raise click.UsageError(f"--stage {text}: write {', '.join(STAGES)} = LEAST:MOST, such as run=0:8")
        kinds[(stage,)] = _bounds(bounds, f"--stage {stage}")
    return kinds


def _engines(texts: tuple[str, ...]) -> dict[str, Bounds]:
    engines: dict[str, Bounds] = {}
    for text in texts:
        match = ENGINES.fullmatch(text)
        name = match and (match[1] or DEFAULT_POLICY)
        if match is None or name in engines:
            raise click.UsageError(f"--engines {text}: write LEAST:MOST or POLICY=LEAST:MOST, once a policy")
        engines[name] = _bounds(match[2], "--engines")
    return engines


@click.command()
@click.option("--nodes", metavar="LEAST:MOST", help="Node jobs of all stages, on Slurm.")
@click.option(
    "--stage",
    "stages",
    multiple=True,
    metavar="STAGE=LEAST:MOST",
    help="Jobs of one stage, without sandboxes.",
)
@click.option("--engines", multiple=True, metavar="[POLICY=]LEAST:MOST",
              help="Engine jobs of a policy, on Slurm; of `default` where none is named.")  # fmt: skip
@click.option(
    "--live-slots",
    metavar="LEAST:MOST",
    help="Slots of each stage, within what its workers were started with (-c).",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="ROLLOUT_SLURM_RUN",
    help="Of the service on Slurm. [default: $ROLLOUT_SLURM_RUN or $ROLLOUT_HOME/slurm-run]",
)
@click.option("--wait-s", type=click.FloatRange(min=0.1), help="Target of the wait in a stage's queue.")
@click.option(
    "--hold-s", type=click.FloatRange(min=0), help="How far back the need counts that keeps capacity."
)
@click.option("--grace", type=click.FloatRange(0), default=DRAIN_GRACE_S, show_default=True,
              help="Seconds for the rollouts of a drained node.")  # fmt: skip
@click.option("--once", is_flag=True, help="One decision, then end.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
def autoscale(
    nodes: str | None,
    stages: tuple[str, ...],
    engines: tuple[str, ...],
    live_slots: str | None,
    run_dir: Path | None,
    wait_s: float | None,
    hold_s: float | None,
    grace: float,
    once: bool,
    dry_run: bool,
) -> None:
    """Have each stage's capacity follow its queue, and engines what needs them, until Ctrl-C."""
    kinds, bounds = _kinds(nodes, stages), _engines(engines)
    if not (kinds or bounds or live_slots):
        raise click.UsageError("give --nodes, --stage, --engines or --live-slots: what changes, and how far")
    live = _bounds(live_slots, "--live-slots") if live_slots else None
    stack = SlurmStack(run_dir or paths.home() / "slurm-run", _tell) if kinds or bounds else None
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # By a thread: the code that a signal interrupts may hold the event's lock.
        signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
    while True:
        try:
            settings = _settings(stack)
            if stack and bounds:
                stack.engine_policy()
            logs.configure(settings)
            goal = Goal(
                wait_s=settings.autoscale_wait_s if wait_s is None else wait_s,
                hold_s=settings.autoscale_hold_s if hold_s is None else hold_s,
            )
            admit = PlacementPolicy.admit if settings.backend_load == "tokens" else 0.0
            options = Options(goal, live, kinds, bounds, admit, settings.autoscale_interval_s, dry_run)
            with make_celery(settings) as app, connect(settings.redis_url) as client:
                owner = f"{socket.gethostname()}/{os.getpid()}"
                pools = (SlurmNodes(stack, grace), SlurmEngines(stack, grace)) if stack else ()
                scaler = Autoscaler(client, options, app, *pools, owner=owner, say=_tell)
                scaler.run(stopping, once)
            return
        except (SettingsError, SlurmError) as error:
            raise click.ClickException(str(error)) from error
        except redis.RedisError as error:
            if once or stack is None:
                raise click.ClickException(f"Redis does not answer: {error}") from error
            # The head may have come back on another node: the run directory says where.
            click.echo("Redis is away; looking for the head again", err=True)


def _tell(text: str) -> None:
    """Have what is done in the log and on the terminal."""
    log.info(text)
    click.echo(text)


def _settings(stack: SlurmStack | None) -> Settings:
    """Of the environment; on Slurm with the Redis of the service's head, SlurmError where none is up."""
    if stack is None:
        return Settings.from_env()
    head = stack.run.head()
    if head is None:
        raise SlurmError(f"no service runs from {stack.run.path}; `rollout slurm up` starts one")
    return Settings.from_env({**os.environ, "ROLLOUT_REDIS_URL": stack.run.redis_url(head)})
