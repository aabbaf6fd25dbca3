"""`rollout images`: build, list, inspect and prune; an entry point of the group `rollout.commands`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sandbox.errors import ImageError, SandboxError
from sandbox.images import ImageStore
from sandbox.images import build as building
from sandbox.images import dockerfile as dockerfiles
from sandbox.images.cache import size_text

out = Console(width=None if sys.stdout.isatty() else 10_000)  # in a pipe a row is a line, whole
err = Console(stderr=True)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")


@contextmanager
def _guarded() -> Iterator[None]:
    """Errors become one message and exit code 1; Ctrl-C and TERM clean up and give 130."""
    old = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SandboxError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted; nothing unfinished was left behind", err=True)
        raise click.exceptions.Exit(130) from None
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    """The first signal ends the work; a second one would end the clean-up and leave what it removes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@click.group()
def images() -> None:
    """Build, list, inspect and prune the images of sandboxes."""


@images.command()
@click.argument("name", required=False)
@click.argument("source", required=False)
@click.option(
    "--dataset",
    type=click.Path(exists=True, path_type=Path),
    help="Instead of NAME and SOURCE: make each image that the tasks in this file need and that is missing; "
    "of a directory, those of each environment/Dockerfile.",
)
@click.option("--reader", help="With --dataset: what reads it. [default: harbor for a directory, else swe]")
@click.option(
    "--sources",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --dataset: a directory whose NAME.def, NAME.tar or NAME.sif goes before a registry.",
)
@click.option("--force", is_flag=True, help="Replace images of these names.")
@click.option(
    "--timeout",
    default=building.DEFAULT_TIMEOUT_S,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds.",
)
@click.option(
    "--build-arg",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="For {{ NAME }} in a *.def, or an ARG of a Dockerfile.",
)
@click.option(
    "--network", is_flag=True, help="RUN of a Dockerfile reaches what this machine reaches, FROM a registry."
)
@click.option("-q", "--quiet", is_flag=True, help="Show the build's output only when it fails.")
def build(
    name: str | None,
    source: str | None,
    dataset: Path | None,
    reader: str | None,
    sources: Path | None,
    force: bool,
    timeout: float,
    pairs: tuple[str, ...],
    network: bool,
    quiet: bool,
) -> None:
    """Make the image NAME from SOURCE, or those of a dataset.

    SOURCE is a definition file (*.def), a Dockerfile or the directory with one, the directory of a root file
    system, an archive of `docker save`, a SIF or squashfs file, or docker://…, oras://…, library://….
    """
    arguments = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--build-arg")
        arguments[key] = value

    def show(line: str) -> None:
        if not quiet:
            err.print(f"[dim]{escape(line)}[/]", soft_wrap=True, highlight=False)

    def make(name: str, source: str) -> None:
        begun = time.monotonic()
        how: dict[str, Any] = {"force": force, "timeout": timeout, "arguments": arguments, "output": show}
        dockerfile = dockerfiles.dockerfile_of(Path(source))
        if dockerfile is None:
            if network:
                raise ImageError(f"--network is for Dockerfiles, not for {source!r}")
            path = building.build(name, source, **how)
        else:
            beside = sources or dockerfile.parent
            path = dockerfiles.build(dockerfile, name, network=network, beside=beside, **how)
        took = time.monotonic() - begun
        click.echo(
            f"built {path} ({size_text(path.stat().st_size)}) in {took:.1f} s; use it as image {name!r}"
        )

    if dataset is not None:
        if name is not None:
            raise click.UsageError("give NAME and SOURCE, or --dataset, not both")
        with _guarded():
            _build_all(_image_reader(reader, dataset)(dataset), sources, force, make)
        return
    if name is None or source is None:
        raise click.UsageError("give NAME and SOURCE, or --dataset")
    with _guarded():
        make(name, source)


ImageReader = Callable[[Path], Iterable[tuple[str, str]]]
"""Name and source of each image that the tasks in a file need; ImageError for a file it cannot read."""
READERS = "rollout.image_readers"
"""Entry points of functions like that: what a task is, is not known here."""


def _image_reader(name: str | None, dataset: Path) -> ImageReader:
    points = {point.name: point for point in entry_points(group=READERS)}
    if name is None:
        (name,) = points if len(points) == 1 else ("harbor" if dataset.is_dir() else "swe",)
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise click.UsageError(f"--reader: there is no {name!r}; installed: {known} (entry points {READERS})")
    return points[name].load()


