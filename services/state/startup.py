"""What the gateway and every worker check before they use a Redis."""

from __future__ import annotations

import threading
from typing import Any

import redis
import structlog

from services.settings import Settings
from services.state import keys
from services.version import STAMP

log = structlog.get_logger("redis")

OLDEST_REDIS = (6, 2)
"""Exclusive ranges of streams and `ZMSCORE`, which we use, came with it."""


class UnfitRedis(RuntimeError):
    """This Redis cannot keep the service's state, or not safely and `ROLLOUT_REDIS_STRICT` is set."""


def risks(info: dict[str, Any]) -> list[str]:
    """What of a server's `INFO` endangers the data, a line each with its remedy.

    Raises:
        UnfitRedis: The service cannot work on it at all.
    """
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < OLDEST_REDIS:
        needed = ".".join(map(str, OLDEST_REDIS))
        raise UnfitRedis(f"Redis {version} is too old: the service needs {needed} or later, or Valkey")
    if info.get("cluster_enabled"):
        raise UnfitRedis(
            "this Redis is a node of a cluster, whose keys live on many nodes, and our scripts need them on "
            "one: use a standalone server, or Sentinel"
        )
    if info.get("role") == "slave":
        raise UnfitRedis(
            # Callers without a key see this: no addresses.
            "this Redis is a replica: give the master's address in ROLLOUT_REDIS_URL (`redis-cli info "
            "replication` has it), or sentinel://… which finds it"
        )
    dangers = []
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        dangers.append(
            f"maxmemory-policy is {policy}: a full Redis deletes rollouts in silence. "
            "CONFIG SET maxmemory-policy noeviction"
        )
    if not info.get("aof_enabled"):
        dangers.append(
            "the append-only file is off: a restart of Redis loses every rollout since the last snapshot. "
            "CONFIG SET appendonly yes, or start it with deploy/redis/redis.conf"
        )
    return dangers


def prepare(client: redis.Redis, settings: Settings) -> None:
    """Check the server, and say loudly what endangers the data.

    Raises:
        UnfitRedis: The service must not use this Redis; the message says why.
        redis.RedisError: It does not answer.
    """
    _check_stamp(client)
    for risk in risks(client.info()):
        if settings.redis_strict:
            raise UnfitRedis(f"{risk} (ROLLOUT_REDIS_STRICT=false turns this into a warning)")
        log.warning(f"REDIS MAY LOSE DATA: {risk}")


def _check_stamp(client: redis.Redis) -> None:
    """Refuse a Redis that is used by a release which is neither ours nor next to ours."""
    there = int(client.get(keys.STAMP) or STAMP)
    if there > STAMP + 1 or (there < STAMP - 1 and client.exists(keys.DUE)):
        raise UnfitRedis(
            f"this Redis has rollouts of a release with stamp {there}, and ours has {STAMP}: only neighbours "
            "work side by side. Upgrade this node, or let the rollouts end before you go on by two releases"
        )
    client.set(keys.STAMP, max(there, STAMP))


class StartCheck:
    """`prepare`, once a process: for a gateway that starts before its Redis."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._lock = threading.Lock()
        self.passed = False

    def require(self) -> None:
        """Check if nobody has yet; raises as `prepare` does, each time until it passes."""
        if self.passed:
            return
        with self._lock:
            if not self.passed:
                prepare(self._client, self._settings)
                self.passed = True
