"""The `rollout` command. Those of the client are in this package; operator commands come from entry points.

An entry point of the group `rollout.commands` (name = the command, value = a click command) adds
one. It is imported only when it is used, so that a trainer's light install can list them all.
"""

from __future__ import annotations

import io
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click
from click.shell_completion import CompletionItem

from rollout import __version__
from rollout.cli.archive import archive
from rollout.cli.backends import backends
from rollout.cli.batches import batches
from rollout.cli.completion import completion, with_example
from rollout.cli.export import export
from rollout.cli.plan import plan_command
from rollout.cli.policy import policy
from rollout.cli.rollouts import agent, cancel, list_, show, status, watch
from rollout.cli.tasks import fetch, submit, tasks
from rollout.cli.top import top
from rollout.errors import RolloutError

COMMAND_GROUP = "rollout.commands"
EXTRAS_HINT = "pip install 'rollout-service[gateway,worker]'"
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
            return command and with_example(command, cmd_name)
        try:
            return with_example(point.load(), cmd_name)
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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # By name: what an operator's command needs is not imported for it, and need not be installed.
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RolloutError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
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
    *(agent, archive, backends, batches, cancel, completion, export, fetch, list_, plan_command),
    *(policy, show, status, submit, tasks, top, watch),
):
    main.add_command(_command)