def _build_all(
    needs: Iterable[tuple[str, str]], sources: Path | None, force: bool, make: Callable[[str, str], None]
) -> None:
    """Make each image, going on after one that cannot be made; ImageError at the end if there was one."""
    made, present, failed = 0, 0, 0
    store = ImageStore()
    for name, source in needs:
        if not force:
            with suppress(ImageError):
                store.find(name)
                present += 1
                continue
        own = [sources / f"{name}{ending}" for ending in (".def", ".tar", ".sif")] if sources else []
        try:
            make(name, next((str(path) for path in own if path.exists()), source))
            made += 1
        except SandboxError as error:
            click.echo(f"{name}: {error}", err=True)
            failed += 1
    click.echo(f"{made} built, {present} there already, {failed} failed")
    if failed:
        raise ImageError(f"{failed} of {made + present + failed} images could not be built; see above")


@images.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List named images, and what of them is unpacked on this node."""
    from sandbox.images.inspection import listing

    with _guarded():
        state = listing(ImageStore())
    if as_json:
        click.echo(json.dumps(state))
        return
    columns = (Column("name", overflow="fold"), "kind", "size", Column("content", overflow="fold"))
    table = Table(*columns, "unpacked here", "last used", box=None, pad_edge=False)
    for image in state["images"]:
        trees = image["unpacked"]
        table.add_row(
            image["name"],
            image["kind"],
            size_text(image["bytes"]),
            image["hash"] or "",
            "\n".join(map(_tree_text, trees)) or ("as it is" if image["hash"] is None else "no"),
            "\n".join(_ago(tree["last_used"]) for tree in trees),
        )
    cache = state["cache"]
    for tree in cache["of_no_named_image"]:
        source = tree["source"] or "image not known"
        table.add_row("", "", "", source, _tree_text(tree), _ago(tree["last_used"]))
    out.print(table)
    used, quota = size_text(cache["bytes"]), size_text(cache["quota_bytes"])
    out.print(f"[dim]cache {escape(cache['directory'])}: {used} of {quota}[/]", soft_wrap=True)


@images.command()
@click.argument("image")
@json_option
def inspect(image: str, as_json: bool) -> None:
    """Show what IMAGE (a name or a path) holds."""
    from sandbox.images.inspection import details

    with _guarded():
        info = details(ImageStore(), image)
    if as_json:
        click.echo(json.dumps(info))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for key in ("path", "kind", "hash"):
        table.add_row(key, info[key] or "")
    table.add_row("size", f"{size_text(info['bytes'])}, unpacked {size_text(info['unpacked_bytes'])}")
    table.add_row("has", ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in info["has"].items()))
    table.add_row("labels", "\n".join(escape(f"{key}: {value}") for key, value in info["labels"].items()))
    environment = [line.strip() for text in info["environment"].values() for line in text.splitlines()]
    settings = [line for line in environment if line and not line.startswith("#")]
    table.add_row("environment", escape("\n".join(settings)))
    if info["note"]:
        table.add_row("note", escape(info["note"]))
    out.print(table, soft_wrap=True)


@images.command()
@click.option("--all", "everything", is_flag=True, help="Not only down to the quota: all that nobody uses.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(everything: bool, dry_run: bool) -> None:
    """Remove unpacked images from this node's cache, and what killed builds left; images themselves stay."""
    store = ImageStore()
    with _guarded():
        evicted = store.cache.prune(everything, dry_run)
        leftovers = building.remove_leftovers(dry_run)
        kept = store.cache.entries()
    verb = "would remove" if dry_run else "removed"
    for cached in evicted:
        click.echo(
            f"{verb} {cached.tree} ({size_text(cached.bytes)}, from {cached.source or 'an unknown image'})"
        )
    for path in leftovers:
        click.echo(f"{verb} {path}, left by a killed build")
    for cached in kept:
        if everything and cached.in_use:
            click.echo(f"kept {cached.tree}: {cached.in_use}")
    click.echo(f"{verb} {size_text(sum(cached.bytes for cached in evicted))} in all")


def _tree_text(tree: dict) -> str:
    return size_text(tree["bytes"]) + (f", {tree['in_use']}" if tree["in_use"] else "")


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
