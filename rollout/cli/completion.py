"""`rollout completion`, and the example in the help of each command."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

LOAD = {
    "bash": "echo 'eval \"$(rollout completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(rollout completion zsh)\"' >> ~/.zshrc",
    "fish": "rollout completion fish > ~/.config/fish/completions/rollout.fish",
}
EXAMPLES = {
    "archive list": "/data/archive",
    "archive read": "/data/archive --handler calculator --samples -o samples.jsonl",
    "autoscale": "--nodes 2:16 --dry-run",
    "backends": "list --json",
    "backends add": "http://gpu2:8000 --id gpu2",
    "backends drain": "gpu2",
    "backends list": "",
    "backends remove": "gpu2 --if-idle",
    "backends undrain": "gpu2",
    "batches": "list --limit 5",
    "batches cancel": "step-7",
    "batches list": "--limit 5",
    "batches pause": "step-7",
    "batches resume": "step-7",
    "batches show": "step-7",
    "cancel": "--tag step-7",
    "completion": "bash",
    "demo": "--n 16",
    "down": "",
    "fetch": "--tag step-7 -o rollouts.jsonl",
    "handlers": "list",
    "handlers list": "--json",
    "handlers new": "tidy_up",
    "images build": "my-task my-task.def",
    "images inspect": "base",
    "images list": "--json",
    "images prune": "--dry-run",
    "keys create": "ann --scope submit,read --expires 30d",
    "keys list": "--json",
    "keys revoke": "0123456789ab",
    "keys rotate": "0123456789ab --grace 1h",
    "list": "--state failed --limit 20",
    "plan": "--model Qwen/Qwen3-8B --gpus 8",
    "policy": "show",
    "policy show": "--json",
    "policy update": "step-7 /checkpoints/step-7 --mode wait",
    "run": "calculator --task tasks.jsonl --n 4 -o rollouts.jsonl",
    "sandbox-host run": "",
    "sandbox-host status": "--json",
    "sandbox-host stop": "",
    "show": "ID --timeline",
    "slurm down": "--grace 60",
    "slurm drain": "n2 --wait",
    "slurm scale": "--nodes 16",
    "slurm status": "--json",
    "slurm up": "--nodes 8 --partition cpu --time 24:00:00",
    "status": "--json",
    "submit": "tasks.jsonl --handler calculator --n 8 -o rollouts.jsonl",
    "tasks": "gsm8k.parquet --handler math --first 100",
    "tenants set": "ann --quota-live 500 --weight 0.5",
    "tenants show": "ann",
    "tenants webhook-secret": "ann",
    "top": "--interval 5",
    "up": "--backend http://127.0.0.1:8000",
    "watch": "--tag step-7",
}
"""What follows each command in its example; a command that is not here has one in its `epilog`."""


def with_example(command: click.Command, path: str) -> click.Command:
    """The command of that path and those below it, each with an example at the end of its help."""
    if command.epilog is None and path in EXAMPLES:
        command.epilog = f"\b\nExample:  {' '.join(['rollout', path, EXAMPLES[path]]).rstrip()}"
    for name, below in getattr(command, "commands", {}).items():
        with_example(below, f"{path} {name}")
    return command


@click.command()
@click.argument("shell", type=click.Choice([*LOAD]), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print what has SHELL complete commands, options, ids and handlers. Without SHELL: how to load it."""
    if shell is None:
        usual = Path(os.environ.get("SHELL", "")).name
        click.echo("\n".join(line for name, line in LOAD.items() if usual in (name, "") or usual not in LOAD))
        return
    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(ctx.find_root().command, {}, "rollout", "_ROLLOUT_COMPLETE").source())
