"""Bundles of task directories (`rollout.suites.bundles`), from their submission until workers fetch them."""

from __future__ import annotations

import secrets

import redis
from redis.client import NEVER_DECODE

from services.settings import Settings
from services.state import keys
from services.state.memory import Room
from services.state.scripts import Operations

PIECE = 1 << 20
"""Bytes of a value in Redis: others are served between two of them."""
READ_AT_ONCE = 4
KEEP_S = 30 * 86400
"""After its last use: a submission, or a worker that fetched it."""
IDLE_S = 86400
"""Unused for so long one makes room for others of its tenant; sooner a rollout may wait that needs it."""
WRITTEN_IN_S = 600


class BundlesFull(Exception):
    """A bundle that its tenant's quota has no room for; it was not kept."""


class BundleStore:
    """The bundles of all tenants, in Redis. Whether a content is what its digest says its caller knows."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        self._most = settings.bundles_mb << 20
        self._room = Room(client)
        self._do = Operations(client, "bundles", KEEP_MS=KEEP_S * 1000, IDLE_MS=IDLE_S * 1000)

    def put(self, tenant: str, digest: str, content: bytes) -> bool:
        """Keep a bundle; whether it is a new one.

        Raises:
            BundlesFull: The tenant has too many that were used lately.
            StoreFull: Redis has no room.
        """
        if self._do("use", tenant=tenant, digest=digest, event="there"):
            return False
        self._room.require(len(content))
        token = secrets.token_hex(16)
        part, starts = keys.bundle_part(token), range(0, len(content), PIECE)
        for start in starts:
            with self._redis.pipeline(transaction=True) as write:  # nothing stays but whole bundles
                write.rpush(part, content[start : start + PIECE]).expire(part, WRITTEN_IN_S).execute()
        ask = {"tenant": tenant, "digest": digest, "bytes": len(content), "most": self._most}
        answer = self._do("keep", **ask, part=token, pieces=len(starts))
        if answer == "lost":
            raise redis.ConnectionError("Redis has lost a part of a bundle; send it again")
        if isinstance(answer, int):
            raise BundlesFull(
                f"tenant {tenant!r} may have {self._most} bytes of bundles, used {answer} in a day, "
                f"and this one has {len(content)}: have ROLLOUT_BUNDLES_MB raised"
            )
        return answer == "new"

    def use(self, tenant: str, digest: str) -> bool:
        """Whether the tenant has a bundle, which counts as used then."""
        return bool(self._do("use", tenant=tenant, digest=digest))

    def fetch(self, tenant: str, digest: str) -> bytes | None:
        """A bundle, for a worker; None: Redis does not have it, or not all of it."""
        if not self._do("use", tenant=tenant, digest=digest, event="fetched", absent="missing"):
            return None
        key, pieces = keys.bundle(tenant, digest), []
        while True:
            some = [key, len(pieces), len(pieces) + READ_AT_ONCE - 1]
            found = self._redis.execute_command("LRANGE", *some, **{NEVER_DECODE: True})
            pieces += found
            if len(found) < READ_AT_ONCE:
                return b"".join(pieces)

    def stored(self) -> dict[str, int]:
        """Bytes of each tenant's bundles."""
        sizes = self._redis.hgetall(keys.BUNDLES_BYTES)
        return {tenant: int(size) for tenant, size in sizes.items()}

    def totals(self) -> dict[str, int]:
        """How often a bundle came (`new`, `there` already, `refused`), was `fetched`, or was `missing`."""
        sums = self._redis.hgetall(keys.BUNDLES_TOTALS)
        return {event: int(sums.get(event, 0)) for event in ("new", "there", "refused", "fetched", "missing")}
