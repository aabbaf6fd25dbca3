"""`rollout archive`: look at an archive of ended rollouts, and take out what is wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import click

from rollout import archive as reader
from rollout.cli.common import json_option, output_option
from rollout.schema import Rollout, State


@click.group()
def archive() -> None:
    """Read the archive of ended rollouts (the directory of ROLLOUT_ARCHIVE_DIR)."""


directory = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))


@archive.command("list")
@directory
@json_option
def list_files(directory: Path, as_json: bool) -> None:
    """Show each file with its size and the rollouts in it."""
    listed = []
    for path in reader.files(directory):
        count = sum(text.count(b"\n") for _, text in reader.members(path))
        size, being_written = path.stat().st_size, path.name.endswith(reader.OPEN_SUFFIX)
        listed.append({"name": path.name, "bytes": size, "rollouts": count, "being_written": being_written})
        if not as_json:
            being = "  being written" if being_written else ""
            click.echo(f"{path.name}  {size} bytes  {count} rollouts{being}")
    if as_json:
        click.echo(json.dumps(listed))


@archive.command()
@directory
@output_option
@click.option("--handler", help="Only this handler.")
@click.option("--tag", help="Only rollouts with this tag.")
@click.option("--state", type=click.Choice([s.value for s in State if s.terminal]), help="Only this state.")
@click.option("--samples", is_flag=True, help="Flat token arrays of what may be trained on.")
def read(
    directory: Path, output: IO[str], handler: str | None, tag: str | None, state: str | None, samples: bool
) -> None:
    """Write rollouts as JSON lines, each once, in the order of completion."""
    for rollout in reader.read(directory):
        if handler not in (None, rollout.handler) or state not in (None, rollout.state):
            continue
        if tag is not None and tag not in rollout.request.tags:
            continue
        if not samples:
            output.write(rollout.model_dump_json() + "\n")
        elif (flat := sample(rollout)) is not None:
            output.write(json.dumps(flat) + "\n")


def sample(rollout: Rollout) -> dict[str, Any] | None:
    """The agent's last chain as parallel arrays; None for what must not be trained on, or has no tokens."""
    trajectory = rollout.trajectory
    if rollout.drop or rollout.reward is None or trajectory is None or not trajectory.own:
        return None
    return {
        "id": rollout.id,
        "group_id": rollout.group_id,
        "reward": rollout.reward,
        "prompt_ids": trajectory.prompt_ids,
        "response_ids": trajectory.response_ids,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "policy_versions": trajectory.policy_versions,
    }
