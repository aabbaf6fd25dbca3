"""`rollout keys` and `rollout tenants`: entry points of the group `rollout.commands`.

They speak to Redis and not to the gateway, so that the first key can be made before any call is allowed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import redis
from pydantic import ValidationError

from rollout.account import RUN_VARIABLE
from rollout.cli.common import Column, Sheet, json_option
from rollout.cli.common import show as show_view
from rollout.client import KEY_VARIABLE
from rollout.webhooks import tenant_secret
from services.launch import paths
from services.launch.redis import own_url
from services.redis_address import hide_password
from services.settings import SettingsError, settings
from services.state.api_keys import ApiKey, KeyProblem, KeyStore, Scope
from services.state.redis import connect
from services.state.tenants import DEFAULT_TENANT, Tenant, TenantStore, check_name

REDIS_VARIABLE = "ROLLOUT_REDIS_URL"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
UNLIMITED = "any"
"""What takes a limit away again."""

F = TypeVar("F", bound=Callable[..., Any])


def redis_option(command: F) -> F:
    return click.option(
        "--redis",
        "redis_url",
        help=f"[default: ${REDIS_VARIABLE}, else that of the `rollout up` of this checkout]",
    )(command)


class Parsed(click.ParamType):
    """A text that a function makes a value of; its ValueError is what the user reads."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _duration(text: str) -> float:
    parts = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if parts is None:
        raise ValueError(f"{text!r} is no duration; write 90s, 15m, 1h or 30d")
    return float(int(parts[1]) * UNITS[parts[2]])


def _names(text: str) -> Any:
    return text if text == UNLIMITED else tuple(filter(None, map(str.strip, text.split(","))))


def _count(text: str) -> Any:
    if text != UNLIMITED and not re.fullmatch(r"[0-9]{1,15}", text):
        raise ValueError(f"{text!r} is neither a number nor {UNLIMITED!r}")
    return text if text == UNLIMITED else int(text)


def _scopes(text: str) -> list[Scope]:
    try:
        return [Scope(name.strip()) for name in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r}: scopes are {', '.join(Scope)}, separated by commas") from None


DURATION, NAMES, COUNT = Parsed("duration", _duration), Parsed("names", _names), Parsed("number", _count)
"""Seconds; several names, or a number, or `any` = no limit."""


LIMITS = {
    "--quota-live": (COUNT, "Rollouts that may be under way at once."),
    "--per-minute": (COUNT, "Rollouts that may be submitted a minute."),
    "--quota-bytes": (COUNT, "Bytes of requests that may be kept at once."),
    "--handlers": (NAMES, "Handlers, or patterns."),
    "--images": (NAMES, "Sandbox images, or patterns such as swe-*."),
    "--runtimes": (NAMES, "Sandbox runtimes. [default: all that isolate]"),
    "--mounts": (NAMES, "Paths of nodes, or patterns, that sandboxes may show."),
    "--weight": (click.FloatRange(0.01, 1000), "Share of INIT while others wait as well. [default: 1]"),
}


def limit_options(command: F) -> F:
    """What a tenant may use; an option that is not given leaves things as they are."""
    for name, (kind, text) in reversed(LIMITS.items()):
        command = click.option(name, type=kind, help=text)(command)
    return command


@contextmanager
def _connected(url: str | None, quiet: bool = False) -> Iterator[redis.Redis]:
    """A connection to the deployment's Redis; what goes wrong becomes one message and exit code 1.

    Where the command line does not name it, standard error says which one it is.
    """
    try:
        chosen = url or os.environ.get(REDIS_VARIABLE)
        if not chosen and not os.environ.get(RUN_VARIABLE):  # which names another service than our own
            chosen = own_url(paths.state_dir())
        if not chosen:
            raise click.ClickException(
                f"no Redis is named, and no `rollout up` of {paths.home()} is meant or runs: give the one of "
                f"your service as --redis or {REDIS_VARIABLE}"
            )
        if not (url or quiet):
            click.echo(hide_password(chosen), err=True)
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


def _completed(names: Callable[[redis.Redis], Iterable[str]]) -> Callable[..., list[str]]:
    """What the shell completes an argument with; nothing where Redis does not answer."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            with _connected(ctx.params.get("redis_url"), quiet=True) as client:
                return sorted(name for name in names(client) if name.startswith(incomplete))
        except click.ClickException:
            return []

    return complete


def _tenant_names(client: redis.Redis) -> set[str]:
    """Tenants with limits, rollouts or keys."""
    named = {tenant.name for tenant in TenantStore(client).list()}
    return named | {key.tenant for key in KeyStore(client).list()} | {DEFAULT_TENANT}


key_argument = click.argument(
    "key_id",
    metavar="ID",
    shell_complete=_completed(lambda client: [key.id for key in KeyStore(client).list()]),
)
complete_tenants = _completed(_tenant_names)


def _warn_without_admin(store: KeyStore) -> None:
    now = time.time()
    if not any(key.may(Scope.ADMIN) and key.state(now) in ("active", "replaced") for key in store.list()):
        click.echo(
            "WARNING: no key of the scope admin works, so nobody can register LLM servers or bring weights: "
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
    type=Parsed("scopes", _scopes),
    multiple=True,
    help="submit, read, metrics, admin (everything); several by commas. [default: submit,read]",
)
@click.option("--expires", type=DURATION, help="30d, 12h … from now. [default: never]")
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
    rights = {scope for group in scopes for scope in group} or {Scope.SUBMIT, Scope.READ}
    with _connected(redis_url) as client:
        store = KeyStore(client)
        try:
            check_name(tenant)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        _limited(client, tenant, limits)
        key, text = store.create(tenant, rights, lifetime_s=expires, text=text)
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
        shown = [_shown(key) for key in KeyStore(client).list()]
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
@click.option("--grace", type=DURATION, default="1h", show_default=True, help="How long the old one works.")
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
    def limit(field: str) -> Callable[[tuple[Tenant, int]], str]:
        def cell(row: tuple[Tenant, int]) -> str:
            value = getattr(row[0], field)
            if value is None:
                return "isolating" if field == "runtimes" else UNLIMITED
            return str(value) if isinstance(value, int) else ", ".join(value)

        return cell

    columns = [
        Column("tenant", lambda row: row[0].name, whole=True),
        Column("live", lambda row: str(row[1]), number=True),
        Column("quota", limit("quota_live"), number=True),
        Column("a minute", limit("per_minute"), number=True),
        Column("bytes", limit("quota_bytes"), number=True),
        Column("weight", lambda row: f"{row[0].weight:g}", number=True),
        *(
            Column(kind, limit(kind))
            for kind in ("handlers", "images", "runtimes", "mounts")
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
