"""`rollout completion`, and the example in the help of each command."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import click
from click.shell_completion import get_completion_class

LOAD = {
    "bash": "echo 'eval \"$(rollout completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(rollout completion zsh)\"' >> ~/.zshrc",
    "fish": "rollout completion fish > ~/.config/fish/completions/rollout.fish",
}


@cache
def examples() -> dict[str, str]:
    """What follows each command in its example; a command that is not here has one in its `epilog`."""
    return json.loads(Path(__file__).with_name("examples.json").read_text())


def with_example(command: click.Command, path: str) -> click.Command:
    """The command of that path and those below it, each with an example at the end of its help."""
    if command.epilog is None and path in examples():
        command.epilog = f"\b\nExample:  rollout {path} {examples()[path]}".rstrip()
    for name, below in getattr(command, "commands", {}).items():
        with_example(below, f"{path} {name}")
    return command


@click.command()
@click.argument("shell", type=click.Choice([*LOAD]), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print what completes commands, options, ids and handlers in SHELL. Without SHELL: how to load it."""
    if shell is None:
        usual = Path(os.environ.get("SHELL", "")).name
        click.echo("\n".join(line for name, line in LOAD.items() if usual in (name, "") or usual not in LOAD))
        return
    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(ctx.find_root().command, {}, "rollout", "_ROLLOUT_COMPLETE").source())
