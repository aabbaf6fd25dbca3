"""`rollout environments`: install the packages of environments and list them; of group `rollout.commands`."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from sandbox import paths
from workers.errors import StageError
from workers.handlers.environments.process import INSIDE, LEAST_RESET_S, Foreign, Runner

STAMP = ".rollout-packages.json"
"""What an environment was made of, written when it is complete."""
TAIL = 2000


def pinned() -> dict[str, list[str]]:
    """Kind → its packages, each with its version, all that it needs among them."""
    return json.loads(Path(__file__).with_name("packages.json").read_text(encoding="utf-8"))


def place(name: str) -> Path:
    """Where the virtual environment of a kind is."""
    return paths.rollout_home() / "environments" / name


def installed(name: str) -> bool:
    """Whether it is there, complete and of the pinned versions."""
    try:
        return json.loads((place(name) / STAMP).read_text(encoding="utf-8")) == pinned()[name]
    except (OSError, ValueError):
        return False


def install(name: str, python: str = sys.executable) -> None:
    """Make the virtual environment of a kind anew.

    Raises:
        RuntimeError: What failed, with the end of its output.
    """
    target = place(name)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    _run([python, "-m", "venv", "--without-pip", str(target)])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    pip += ["--python", str(target / "bin" / "python"), "install", "--progress-bar", "off", "--no-deps"]
    # Of what they install a part is imported: that alone is compiled, by its first import.
    _run([*pip, "--no-compile", *pinned()[name]])
    adapter = Path(__file__).parent / "inside" / f"{name}.py"
    if adapter.exists():
        trial = "import runpy, sys; runpy.run_path(sys.argv[1])"
        _run([str(target / "bin" / "python"), "-I", "-W", "ignore", "-c", trial, str(adapter)])
    (target / STAMP).write_text(json.dumps(pinned()[name]), encoding="utf-8")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        end = done.stdout.decode(errors="replace")[-TAIL:]
        raise RuntimeError(f"{' '.join(command[:4])} … failed:\n{end}")


@click.group()
def environments() -> None:
    """Install the packages of environments that rollouts play in, and list them."""


@environments.command("install")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--python", default=sys.executable, metavar="PROGRAM", help="Python to make it with.")
def install_(names: tuple[str, ...], python: str) -> None:
    """Install the environments NAME, each into a virtual environment of its own, with pinned versions.

    What is there already stays as it is. The worker's own packages are not touched.
    """
    failed = []
    for name in names:
        if name not in pinned():
            raise click.BadParameter(f"there is no {name}; there are: {', '.join(pinned())}")
        if installed(name):
            click.echo(f"{name}: there already")
            continue
        begun = time.monotonic()
        try:
            install(name, python)
        except (RuntimeError, OSError) as error:
            click.echo(f"{name}: FAILED: {error}", err=True)
            failed.append(name)
            continue
        click.echo(f"{name}: installed in {time.monotonic() - begun:.0f} s")
    if failed:
        raise click.ClickException(f"could not be installed: {', '.join(failed)}; see above")


@environments.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on one line, for scripts.")
def list_(as_json: bool) -> None:
    """List the environments that can be installed here, and which are."""
    rows = [
        {"name": name, "package": packages[0], "packages": len(packages), "installed": installed(name)}
        for name, packages in pinned().items()
    ]
    if as_json:
        click.echo(json.dumps({"directory": str(place("")), "environments": rows}))
        return
    wide, wider = (max(len(row[column]) for row in rows) for column in ("name", "package"))
    for row in rows:
        state = "installed" if row["installed"] else "-"
        click.echo(f"{row['name']:<{wide}}  {row['package']:<{wider}}  {state}")
    click.echo(f"in {place('')}")


def rows_of(kind: str, env: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    """Tasks of a set, as its package lists them.

    Raises:
        StageError: The package is not installed, or has no such set.
    """

    async def listed() -> list[dict[str, Any]]:
        runner = Runner(Foreign(kind, INSIDE / f"{kind.replace('-', '_')}.py"))
        try:
            await runner.ready()
            return await runner.call("rows", LEAST_RESET_S, env=env, args=args)
        finally:
            runner.end()

    return asyncio.run(listed())


@environments.command("rows")
@click.argument("kind", type=click.Choice(["verifiers", "verifiers-old", "tau2", "bfcl"]))
@click.argument("env", metavar="ENV")
@click.option("--args", default="{}", metavar="JSON", help="What the set is made with, as a JSON object.")
def rows(kind: str, env: str, args: str) -> None:
    """List the tasks of the set ENV of an installed package, a JSON line each, for `rollout submit`."""
    try:
        given = json.loads(args)
        if not isinstance(given, dict):
            raise ValueError("no object")
        found = rows_of(kind, env, given)
    except ValueError as error:
        raise click.BadParameter(f"not the JSON of an object: {error}", param_hint="--args") from error
    except StageError as error:
        raise click.ClickException(str(error)) from error
    for row in found:
        click.echo(json.dumps(row))
