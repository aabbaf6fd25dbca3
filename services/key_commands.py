"""`rollout keys` and `rollout tenants`: entry points of the group `rollout.commands`.

They speak to Redis and not to the gateway, so that the first key can be made before any call is allowed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import redis
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from rollout.client import KEY_VARIABLE
from rollout.webhooks import tenant_secret
from services.launch import paths
from services.launch.redis import own_url
from services.settings import SettingsError, settings
from services.state.api_keys import ApiKey, KeyProblem, KeyStore, Scope
from services.state.redis import connect
from services.state.tenants import DEFAULT_TENANT, Tenant, TenantStore, check_name

REDIS_VARIABLE = "ROLLOUT_REDIS_URL"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
UNLIMITED = "any"
"""What takes a limit away again."""

F = TypeVar("F", bound=Callable[..., Any])
out = Console()
json_option = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")


def redis_option(command: F) -> F:
    return click.option(
        "--redis",
        "redis_url",
        help=f"[default: ${REDIS_VARIABLE}, else that of the `rollout up` of this checkout, else port 6379]",
    )(command)


class Duration(click.ParamType):
    """`90s`, `15m`, `1h`, `30d`; in seconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d{1,9})([smhd])", value)
        if found is None:
            self.fail(f"{value!r} is no duration; write 90s, 15m, 1h or 30d", param, ctx)
        return float(int(found[1]) * UNITS[found[2]])


class Names(click.ParamType):
    """`a,b,c` as a tuple; `any` = no limit."""

    name = "names"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str) or value == UNLIMITED:
            return value
        return tuple(name.strip() for name in value.split(",") if name.strip())


class Count(click.ParamType):
    """A number, or `any` = no limit."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == UNLIMITED or isinstance(value, int):
            return value
        if not re.fullmatch(r"[0-9]{1,15}", value):
            self.fail(f"{value!r} is neither a number nor {UNLIMITED!r}", param, ctx)
        return int(value)


class Scopes(click.ParamType):
    """`submit,read` as scopes."""

    name = "scopes"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [Scope(name.strip()) for name in value.split(",")]
        except ValueError:
            self.fail(f"{value!r}: scopes are {', '.join(Scope)}, separated by commas", param, ctx)


def limit_options(command: F) -> F:
    """What a tenant may use; an option that is not given leaves things as they are."""
    for option in (
        click.option(
            "--weight",
            type=click.FloatRange(0.01, 1000),
            help="Share of INIT while others wait as well. [default: 1]",
        ),
        click.option("--mounts", type=Names(), help="Paths of nodes, or patterns, that sandboxes may show."),
        click.option("--runtimes", type=Names(), help="Sandbox runtimes. [default: all that isolate]"),
        click.option("--images", type=Names(), help="Sandbox images, or patterns such as swe-*."),
        click.option("--handlers", type=Names(), help="Handlers, or patterns."),
        click.option("--quota-bytes", type=Count(), help="Bytes of requests that may be kept at once."),
        click.option("--per-minute", type=Count(), help="Rollouts that may be submitted a minute."),
        click.option("--quota-live", type=Count(), help="Rollouts that may be under way at once."),
    ):
        command = option(command)
    return command


@contextmanager
def _connected(url: str | None) -> Iterator[redis.Redis]:
    """A connection to the deployment's Redis; what goes wrong becomes one message and exit code 1."""
    try:
        chosen = url or os.environ.get(REDIS_VARIABLE) or own_url(paths.state_dir()) or settings().redis_url
        client = connect(chosen, max_connections=2)
        try:
            yield client
        finally:
            client.close()
    except redis.RedisError as error:
        raise click.ClickException(
            f"Redis does not answer: {error}. Give its address as --redis or {REDIS_VARIABLE}"
        ) from error
    except (KeyProblem, SettingsError) as error:
        raise click.ClickException(str(error)) from error


def _limited(client: redis.Redis, name: str, limits: dict[str, Any]) -> Tenant | None:
    """Write the limits that were given; None if none was."""
    given = {field: value for field, value in limits.items() if value is not None}
    if not given:
        return None
    given = {field: None if value == UNLIMITED else value for field, value in given.items()}
    store = TenantStore(client)
    try:
        tenant = Tenant(**{**store.get(name).model_dump(), **given})
    except ValidationError as error:
        raise click.ClickException(str(error.errors()[0]["msg"])) from error
    store.set(tenant)
    return tenant


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _shown(key: ApiKey) -> dict[str, Any]:
    """A key without its digest."""
    fields = key.model_dump(mode="json", exclude={"digest", "scopes"})
    return {**fields, "scopes": sorted(key.scopes), "state": key.state(time.time())}


def _tell(key: ApiKey, text: str) -> None:
    """The key alone on stdout, so that a script can keep it; about it on stderr."""
    ends = f"until {_when(key.expires_at)}" if key.expires_at else "without end"
    about = f"key {key.id} of tenant {key.tenant}: {', '.join(sorted(key.scopes))}, {ends}"
    click.echo(f"{about}\nKeep it now, it is shown this once. Clients take it from {KEY_VARIABLE}.", err=True)
    click.echo(text)


@click.group()
def keys() -> None:
    """Make, list, rotate and revoke the API keys of tenants."""


