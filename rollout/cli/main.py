"""The `rollout` command. Those of the client are in this package; operator commands come from entry points.

An entry point of the group `rollout.commands` (name = the command, value = a click command) adds
one. It is imported only when it is used, so that a trainer's light install can list them all.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from rollout import __version__
from rollout.cli.archive import archive
from rollout.cli.backends import backends
from rollout.cli.batches import batches
from rollout.cli.completion import completion
from rollout.cli.datasets import tasks
from rollout.cli.export import export
from rollout.cli.plan import plan_command
from rollout.cli.points import PointGroup
from rollout.cli.policy import policy
from rollout.cli.rollouts import agent, cancel, fork, list_, show, status, watch
from rollout.cli.tasks import fetch, submit
from rollout.cli.top import top
from rollout.errors import RolloutError

COMMAND_GROUP = "rollout.commands"
OPERATOR_HELP = {
    "up": "Start the whole service on this machine.",
    "upgrade": "Replace what `up` started by the code that is installed now.",
    "down": "End what `up` started.",
    "demo": "Run real rollouts on a stack of its own and show them.",
    "keys": "Make, rotate and revoke API keys.",
    "tenants": "Show tenants, and set what each may use.",
    "handlers": "List handlers, or begin one of your own.",
    "harness": "Build, list and check the agent programs that rollouts can be driven by.",
    "run": "Run a file of tasks with a handler, here or by the service.",
    "images": "Build, list, inspect and prune images of sandboxes.",
    "slurm": "Run the service on a Slurm cluster.",
    "autoscale": "Have the capacity of each stage follow its queue.",
    "sandbox-host": "Look after the daemon that owns the sandboxes of this node.",
}
"""Shown without importing the command; others get a line that names their package."""


class _Commands(PointGroup):
    """All of `rollout`; what the service or the client refuses is one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RolloutError as error:
            raise click.ClickException(str(error)) from error


@click.group(
    cls=_Commands,
    points=COMMAND_GROUP,
    helps=OPERATOR_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="rollout")
def main() -> None:
    """Submit rollouts of LLM agents and follow them.

    \b
    Example:  rollout submit tasks.jsonl --handler calculator --n 8 -o rollouts.jsonl
              rollout status
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


for _command in (
    *(agent, archive, backends, batches, cancel, completion, export, fetch, fork, list_),
    *(plan_command, policy, show, status, submit, tasks, top, watch),
):
    main.add_command(_command)
