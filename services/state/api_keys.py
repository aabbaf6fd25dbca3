"""API keys: made, rotated and revoked. Redis holds the SHA-256 of a secret and never the secret.

A key is `rlt_<id>_<secret>`. The secret has 256 random bits, so a plain digest cannot be guessed back. The id
is no secret: commands and logs name keys by it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from rollout.schema.base import PolicyName
from services.state import keys
from services.state.tenants import Tenant, check_name, tenants_of

FORMAT = re.compile(r"rlt_([0-9a-f]{12})_([0-9a-f]{64})")
_NOBODY = "0" * 64
"""Digest that an unknown id is compared with, so that it takes as long as a known one."""


class Scope(StrEnum):
    """What a key may do. Beside these there is `train:NAME` for each policy."""

    SUBMIT = "submit"
    """Submit and cancel rollouts."""
    READ = "read"
    METRICS = "metrics"
    """Scrape `/metrics`, which tells of all tenants."""
    ADMIN = "admin"
    """Everything, also other tenants' rollouts."""
    OPERATE = "operate"
    """What all tenants share and is none's own: backends, fleet, metrics, the weights of every policy."""


TRAIN = "train:{name}"
"""Bring weights to a policy, forget them, see how that goes. For routes with its `name` in their address."""
SHARED = (Scope.READ, Scope.OPERATE)
"""Either of them is enough to see what all tenants share."""
_FIRST = frozenset(("submit", "read", "metrics", "admin"))
"""Scopes that every release knows."""
_POLICY_NAME: TypeAdapter[str] = TypeAdapter(PolicyName)


def check_scope(text: str) -> str:
    """A scope as a key may have it.

    Raises:
        ValueError: There is no such scope.
    """
    if text in tuple(Scope):
        return text
    if not text.startswith("train:"):
        raise ValueError(f"{text!r}: scopes are {', '.join(Scope)} and train:POLICY, separated by commas")
    try:
        _POLICY_NAME.validate_python(text.removeprefix("train:"))
    except ValidationError:
        raise ValueError(
            f"{text!r}: a policy's name has 1 to 63 lower-case letters, digits and . _ -, and starts with a "
            "letter or digit"
        ) from None
    return text


class KeyProblem(ValueError):
    """A key cannot be made, rotated or revoked; the message says why."""


