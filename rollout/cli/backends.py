"""`rollout backends`: list, add, drain and remove LLM servers."""

from __future__ import annotations

from typing import Any

import click

from rollout.cli import render
from rollout.cli.common import (
    ReadingGroup,
    completed,
    connect,
    err,
    json_option,
    out,
    show_view,
    url_option,
    valid,
)

backend_id = click.argument(
    "backend_id",
    metavar="ID",
    shell_complete=completed(lambda client: [backend.id for backend in client.backends()]),
)


@click.group(cls=ReadingGroup)
def backends() -> None:
    """List, add, drain and remove LLM servers. Without a command: list them."""


@backends.command("list")
@json_option
@url_option
def list_backends(as_json: bool, url: str | None) -> None:
    """Show each backend with its load, its health and the weights it serves."""
    with connect(url) as client:
        servers = client.backends()
    if servers or as_json:
        show_view(render.backends_table(servers), servers, as_json)
    else:
        err.print("there is no backend: add one with `rollout backends add SERVER`")


@backends.command("add")
@click.argument("server", metavar="SERVER")
@click.option("--id", "backend_id", help="Name for it. [default: made from the address]")
@click.option("--model", help="Name to ask for. [default: the first one the server lists]")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[=MODEL]",
    help="A policy that it serves, with its adapter's name there; may be given several times. [default: as "
    "before, or default]",
)
@click.option("--text-only", is_flag=True, help="It tells no token ids: for judges and users alone.")
@click.option("--tokenizer", help="Path or hub name. [default: as the server says]")
@click.option("--logprobs-mode", type=click.Choice(["raw_logprobs", "processed_logprobs"]))
@click.option("--capacity-tokens", type=click.IntRange(1), help="Size of its cache. [default: as it says]")
@click.option("--key", help="Name of the file in ROLLOUT_ENGINE_KEYS whose token its calls carry.")
@click.option("--max-rollouts", type=click.IntRange(1), help="Most at once. [default: as its cache has room]")
@url_option
def add_backend(
    server: str, backend_id: str | None, policies: tuple[str, ...], url: str | None, **fields: Any
) -> None:
    """Register the LLM server at the address SERVER; a registered one is asked again what it serves."""
    named = (policy.partition("=") for policy in policies)
    fields["policies"] = {name: model or None for name, _, model in named} or None
    with valid(), connect(url) as client:
        show_view(render.backends_table([client.add_backend(server, id=backend_id, **fields)]))


@backends.command()
@backend_id
@url_option
def drain(backend_id: str, url: str | None) -> None:
    """Place no new rollouts on a backend; those on it go on."""
    with connect(url) as client:
        live = client.drain_backend(backend_id).live_rollouts
    out.print(f"{backend_id} takes no new rollouts; {live} go on there", highlight=False)


@backends.command()
@backend_id
@url_option
def undrain(backend_id: str, url: str | None) -> None:
    """Place new rollouts on a drained backend again."""
    with connect(url) as client:
        client.drain_backend(backend_id, drain=False)
    out.print(f"{backend_id} takes new rollouts", highlight=False)


@backends.command("remove")
@backend_id
@click.option("--if-idle", is_flag=True, help="Only when no rollout is on it.")
@url_option
def remove_backend(backend_id: str, if_idle: bool, url: str | None) -> None:
    """Forget a backend; its rollouts move to another at their next call."""
    with connect(url) as client:
        client.remove_backend(backend_id, force=not if_idle)
    out.print(f"{backend_id} is removed", highlight=False)