@keys.command()
@click.argument("tenant")
@click.option(
    "--scope",
    "scopes",
    type=Scopes(),
    multiple=True,
    help="submit, read, metrics, admin (everything); several by commas. [default: submit,read]",
)
@click.option("--expires", type=Duration(), help="30d, 12h … from now. [default: never]")
@click.option("--from-env", is_flag=True, help=f"Accept the key in {KEY_VARIABLE}, made elsewhere.")
@limit_options
@redis_option
def create(
    tenant: str,
    scopes: tuple[list[Scope], ...],
    expires: float | None,
    from_env: bool,
    redis_url: str | None,
    **limits: Any,
) -> None:
    """Make a key for TENANT and print it, this once. Options that limit the tenant hold for all its keys."""
    text = os.environ.get(KEY_VARIABLE, "").strip() if from_env else None
    wanted = {scope for group in scopes for scope in group} or {Scope.SUBMIT, Scope.READ}
    with _connected(redis_url) as client:
        store = KeyStore(client)
        try:
            check_name(tenant)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        _limited(client, tenant, limits)
        key, text = store.create(tenant, wanted, lifetime_s=expires, text=text)
    if from_env:
        click.echo(f"key {key.id} of tenant {tenant} is accepted", err=True)
    else:
        _tell(key, text)


@keys.command("list")
@json_option
@redis_option
def list_(as_json: bool, redis_url: str | None) -> None:
    """Show all keys, never their secrets."""
    with _connected(redis_url) as client:
        found = [_shown(key) for key in KeyStore(client).list()]
    if as_json:
        click.echo(json.dumps(found))
        return
    table = Table("id", "tenant", "scopes", "state", "created", "expires", "replaced by", box=None)
    for key in found:
        times = (_when(key["created_at"]), _when(key["expires_at"]))
        scopes = " ".join(key["scopes"])
        table.add_row(key["id"], key["tenant"], scopes, key["state"], *times, key["replaced_by"] or "–")
    out.print(table if found else "no key: the gateway refuses every call")


@keys.command()
@click.argument("key_id", metavar="ID")
@click.option("--grace", type=Duration(), default="1h", show_default=True, help="How long the old one works.")
@redis_option
def rotate(key_id: str, grace: float, redis_url: str | None) -> None:
    """Make a key with the rights of key ID, which ends after the grace."""
    with _connected(redis_url) as client:
        key, text = KeyStore(client).rotate(key_id, grace)
    _tell(key, text)


@keys.command()
@click.argument("key_id", metavar="ID")
@redis_option
def revoke(key_id: str, redis_url: str | None) -> None:
    """End key ID: gateways refuse it within seconds. Its tenant's rollouts go on."""
    with _connected(redis_url) as client:
        key = KeyStore(client).revoke(key_id)
    click.echo(f"key {key.id} of tenant {key.tenant} is revoked")


@click.group()
def tenants() -> None:
    """Show tenants, and set what each may use."""


def _tenants_table(found: list[tuple[Tenant, int]]) -> Table:
    names = (
        "tenant",
        "live",
        "quota",
        "a minute",
        "bytes",
        "weight",
        "handlers",
        "images",
        "runtimes",
        "mounts",
    )
    table = Table(*names, box=None)
    for tenant, live in found:
        quotas = (tenant.quota_live, tenant.per_minute, tenant.quota_bytes)
        counts = [UNLIMITED if most is None else str(most) for most in quotas]
        lists = [
            none if names is None else ", ".join(names)
            for names, none in (
                (tenant.handlers, UNLIMITED),
                (tenant.images, UNLIMITED),
                (tenant.runtimes, "isolating"),
                (tenant.mounts, UNLIMITED),
            )
        ]
        table.add_row(tenant.name, str(live), *counts, f"{tenant.weight:g}", *lists)
    return table


@tenants.command()
@click.argument("tenant", required=False)
@json_option
@redis_option
def show(tenant: str | None, as_json: bool, redis_url: str | None) -> None:
    """Show TENANT, or all of them: limits, and rollouts under way."""
    with _connected(redis_url) as client:
        store = TenantStore(client)
        chosen = [store.get(tenant)] if tenant else store.list()
        found = [(one, store.live(one.name)) for one in chosen]
    if as_json:
        click.echo(json.dumps([{**one.model_dump(mode="json"), "live": live} for one, live in found]))
    else:
        out.print(_tenants_table(found) if found else "no tenant has limits or rollouts")


@tenants.command("webhook-secret")
@click.argument("tenant")
def webhook_secret(tenant: str) -> None:
    """Print the secret of TENANT's webhooks, made from the first in ROLLOUT_WEBHOOK_SECRET."""
    try:
        check_name(tenant)
        base = settings().webhook_secret.get_secret_value().split(",")[0].strip()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if not base:
        raise click.ClickException("ROLLOUT_WEBHOOK_SECRET is not set here: give it as the workers have it")
    click.echo(base if tenant == DEFAULT_TENANT else tenant_secret(base, tenant))


@tenants.command("set")
@click.argument("tenant")
@limit_options
@redis_option
def set_(tenant: str, redis_url: str | None, **limits: Any) -> None:
    """Set limits of TENANT; `any` takes one away. What is not given stays."""
    with _connected(redis_url) as client:
        changed = _limited(client, tenant, limits)
        if changed is None:
            options = "--quota-live, --per-minute, --quota-bytes, --handlers, --images, --runtimes, --mounts"
            raise click.UsageError(f"give {options} or --weight")
        found = [(changed, TenantStore(client).live(tenant))]
    out.print(_tenants_table(found))
