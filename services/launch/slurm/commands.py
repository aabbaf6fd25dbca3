"""`rollout slurm`: an entry point of the group `rollout.commands`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from rollout.cli.common import node_shown, show_view
from rollout.errors import RolloutError
from rollout.schema.base import DEFAULT_POLICY
from services.launch import SlurmError, StackError, paths
from services.launch.parts import STAGES
from services.launch.slurm import plan, site
from services.launch.slurm.plan import ENGINE, MOST_NODES, NODE, Engines, UpOptions
from services.launch.slurm.rundir import RunDir
from services.launch.slurm.stack import DOWN_GRACE_S, DRAIN_GRACE_S, SlurmStack
from services.launch.slurm.view import Status, look, status_of
from services.settings import SettingsError

MOST_DRAINED = 5
"""Nodes that were drained of which `status` tells, the latest."""
STAGE_COUNT = re.compile(r"(init|run|eval)=([+-]?)(\d{1,4})")


@contextmanager
def _guarded() -> Iterator[None]:
    """Errors become one message and exit code 1."""
    try:
        yield
    except (SlurmError, StackError, SettingsError, RolloutError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted; what was submitted stays, `rollout slurm down` ends it", err=True)
        raise click.exceptions.Exit(130) from None


run_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="ROLLOUT_SLURM_RUN",
    help="Where the jobs meet; every node must see it. "
    "[default: $ROLLOUT_SLURM_RUN or $ROLLOUT_HOME/slurm-run]",
)
grace_help = "Seconds for rollouts to end; the rest is handed back."


def _stack(run_dir: Path | None) -> SlurmStack:
    return SlurmStack(run_dir or paths.home() / "slurm-run", click.echo)


@click.group()
def slurm() -> None:
    """Run the service on a Slurm cluster: a head job, and a job for each node."""


@slurm.command()
@click.option("--nodes", type=click.IntRange(0, MOST_NODES), help="[default: 1, or all of the allocation]")
@click.option("--slots-init", type=click.IntRange(1), help="Rollouts at once in INIT, a node. [default: 16]")
@click.option("--slots-run", type=click.IntRange(1), help="… in RUN. [default: ROLLOUT_WORKER_SLOTS or 64]")
@click.option("--slots-eval", type=click.IntRange(1), help="… in EVAL. [default: 16]")
@click.option("--engine-nodes", type=click.IntRange(0), default=0, help="Nodes that carry LLM servers.")
@click.option("--engine-model", help="Model that `vllm serve` serves.")
@click.option("--engine-gpus", type=click.IntRange(0), default=1, help="GPUs of one server. [default: 1]")
@click.option("--engine-command", help="Instead of `vllm serve`; {model} {host} {port} {gpus} are filled in.")
@click.option("--engine-policy", default=DEFAULT_POLICY, help="Policy that they serve. [default: default]")
@click.option("--partition", help="Partition of every job; by role in the site file.")
@click.option("--account", help="Account of every job.")
@click.option("--qos", help="Quality of service of every job.")
@click.option("--time", help="Time limit of every job, as sbatch has it.")
@click.option(
    "--site",
    "site_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Site file. [default: $ROLLOUT_SLURM_SITE or $ROLLOUT_HOME/slurm.toml if there is one]",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where Redis keeps its append-only file. [default: in the run directory]",
)
@click.option("--renew", is_flag=True, help="At their time limit jobs queue again instead of ending.")
@click.option("--one-job", is_flag=True, help="One job that carries everything; the head on its first node.")
@click.option(
    "--attach/--no-attach",
    default=None,
    help="Begin it as steps of the allocation that this shell is in. [default: if it is in one]",
)
@click.option("--no-flower", is_flag=True)
@click.option("--wait/--no-wait", default=True, help="Wait until rollouts can be worked on. [default: wait]")
@click.option("--timeout", type=click.FloatRange(0), default=math.inf, help="Seconds to wait. [default: any]")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and change nothing.")
@run_option
def up(
    site_file: Path | None, wait: bool, timeout: float, dry_run: bool, run_dir: Path | None, **asked: Any
) -> None:
    """Submit the service: one head job, and an array of node jobs that join it."""
    with _guarded():
        where = site.load(site_file or site.default_path(paths.home()))
        options = _options(**asked)
        stack = _stack(run_dir)
        if dry_run and (again := stack.head_alone(look(stack.run), where, options)):
            click.echo(shlex.join(again.command))
            return
        if dry_run:
            _show_plan(stack.run, where, options)
            return
        nodes = stack.up(where, options)
        if not wait:
            click.echo("not waiting; `rollout slurm status` shows how it goes")
            return
        head = stack.wait(timeout, nodes)
        click.echo(f"up on {head.node}, run directory {stack.run.path}")
        if head.flower_url:
            click.echo(f"Flower: {head.flower_url} on {head.node}, password in {stack.run.flower_auth}")
        click.echo("Commands and clients of this account find it and its key, wherever its head is, by")
        click.echo(f"export ROLLOUT_SLURM_RUN={shlex.quote(str(stack.run.path))}\nand others by")
        click.echo(f"export ROLLOUT_URL={head.url} ROLLOUT_API_KEY=$(cat {stack.run.key_file})")


def _options(
    nodes: int | None, one_job: bool, attach: bool | None, data_dir: Path | None, **asked: Any
) -> UpOptions:
    """What `up` was asked; SlurmError or click.UsageError where options do not fit together."""
    if attach is None:
        attach = "SLURM_JOB_ID" in os.environ and not one_job and nodes is None
    if attach and (one_job or nodes is not None):
        raise click.UsageError("in an allocation all its nodes are used: leave out --nodes and --one-job")
    engines = {name.removeprefix("engine_"): asked[name] for name in asked if name.startswith("engine_")}
    return UpOptions(
        nodes=1 if nodes is None else nodes,
        slots={stage: asked[f"slots_{stage}"] for stage in STAGES if asked[f"slots_{stage}"]},
        engines=Engines(**engines) if engines["nodes"] else None,
        given={name: asked[name] for name in ("partition", "account", "qos", "time") if asked[name]},
        data_dir=str(data_dir.absolute()) if data_dir else None,
        renew=asked["renew"],
        flower=not asked["no_flower"],
        form=plan.ATTACHED if attach else plan.ONE_JOB if one_job else plan.SEPARATE,
    )


def _show_plan(run: RunDir, where: site.Site, options: UpOptions) -> None:
    click.echo(f"# {run.environment}")
    text = plan.environment(run, where, options)
    # Shown on a terminal, perhaps in a ticket: no secrets.
    click.echo(re.sub(r"(?m)^(export \w*(?:SECRET|PASSWORD|KEY|TOKEN|REDIS_URL)\w*=).*$", r"\1***", text))
    if options.form == plan.ATTACHED:
        click.echo(shlex.join(["bash", *plan.allocation_script(run)]))
        return
    for submission in plan.submissions(run, where, options):
        click.echo(shlex.join(submission.command))


@slurm.command()
@click.option("--json", "as_json", is_flag=True)
@run_option
def status(as_json: bool, run_dir: Path | None) -> None:
    """Show the jobs, where they are, and what their workers do."""
    with _guarded():
        stack = _stack(run_dir)
        now = status_of(stack.run)
        if as_json:
            click.echo(json.dumps(asdict(now)))
        else:
            _show_status(now)
            stack.tell(now.failures)
            if not (now.head_job or now.jobs or now.failures) and stack.run.submitted():
                # Slurm has forgotten it.
                click.echo(f"what was submitted has ended. {stack.last_words()}")
            if now.advice:
                click.echo(f"\n{now.advice}")
    if now.head_job is None:
        raise click.exceptions.Exit(1)


def _show_status(status: Status) -> None:
    if status.head_job is None:
        gone = "the head is gone" if status.jobs else "no service runs"
        click.echo(f"{gone}; run directory {status.run_dir}")
    elif status.head is None or status.head.job != status.head_job.raw_id:
        job = status.head_job
        click.echo(f"head: job {job.id} is {job.state.lower()} ({job.reason})")
    else:
        head, left = status.head, status.head_job.left
        click.echo(f"head: {head.state} on {head.node}, job {head.job}, {left} left, {head.url}")
        if status.trouble:
            click.secho(f"the gateway does not answer: {status.trouble}", fg="yellow")
    table = Table("job", "role", "node", "state", "left", "what", box=None)
    for view in status.jobs:
        member = view.member
        state = member.state if member else view.job.state.lower()
        what = view.job.reason if view.job.pending else "starting"
        if member:
            slots = ", ".join(f"{stage} {count}" for stage, count in member.slots.items())
            what = "; ".join(filter(None, (slots, ", ".join(member.backends), _short(member.sandbox))))
        place = member.node if member else view.job.nodes
        table.add_row(*map(escape, (view.job.id, view.role, place, state, view.job.left, what)))
    if status.jobs:
        show_view(table)
    if status.lost:
        click.echo(f"did not end in order: {', '.join(status.lost)}")
    for drained in status.drained[-MOST_DRAINED:]:
        click.echo(drained)
    if status.service:
        depths = status.service["queues"].items()
        queues = ", ".join(f"{node_shown(name)} {depth}" for name, depth in depths)
        live = ", ".join(f"{name} {count}" for name, count in status.service["states"].items() if count)
        click.echo(f"rollouts: {live or 'none'}\nqueues: {queues or 'empty'}")
        for backend in status.service["backends"]:
            health = "healthy" if backend["healthy"] else f"not healthy: {backend['error']}"
            click.echo(f"backend {backend['id']} {backend['url']}: {backend['model']}, {health}")


def _short(sandbox: str) -> str:
    """Without what is not isolated, which the log of the node tells."""
    return sandbox if sandbox.startswith("NO ") else sandbox.partition(";")[0]


@slurm.command()
@click.option("--nodes", type=click.IntRange(0, MOST_NODES), help="Nodes that carry all stages.")
@click.option("--engines", type=click.IntRange(0, MOST_NODES), help="Nodes that carry LLM servers.")
@click.option(
    "--stage", "stages", multiple=True, metavar="STAGE=[+-]N", help="Jobs of a stage, if no sandbox is used."
)
@click.option("--grace", type=click.FloatRange(0), default=DRAIN_GRACE_S, show_default=True, help=grace_help)
@run_option
def scale(
    nodes: int | None, engines: int | None, stages: tuple[str, ...], grace: float, run_dir: Path | None
) -> None:
    """Have so many nodes: submit more, or drain some."""
    all_stages = (("nodes", nodes, NODE), ("engines", engines, ENGINE))
    changes = [(name, count, "", list(STAGES), role) for name, count, role in all_stages if count is not None]
    for text in stages:
        if (match := STAGE_COUNT.fullmatch(text)) is None:
            raise click.UsageError(f"--stage {text}: write run=4, run=+2 or eval=-1")
        changes.append((f"{match[1]} jobs", int(match[3]), match[2], [match[1]], NODE))
    if not changes:
        raise click.UsageError("give --nodes, --engines or --stage")
    with _guarded():
        stack = _stack(run_dir)
        for name, number, sign, chosen, role in changes:
            before = len(stack.active(role, chosen))
            target = {"+": before + number, "-": max(0, before - number)}.get(sign, number)
            change = stack.scale(target, chosen, role, grace)
            click.echo(f"{name}: {before} → {target}" if change else f"{name}: {before} already")


@slurm.command()
@click.argument("names", nargs=-1, required=True, metavar="NODE|JOB...")
@click.option("--grace", type=click.FloatRange(0), default=DRAIN_GRACE_S, show_default=True, help=grace_help)
@click.option("--wait", is_flag=True, help="Until the jobs have ended.")
@run_option
def drain(names: tuple[str, ...], grace: float, wait: bool, run_dir: Path | None) -> None:
    """End jobs once their rollouts have ended; nothing new begins there."""
    with _guarded():
        asked = _stack(run_dir).drain(names, grace, wait)
    click.echo(f"{'ended' if wait else 'asked to end'}: {', '.join(asked)}")
    if not wait:
        click.echo("`rollout slurm status` tells then what finished there and what was handed back")


@slurm.command()
@click.option("--delete-data", is_flag=True, help="Also the run directory: records of rollouts, keys, logs.")
@click.option("--grace", type=click.FloatRange(0), default=DOWN_GRACE_S, show_default=True, help=grace_help)
@run_option
def down(delete_data: bool, grace: float, run_dir: Path | None) -> None:
    """End every job. Redis' data stays: the next `up` goes on with it."""
    with _guarded():
        stack = _stack(run_dir)
        ended = stack.down(delete_data=delete_data, grace_s=grace)
        click.echo(f"ended {len(ended)} jobs" if ended else f"nothing runs from {stack.run.path}")
        if not delete_data and stack.run.redis.exists():
            click.echo(f"kept: {stack.run.path}")
