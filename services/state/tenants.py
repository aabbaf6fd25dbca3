"""Tenants: what each may use, and how many live rollouts it has.

A tenant exists by being named: one without an entry of its own has no limits. Live rollouts are counted by
`rollouts.lua`, at submission and at every end, in the script that writes the state.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from posixpath import normpath
from typing import Annotated

import redis
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from services.state import keys

DEFAULT_TENANT = "default"
"""Whose the rollouts are where no key is configured."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def check_name(name: str) -> str:
    """The name of a tenant, as it may stand in a Redis key and in a log.

    Raises:
        ValueError: It does not fit.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"tenant {name!r}: a name has 1 to 63 lower-case letters, digits and -, and starts with a letter "
            "or digit"
        )
    return name


class Tenant(BaseModel):
    """What a tenant may use. None = no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(check_name)]
    quota_live: int | None = Field(default=None, ge=0)
    """Most rollouts that have not ended."""
    per_minute: int | None = Field(default=None, ge=0)
    """Rollouts it may submit a minute; a minute's worth may come at once."""
    quota_bytes: int | None = Field(default=None, ge=0)
    """Bytes of its requests that are kept, of ended rollouts too, and of prompts that wait in its batches."""
    handlers: tuple[str, ...] | None = None
    """Names or patterns (`swe-*`) of handlers."""
    images: tuple[str, ...] | None = None
    """Names or patterns of sandbox images."""
    runtimes: tuple[str, ...] | None = None
    """Sandbox runtimes that a request may name; None = all that isolate."""
    policies: tuple[str, ...] | None = None
    """Names or patterns of policies that its requests and their handlers may name."""
    mounts: tuple[str, ...] | None = None
    """Paths of nodes, or patterns of them, that sandboxes may show, with all below; None = what each node's
    operator allows."""
    weight: float = Field(default=1.0, ge=0.01, le=1000)
    """Its share of INIT while others wait as well: twice the weight, twice the rollouts."""

    def may_use(self, kind: str, value: str) -> bool:
        """Whether a value is among those of a list (`handlers`, `images`, `policies` or `runtimes`)."""
        allowed = getattr(self, kind)
        if "/" in value:
            value = normpath(value)  # else `/images/a-*` would let `/images/a-x/../secret` through
        return allowed is None or any(fnmatchcase(value, pattern) for pattern in allowed)


@dataclass(frozen=True)
class Usage:
    """What a tenant has of the service now."""

    tenant: Tenant
    live: int
    """Rollouts that have not ended."""
    waiting: int
    """Those of them that wait for their turn in INIT."""
    claimed: int
    """Rollouts that INIT ever took, attempts counted."""


class QuotaExceeded(Exception):
    """A submission that a tenant's quota has no room for; nothing was enqueued."""

    def __init__(
        self, tenant: str, *, kind: str, limit: int, used: int, asked: int, wait_ms: int | None = None
    ) -> None:
        """As `over_quota` of a script answers."""
        self.wait_s = None if wait_ms is None else wait_ms / 1000
        """Seconds after which there may be room; None = never, for the call is larger than the quota."""
        what = {"live": "live rollouts", "rate": "rollouts a minute", "bytes": "bytes of requests"}[kind]
        may = f"tenant {tenant!r} may have {limit} {what}"
        if wait_ms is None:
            remedy = "send smaller calls, or have the quota raised (`rollout tenants set`)"
            super().__init__(f"{may} and this call holds {asked}: {remedy}")
        else:
            has = f"has {used} of them left" if kind == "rate" else f"has {used}"
            super().__init__(f"{may}, {has}, and this call holds {asked}")


def tenants_of(limits: Mapping[str, str], policies: Mapping[str, str]) -> dict[str, Tenant]:
    """Tenants by name, of what Redis has of them."""
    return {
        name: Tenant.model_validate(json.loads(raw) | {"policies": json.loads(policies.get(name, "null"))})
        for name, raw in limits.items()
    }


class TenantStore:
    """The limits of tenants, in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def get(self, name: str) -> Tenant:
        """A tenant's limits; one that was never set has none."""
        with self._redis.pipeline() as pipe:
            pipe.hget(keys.TENANTS, name)
            pipe.hget(keys.TENANTS_POLICIES, name)
            raw, policies = pipe.execute()
        return tenants_of({name: raw}, {name: policies or "null"})[name] if raw else Tenant(name=name)

    def set(self, tenant: Tenant) -> None:
        """Write a tenant's limits; gateways follow within `auth.CACHE_S`."""
        with self._redis.pipeline() as pipe:
            pipe.hset(keys.TENANTS, tenant.name, tenant.model_dump_json(exclude={"policies"}))
            pipe.hset(keys.TENANTS_POLICIES, tenant.name, json.dumps(tenant.policies))
            pipe.set(keys.ACCESS_VERSION, secrets.token_hex(8))
            pipe.execute()

    def list(self) -> list[Tenant]:
        """Every tenant that has limits, live rollouts or both, by name."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.TENANTS)
            pipe.hgetall(keys.TENANTS_POLICIES)
            pipe.hkeys(keys.TENANTS_LIVE)
            limits, policies, seen = pipe.execute()
        known = tenants_of(limits, policies)
        return [known.get(name) or Tenant(name=name) for name in sorted({*known, *seen})]

    def usage(self) -> list[Usage]:
        """Every tenant that has limits or ever had rollouts, with what it has now."""
        tenants = self.list()
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.TENANTS_LIVE)
            pipe.hgetall(keys.FAIR_CLAIMS)
            for tenant in tenants:
                pipe.zcard(keys.fair_waiting(tenant.name))
            live, claimed, *waiting = pipe.execute()
        return [
            Usage(tenant, int(live.get(tenant.name, 0)), count, int(claimed.get(tenant.name, 0)))
            for tenant, count in zip(tenants, waiting, strict=True)
        ]

    def live(self, name: str) -> int:
        """How many rollouts of a tenant have not ended."""
        return int(self._redis.hget(keys.TENANTS_LIVE, name) or 0)
