"""`rollout plan`: engines, slots, disk and settings of a training run, before anything is started."""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from math import isfinite
from pathlib import Path
from typing import Any

import click

from rollout.cli.common import json_option
from rollout.planning import GB, PUBLISHED, UNPACKED_GB, model_of, plan
from rollout.suites import HARBOR, is_suite


@click.command("plan")
@click.option("--model", required=True, help=f"A checkpoint's directory, or one of {', '.join(PUBLISHED)}.")
@click.option("--params", type=click.FloatRange(0, min_open=True), help="Its parameters, in billions.")
@click.option("--gpus", type=click.IntRange(1), required=True, help="Of the node.")
@click.option("--gpu-gb", type=click.FloatRange(1), default=80.0, show_default=True, help="Memory of each.")
@click.option(
    "--share",
    type=click.FloatRange(0.05, 1),
    default=0.6,
    show_default=True,
    help="Of it that engines may take; 0.9 where no trainer is beside them.",
)
@click.option(
    "--dataset",
    type=click.Path(exists=True, path_type=Path),
    help="Rows for the handler `swe`, or task directories.",
)
@click.option(
    "--unpacked-gb", type=click.FloatRange(0), default=UNPACKED_GB, show_default=True, help="An image."
)
@click.option("--tasks", type=click.IntRange(1), default=32, show_default=True, help="Of a training step.")
@click.option("--n", type=click.IntRange(1), default=8, show_default=True, help="Rollouts of each.")
@click.option("--context", type=click.IntRange(1024), help="Tokens. [default: 32768, or what the model has]")
@click.option("--cores", type=click.IntRange(1), help="Of the node. [default: this machine's]")
@click.option("--memory-gb", type=click.FloatRange(1), help="Of the node. [default: this machine's]")
@json_option
def plan_command(
    model: str,
    params: float | None,
    dataset: Path | None,
    cores: int | None,
    memory_gb: float | None,
    as_json: bool,
    **part: Any,
) -> None:
    """Plan a node that trains and samples: engines, slots, disk, limits.

    rollout plan --model Qwen/Qwen3-8B --gpus 8 --dataset rows.jsonl
    """
    memory_gb = memory_gb or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB
    part |= {"cores": cores or os.cpu_count(), "memory_gb": memory_gb}
    for name, value in (part | {"params": params or 0}).items():
        if isinstance(value, float) and not isfinite(value):
            raise click.BadParameter(f"{value} is no finite number", param_hint=f"--{name.replace('_', '-')}")
    result = plan(model_of(model, params), images=_images(dataset) if dataset else 0, **part)
    click.echo(json.dumps(result) if as_json else _text(result))


def _images(dataset: Path) -> int:
    """How many different images the rows need."""
    reader = HARBOR if is_suite(dataset) else "swe"
    for point in entry_points(group="rollout.image_readers", name=reader):
        try:
            return len(list(point.load()(dataset)))
        except ModuleNotFoundError as error:
            raise click.ClickException(f"--dataset needs {error.name!r}: make setup-tasks") from None
        except Exception as error:  # the reader's own kinds, which the client does not know
            raise click.ClickException(str(error)) from None
    raise click.ClickException(
        f"--dataset needs the handler `{reader}`: pip install 'rollout-service[worker,swe]'"
    )


def _text(result: dict[str, Any]) -> str:
    commands = [f"# {name}\n{command}" for name, command in result.pop("commands").items()]
    lines = [f"{name:<10}" + ", ".join(f"{k} {v}" for k, v in part.items()) for name, part in result.items()]
    return "\n".join([*lines, "", *commands])
