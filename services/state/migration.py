"""The version of the layout of keys in Redis: checked at every start, raised by registered steps.

A layout that this code does not know is never written to: a newer one is refused, an older one is brought up
step by step under a lock. A step must be idempotent, for a process that dies in it leaves it to the next one.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping

import redis
import structlog

from services.state import keys
from services.state.fleet import FleetStore

log = structlog.get_logger("schema")

FIRST_VERSION = 1
"""What is there without a version was written before there were versions."""

Step = Callable[[redis.Redis], None]


def _requests_by_themselves(client: redis.Redis) -> None:
    """2: a request is kept once for its group. Records that hold theirs are read as they are; a worker of
    version 1 cannot read those that do not."""


STEPS: Mapping[int, Step] = {1: _requests_by_themselves}
"""From each version that has a successor: what makes it the next one."""

SCHEMA_VERSION = FIRST_VERSION + len(STEPS)
"""What this code reads and writes. Readers that take both the old and the new form need no new version."""

LOCK_S = 30.0
"""Another process takes a migration over when the one at work was silent for so long."""
POLL_S = 0.2
WAIT_S = 600.0
"""Longest wait for another process's migration."""
STOP_WAIT_S = 60.0
"""Longest wait for workers of the older version to be stopped."""

_SET_IF_MINE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
_EXTEND = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0"
_DROP = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"


class SchemaError(RuntimeError):
    """The data in Redis is not for this version of the service; the message says what to do."""


def ensure(
    client: redis.Redis,
    *,
    steps: Mapping[int, Step] = STEPS,
    first: int = FIRST_VERSION,
    stop_wait_s: float = STOP_WAIT_S,
) -> int:
    """Make sure that Redis holds the layout that this code knows; the version found at first.

    Args:
        steps: By version, what turns its layout into that of the next one.
        stop_wait_s: How long workers of the older version may take to stop before this gives up.

    Raises:
        SchemaError: The layout is newer, or it is older and live workers still write it.
    """
    wanted = first + len(steps)
    found = _version(client, wanted, first)
    if found > wanted:
        raise SchemaError(
            f"Redis holds schema version {found}, and this is version {wanted} of it: it was written by a "
            "newer release of the service. Start that release again, or use another Redis database"
        )
    if found < wanted:
        _migrate(client, wanted, steps, stop_wait_s)
    return found


def _version(client: redis.Redis, wanted: int, first: int) -> int:
    raw = client.get(keys.SCHEMA_VERSION)
    if raw is None:
        # Whoever comes first writes it: an empty database gets ours, one with rollouts in it is the oldest.
        client.set(keys.SCHEMA_VERSION, first if client.exists(keys.CREATED) else wanted, nx=True)
        raw = client.get(keys.SCHEMA_VERSION)
    if raw is None or not str(raw).isdecimal():
        raise SchemaError(
            f"the key {keys.SCHEMA_VERSION!r} in Redis holds {raw!r}, which is no version: another program "
            "uses this database. Give the service one of its own (the number at the end of ROLLOUT_REDIS_URL)"
        )
    return int(raw)


def _migrate(client: redis.Redis, wanted: int, steps: Mapping[int, Step], stop_wait_s: float) -> None:
    """Run the missing steps, or wait until another process has."""
    deadline = time.monotonic() + WAIT_S
    token = secrets.token_hex(8)
    while int(client.get(keys.SCHEMA_VERSION) or 0) < wanted:
        if client.set(keys.SCHEMA_LOCK, token, nx=True, px=int(LOCK_S * 1000)):
            try:
                _require_no_workers(client, stop_wait_s, token)
                _run(client, wanted, steps, token)
            finally:
                client.eval(_DROP, 1, keys.SCHEMA_LOCK, token)
            return
        if time.monotonic() > deadline:
            raise SchemaError(
                f"another process has been migrating the data in Redis for {WAIT_S:.0f} s; see its log, then "
                "start this one again"
            )
        time.sleep(POLL_S)


def _require_no_workers(client: redis.Redis, stop_wait_s: float, token: str) -> None:
    """Those who announce themselves now are of the older version: ours do so only after this check."""
    deadline = time.monotonic() + stop_wait_s
    while True:
        alive = sorted({name for names in FleetStore(client).alive().values() for name in names})
        if not alive:
            return
        if time.monotonic() > deadline:
            raise SchemaError(
                f"the data in Redis is older and workers still write it: {', '.join(alive[:5])}. "
                "Stop every worker and gateway of the older release, then start this one again"
            )
        client.eval(_EXTEND, 1, keys.SCHEMA_LOCK, token, int(LOCK_S * 1000))
        time.sleep(POLL_S)


def _run(client: redis.Redis, wanted: int, steps: Mapping[int, Step], token: str) -> None:
    done = threading.Event()

    def keep_lock() -> None:
        while not done.wait(LOCK_S / 3):
            try:
                client.eval(_EXTEND, 1, keys.SCHEMA_LOCK, token, int(LOCK_S * 1000))
            except redis.RedisError as error:
                log.warning("the lock of the migration could not be extended", error=str(error))

    keeper = threading.Thread(target=keep_lock, name="migration-lock", daemon=True)
    keeper.start()
    try:
        # Read again: another process may have done some of it before it died.
        for version in range(int(client.get(keys.SCHEMA_VERSION)), wanted):
            begun = time.monotonic()
            log.warning("migrating the data in Redis", to=version + 1)
            steps[version](client)
            if not client.eval(_SET_IF_MINE, 2, keys.SCHEMA_LOCK, keys.SCHEMA_VERSION, token, version + 1):
                raise SchemaError("the lock of the migration was lost; start this process again")
            log.warning("migrated", version=version + 1, seconds=round(time.monotonic() - begun, 3))
    finally:
        done.set()
        keeper.join()
