"""`rollout policy`: show the weights in use, and bring new ones."""

from __future__ import annotations

from typing import IO, Any

import click

from rollout.cli import render
from rollout.cli.common import (
    WORK_PATIENCE_S,
    ReadingGroup,
    completed,
    connect,
    json_option,
    out,
    show_view,
    url_option,
    valid,
)
from rollout.errors import ApiError
from rollout.schema import DEFAULT_POLICY, Canary, LoraAdapter, UpdateState


@click.group(cls=ReadingGroup)
def policy() -> None:
    """Show the weights in use, or bring new ones. Without a command: show them."""


_names = completed(lambda client: [status.name for status in client.policies()])
policy_option = click.option(
    "--policy", default=DEFAULT_POLICY, show_default=True, shell_complete=_names, help="Whose weights."
)


@policy.command("show")
@click.argument("name", required=False, shell_complete=_names)
@click.option("--all", "every", is_flag=True, help="Every policy, a line each.")
@json_option
@url_option
def show_policy(name: str | None, every: bool, as_json: bool, url: str | None) -> None:
    """Show the current weights of the policy NAME and the latest updates.

    Without NAME those of the only policy; where there are several, a line each.
    """
    with connect(url) as client:
        try:
            known = client.policies() if every or (name is None and not as_json) else []
        except ApiError as error:
            # A trainer's key shows its policy alone, and gateways of earlier releases know no other.
            if every or error.status not in (403, 404):
                raise
            known = []
        if every or len(known) > 1:
            show_view(render.policies_table(known), known, as_json)
            return
        status = client.policy(name or DEFAULT_POLICY)
    show_view(render.policy_view(status), status, as_json)


@policy.command("update")
@click.argument("version")
@click.argument("path", required=False)
@click.option("--mode", type=click.Choice(["keep", "wait", "abort"]), default="keep", show_default=True)
@click.option(
    "--canary", type=click.File("r", encoding="utf-8"), help="JSON: token_ids, logprobs, tolerance."
)
@policy_option
@click.option("--lora", help="PATH is an adapter, to be exchanged under this name.")
@click.option("--backend", "chosen", multiple=True, help="Only this one; may be given several times.")
@click.option("--concurrency", type=click.IntRange(0), default=0, help="Backends at once. [default: all]")
@click.option("--reset-prefix-cache", is_flag=True, help="Use nothing again that old weights computed.")
@click.option("--wait", default=600.0, show_default=True, help="Seconds to wait for the end.")
@url_option
def update_policy(
    version: str,
    path: str | None,
    canary: IO[str] | None,
    lora: str | None,
    chosen: tuple[str, ...],
    url: str | None,
    **fields: Any,
) -> None:
    """Bring the weights in directory PATH to the backends of a policy and label them VERSION.

    Without PATH the backends have the weights already and are only labelled. Ends with 1 unless every backend
    serves the new weights.
    """
    with valid(), connect(url, WORK_PATIENCE_S) as client:
        fields["canary"] = Canary.model_validate_json(canary.read()) if canary else None
        fields["lora"] = LoraAdapter(name=lora) if lora else None
        update = client.update_policy(version, path, backends=list(chosen) or None, **fields)
    show_view(render.update_view(update))
    if update.state is not UpdateState.DONE:
        raise click.exceptions.Exit(1)


@policy.command("forget")
@policy_option
@url_option
def forget_policy(policy: str, url: str | None) -> None:
    """Place rollouts on backends of any weights, once no backend serves the current ones.

    For a trainer that was killed after it had brought weights that nobody else can bring.
    """
    with connect(url) as client:
        client.forget_policy(policy)
    out.print("no weights are current: backends of any weights take rollouts")
