"""`rollout keys` and `rollout tenants`: entry points of the group `rollout.commands`.

They speak to Redis and not to the gateway, so that the first key can be made before any call is allowed.
Where none is named it is that of the service which other commands would speak to, or none.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import redis
from pydantic import ValidationError

from rollout.account import Owned, Service, service_at
from rollout.cli.common import Column, Sheet, completed, json_option, show_view
from rollout.errors import AddressError, ApiKeyError, RolloutError
from rollout.http import KEY_VARIABLE, default_address, without_password
from rollout.webhooks import tenant_secret
from services.launch import SlurmError
from services.launch.slurm.rundir import RunDir
from services.redis_address import hide_password
from services.settings import SettingsError, settings
from services.state.api_keys import ApiKey, KeyProblem, KeyStore, Scope, check_scope
from services.state.redis import connect
from services.state.tenants import DEFAULT_TENANT, Tenant, TenantStore, check_name

REDIS_VARIABLE = "ROLLOUT_REDIS_URL"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
UNLIMITED = "any"
"""What takes a limit away again."""

F = TypeVar("F", bound=Callable[..., Any])


redis_option = click.option(
    "--redis", "redis_url", help=f"[default: ${REDIS_VARIABLE}, else that of the service of `rollout status`]"
)


def duration(text: str) -> float:
    """Seconds."""
    parts = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if parts is None:
        raise click.BadParameter(f"{text!r} is no duration; write 90s, 15m, 1h or 30d")
    return float(int(parts[1]) * UNITS[parts[2]])


def names(text: str) -> Any:
    return text if text == UNLIMITED else tuple(filter(None, map(str.strip, text.split(","))))


def number(text: str) -> Any:
    if text != UNLIMITED and not re.fullmatch(r"[0-9]{1,15}", text):
        raise click.BadParameter(f"{text!r} is neither a number nor {UNLIMITED!r}")
    return text if text == UNLIMITED else int(text)


def policies(text: str) -> Any:
    if not re.fullmatch(r"[a-z0-9._*?!\[\], -]*", text):
        raise click.BadParameter(f"{text!r}: names of policies have lower-case letters, digits and . _ -")
    return names(text)


def rights(text: str) -> list[str]:
    try:
        return [check_scope(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


LIMITS = {
    "--quota-live": (number, "Rollouts that may be under way at once."),
    "--per-minute": (number, "Rollouts that may be submitted a minute."),
    "--quota-bytes": (number, "Bytes of requests that may be kept at once."),
    "--handlers": (names, "Handlers, or patterns."),
    "--policies": (policies, "Policies that its rollouts may call, or patterns."),
    "--images": (names, "Sandbox images, or patterns such as swe-*."),
    "--runtimes": (names, "Sandbox runtimes. [default: all that isolate]"),
    "--mounts": (names, "Paths of nodes, or patterns, that sandboxes may show."),
    "--weight": (click.FloatRange(0.01, 1000), "Share of INIT while others wait as well. [default: 1]"),
}


def limit_options(command: F) -> F:
    """What a tenant may use; an option that is not given leaves things as they are."""
    for name, (kind, text) in reversed(LIMITS.items()):
        command = click.option(name, type=kind, help=text)(command)
    return command


def _redis() -> tuple[str, str]:
    """The Redis that is meant where none is named, and whose it is.

    Raises:
        click.ClickException: None is known of the service that other commands would speak to.
        ApiKeyError: Another user listens there.
        SlurmError: The run directory cannot be read, or its Redis is not the head's own.
    """
    if url := os.environ.get(REDIS_VARIABLE):
        return url, f"from {REDIS_VARIABLE}"
    try:
        gateway, origin = default_address()
        meant, service = f"{without_password(gateway)}: {origin}", service_at(gateway)
    except ApiKeyError as error:
        raise click.ClickException(
            f"{error}. Or give Redis' address as --redis or {REDIS_VARIABLE}"
        ) from error
    except ValueError as error:
        meant, service = str(error) if isinstance(error, AddressError) else "ROLLOUT_URL is no address", None
    url = service.redis if isinstance(service, Service) else ""
    if isinstance(service, Path) and (head := RunDir(service).head()):
        url = RunDir(service).redis_url(head)
    if url:
        Owned(url).require()  # its port may be anybody's by now
        return url, origin
    raise click.ClickException(
        f"no Redis is named, nor known of the service that is meant ({meant}): give its address as --redis "
        f"or {REDIS_VARIABLE}"
    )


@contextmanager
def _connected(url: str | None, quiet: bool = False) -> Iterator[redis.Redis]:
    """A connection to the deployment's Redis; what goes wrong becomes one message and exit code 1.

    Where the command line does not name it, standard error says which one it is.
    """
    try:
        if not url:
            url, origin = _redis()
            if not quiet:
                click.echo(f"{hide_password(url)}: {origin}", err=True)
        with connect(url, max_connections=2) as client:
            yield client
    except redis.RedisError as error:
        raise click.ClickException(
            f"Redis does not answer: {error}. Give its address as --redis or {REDIS_VARIABLE}"
        ) from error
    except (KeyProblem, SettingsError, SlurmError, RolloutError) as error:
        raise click.ClickException(str(error)) from error


def _tenant_names(client: redis.Redis) -> set[str]:
    """Tenants with limits, rollouts or keys."""
    named = {tenant.name for tenant in TenantStore(client).list()}
    return named | {key.tenant for key in KeyStore(client).list()} | {DEFAULT_TENANT}


_completed = partial(completed, source=partial(_connected, quiet=True), option="redis_url")
key_argument = click.argument(
    "key_id",
    metavar="ID",
    shell_complete=_completed(lambda client: [key.id for key in KeyStore(client).list()]),
)
complete_tenants = _completed(lambda client: sorted(_tenant_names(client)))


def _warn_without_admin(store: KeyStore) -> None:
    now = time.time()
    if not any(key.may(Scope.OPERATE) and key.state(now) in ("active", "replaced") for key in store.list()):
        click.echo(
            "WARNING: no key of the scope admin or operate works, so nobody can register LLM servers: "
            "`rollout keys create operator --scope admin` makes one",
            err=True,
        )


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
        raise click.ClickException(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
    store.set(tenant)
    return tenant


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


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
    type=rights,
    metavar="SCOPES",
    multiple=True,
    help="submit, read, metrics, train:POLICY (its weights), operate (all policies, backends, metrics), "
    "admin (everything); several by commas. [default: submit,read]",
)
@click.option("--expires", type=duration, help="30d, 12h … from now. [default: never]")
@click.option("--from-env", is_flag=True, help=f"Accept the key in {KEY_VARIABLE}, made elsewhere.")
@limit_options
@redis_option
def create(
    tenant: str,
    scopes: tuple[list[str], ...],
    expires: float | None,
    from_env: bool,
    redis_url: str | None,
    **limits: Any,
) -> None:
    """Make a key for TENANT and print it, this once. Options that limit the tenant hold for all its keys."""
    text = os.environ.get(KEY_VARIABLE, "").strip() if from_env else None
    chosen = {scope for group in scopes for scope in group} or {Scope.SUBMIT, Scope.READ}
    with _connected(redis_url) as client:
        store = KeyStore(client)
        _limited(client, tenant, limits)
        key, text = store.create(tenant, chosen, lifetime_s=expires, text=text)
        _warn_without_admin(store)
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
        known = KeyStore(client).list()
    now, shown = time.time(), []
    for key in known:
        told = {"scopes": sorted(key.scopes), "state": key.state(now)}
        shown.append(key.model_dump(mode="json", exclude={"digest"}) | told)
    columns = [
        Column("id", lambda key: key["id"], whole=True),
        Column("tenant", lambda key: key["tenant"], whole=True),
        Column("scopes", lambda key: " ".join(key["scopes"])),
        Column("state", lambda key: key["state"]),
        Column("created", lambda key: _when(key["created_at"]), drop=1),
        Column("expires", lambda key: _when(key["expires_at"]), drop=3),
        Column("replaced by", lambda key: key["replaced_by"] or "–", drop=2),
    ]
    empty = "no key: the gateway refuses every call; `rollout keys create operator --scope admin` makes one"
    show_view(Sheet(columns, shown) if shown else empty, shown, as_json)


@keys.command()
@key_argument
@click.option("--grace", type=duration, default="1h", show_default=True, help="How long the old one works.")
@redis_option
def rotate(key_id: str, grace: float, redis_url: str | None) -> None:
    """Make a key with the rights of key ID, which ends after the grace."""
    with _connected(redis_url) as client:
        key, text = KeyStore(client).rotate(key_id, grace)
    _tell(key, text)


@keys.command()
@key_argument
@redis_option
def revoke(key_id: str, redis_url: str | None) -> None:
    """End key ID: gateways refuse it within seconds. Its tenant's rollouts go on."""
    with _connected(redis_url) as client:
        store = KeyStore(client)
        key = store.revoke(key_id)
        _warn_without_admin(store)
    click.echo(f"key {key.id} of tenant {key.tenant} is revoked")