class ApiKey(BaseModel):
    """What is kept of a key. Times are seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    id: str
    tenant: str
    scopes: frozenset[str]
    digest: str
    """SHA-256 of the secret, in hex."""
    created_at: float
    lifetime_s: float | None = None
    """As asked for at its creation; a rotated key gets the same again."""
    expires_at: float | None = None
    revoked_at: float | None = None
    replaced_by: str | None = None
    """Id of the key that a rotation made."""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "scopes": [*fields["scopes"], *fields.get("further", ())]}

    def stored(self) -> str:
        """As Redis has it (JSON).

        A release that does not know a scope cannot read such a key, and then lets nobody in. Other fields
        it passes over, so scopes that it may not know are in one of their own.
        """
        apart = {"scopes": sorted(self.scopes & _FIRST), "further": sorted(self.scopes - _FIRST)}
        return json.dumps(self.model_dump(mode="json") | apart)

    def may(self, *scopes: str) -> bool:
        """Whether it has one of these scopes, or one that includes it."""
        if Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(scopes):
            return True
        operated = (scope == Scope.METRICS or scope.startswith("train:") for scope in scopes)
        return Scope.OPERATE in self.scopes and any(operated)

    def state(self, now: float) -> str:
        """`active`, `replaced` (by a rotation, still in its grace), `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and now >= self.expires_at:
            return "expired"
        return "replaced" if self.replaced_by else "active"


def new_text() -> str:
    """A key that nobody has."""
    return f"rlt_{secrets.token_hex(6)}_{secrets.token_hex(32)}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _made(text: re.Match[str], tenant: str, scopes: frozenset[str], lifetime_s: float | None) -> ApiKey:
    """What is kept of a key of this text (a match of `FORMAT`) that is made now."""
    now = time.time()
    return ApiKey(
        id=text[1],
        tenant=tenant,
        scopes=scopes,
        digest=_digest(text[2]),
        created_at=now,
        lifetime_s=lifetime_s,
        expires_at=None if lifetime_s is None else now + lifetime_s,
    )


@dataclass(frozen=True)
class Access:
    """All keys and tenants at one moment: what a gateway checks calls against."""

    version: str
    keys: dict[str, ApiKey]
    tenants: dict[str, Tenant]

    @property
    def configured(self) -> bool:
        """Whether any key was ever made: revoking the last one does not open the service."""
        return bool(self.keys)

    def find(self, text: str) -> ApiKey | None:
        """The key whose text this is, whatever its state; None for any other text."""
        parts = FORMAT.fullmatch(text)
        if parts is None:
            return None
        key = self.keys.get(parts[1])
        same = hmac.compare_digest(_digest(parts[2]), key.digest if key else _NOBODY)
        return key if same else None

    def tenant(self, name: str) -> Tenant:
        return self.tenants.get(name) or Tenant(name=name)


class KeyStore:
    """The keys, in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def create(
        self, tenant: str, scopes: Iterable[str], *, lifetime_s: float | None = None, text: str | None = None
    ) -> tuple[ApiKey, str]:
        """Make a key.

        Args:
            lifetime_s: None = it does not expire.
            text: A key made elsewhere (a secret store's); None = a new one. The same one again for the same
                tenant and scopes is harmless.

        Returns:
            What is kept of it, and its text, which is nowhere kept.

        Raises:
            KeyProblem: The tenant's name, a scope or the text does not fit, or the id is in use.
        """
        try:
            check_name(tenant)
            scopes = frozenset(map(check_scope, scopes))
        except ValueError as error:
            raise KeyProblem(str(error)) from None
        given = text is not None
        text = new_text() if text is None else text
        parts = FORMAT.fullmatch(text)
        if parts is None:
            # Not shown: it is a secret, if perhaps one with a typing error.
            raise KeyProblem("the given text is no key: rlt_, 12 hex digits, _, 64 hex digits")
        made = _made(parts, tenant, scopes, lifetime_s)

        def add(known: dict[str, ApiKey]) -> list[ApiKey]:
            old = known.get(made.id)
            if old is None:
                return [made]
            same = (old.tenant, old.scopes, old.digest) == (made.tenant, made.scopes, made.digest)
            state = old.state(made.created_at)
            if not given or not same or state != "active":
                raise KeyProblem(f"key {made.id} exists ({state}, tenant {old.tenant}): give another one")
            return []

        self._change(add)
        return made, text

    def rotate(self, key_id: str, grace_s: float) -> tuple[ApiKey, str]:
        """Make a key with the same rights; the old one works for `grace_s` seconds more.

        Raises:
            KeyProblem: There is no such key, or it does not work any more.
        """
        text = new_text()

        def replace(known: dict[str, ApiKey]) -> list[ApiKey]:
            old, now = self._named(known, key_id), time.time()
            if old.state(now) != "active":
                by = f" by {old.replaced_by}" if old.replaced_by else ""
                raise KeyProblem(f"key {key_id} is {old.state(now)}{by}: make a new one")
            new = _made(FORMAT.fullmatch(text), old.tenant, old.scopes, old.lifetime_s)
            ends = now + grace_s if old.expires_at is None else min(old.expires_at, now + grace_s)
            return [new, old.model_copy(update={"expires_at": ends, "replaced_by": new.id})]

        return self._change(replace)[0], text

    def revoke(self, key_id: str) -> ApiKey:
        """End a key; gateways refuse it within `auth.CACHE_S`. Harmless if it is revoked already.

        Raises:
            KeyProblem: There is no such key.
        """

        def end(known: dict[str, ApiKey]) -> list[ApiKey]:
            old = self._named(known, key_id)
            return [old if old.revoked_at else old.model_copy(update={"revoked_at": time.time()})]

        return self._change(end)[0]

    def list(self) -> list[ApiKey]:
        """All keys, also those that ended, the oldest first."""
        return sorted(_keys(self._redis.hgetall(keys.API_KEYS)).values(), key=lambda key: key.created_at)

    def access(self, known: Access | None = None) -> Access:
        """All keys and tenants; `known` again when nothing has changed since."""
        if known is not None and (self._redis.get(keys.ACCESS_VERSION) or "") == known.version:
            return known
        with self._redis.pipeline() as pipe:
            pipe.get(keys.ACCESS_VERSION)
            pipe.hgetall(keys.API_KEYS)
            pipe.hgetall(keys.TENANTS)
            pipe.hgetall(keys.TENANTS_POLICIES)
            version, stored, limits, policies = pipe.execute()
        return Access(version or "", _keys(stored), tenants_of(limits, policies))

    @staticmethod
    def _named(known: dict[str, ApiKey], key_id: str) -> ApiKey:
        if key_id not in known:
            # Cut, in case it is the text of a key.
            raise KeyProblem(f"there is no key {key_id[:12]!r}; `rollout keys list` shows the ids")
        return known[key_id]

    def _change(self, change: Callable[[dict[str, ApiKey]], list[ApiKey]]) -> list[ApiKey]:
        """Write what `change` makes of the keys, and return it; again when somebody else wrote meanwhile."""

        def write(pipe: redis.client.Pipeline) -> list[ApiKey]:
            changed = change(_keys(pipe.hgetall(keys.API_KEYS)))
            pipe.multi()
            for key in changed:
                pipe.hset(keys.API_KEYS, key.id, key.stored())
            pipe.set(keys.ACCESS_VERSION, secrets.token_hex(8))
            return changed

        return self._redis.transaction(write, keys.API_KEYS, value_from_callable=True)  # type: ignore[return-value]


def _keys(stored: dict[str, str]) -> dict[str, ApiKey]:
    return {key_id: ApiKey.model_validate_json(raw) for key_id, raw in stored.items()}
