"""Groups of commands that entry points add to, as the whole of `rollout` is one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click
from click.shell_completion import CompletionItem

from rollout.cli.completion import with_example

EXTRAS_HINT = "pip install 'rollout-service[gateway,worker]'"


class PointGroup(click.Group):
    """Own commands first, then those of entry points, each imported on its first use.

    A trainer's light install lists them all, though it cannot import each.
    """

    def __init__(self, *args: Any, points: str, helps: Mapping[str, str], path: str = "", **options: Any):
        """Args:
        points: Group of the entry points: name = the command, value = a click command.
        helps: What the help says of each without importing it; of others it names the package.
        path: The group's own name behind `rollout`.
        """
        super().__init__(*args, **options)
        self._points, self._helps, self._path = points, helps, path

    def _added(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._points)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *sorted(set(self._added()) - set(self.commands))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        path = f"{self._path} {cmd_name}".strip()
        command = super().get_command(ctx, cmd_name)
        point = self._added().get(cmd_name)
        if command is not None or point is None:
            return command and with_example(command, path)
        try:
            return with_example(point.load(), path)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`rollout {path}` needs the Python package {error.name!r}: {EXTRAS_HINT}"
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, cmd.get_short_help_str(80)) for name, cmd in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        points = sorted(self._added().values(), key=lambda point: point.name)
        if points:
            with formatter.section("Operator commands"):
                formatter.write_dl([(p.name, self._helps.get(p.name, f"From {p.module}.")) for p in points])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # By name: what an operator's command needs is not imported for it, and need not be installed.
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)