@click.group()
def tenants() -> None:
    """Show tenants, and set what each may use."""


def _tenants_table(rows: list[tuple[Tenant, int]]) -> Sheet:
    def limit(row: tuple[Tenant, int], field: str) -> str:
        value = getattr(row[0], field)
        if value is None:
            return "isolating" if field == "runtimes" else UNLIMITED
        return str(value) if isinstance(value, int) else ", ".join(value)

    columns = [
        Column("tenant", lambda row: row[0].name, whole=True),
        Column("live", lambda row: str(row[1]), True),
        Column("quota", partial(limit, field="quota_live"), True),
        Column("a minute", partial(limit, field="per_minute"), True),
        Column("bytes", partial(limit, field="quota_bytes"), True),
        Column("weight", lambda row: f"{row[0].weight:g}", True),
        *(
            Column(kind, partial(limit, field=kind))
            for kind in ("handlers", "policies", "images", "runtimes", "mounts")
            if any(getattr(tenant, kind) is not None for tenant, _ in rows)
        ),
    ]
    return Sheet(columns, rows)


@tenants.command()
@click.argument("tenant", required=False, shell_complete=complete_tenants)
@json_option
@redis_option
def show(tenant: str | None, as_json: bool, redis_url: str | None) -> None:
    """Show TENANT, or all of them: limits, and rollouts under way."""
    with _connected(redis_url) as client:
        store = TenantStore(client)
        chosen = [store.get(tenant)] if tenant else store.list()
        rows = [(each, store.live(each.name)) for each in chosen]
    shown = [{**each.model_dump(mode="json"), "live": live} for each, live in rows]
    show_view(_tenants_table(rows) if rows else "no tenant has limits or rollouts", shown, as_json)


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
@click.argument("tenant", shell_complete=complete_tenants)
@click.option(
    "--create", "new", is_flag=True, help="A tenant that has neither limits, keys nor rollouts yet."
)
@limit_options
@redis_option
def set_(tenant: str, new: bool, redis_url: str | None, **limits: Any) -> None:
    """Set limits of TENANT; `any` takes one away. What is not given stays."""
    with _connected(redis_url) as client:
        if not new and tenant not in (known := _tenant_names(client)):
            raise click.ClickException(
                f"there is no tenant {tenant!r}, only {', '.join(sorted(known))}; --create makes one"
            )
        changed = _limited(client, tenant, limits)
        if changed is None:
            raise click.UsageError(f"give at least one of {', '.join(LIMITS)}")
        rows = [(changed, TenantStore(client).live(tenant))]
    show_view(_tenants_table(rows))
