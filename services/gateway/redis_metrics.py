"""Metrics of the Redis that holds all state, from its own INFO."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Read = Callable[[dict[str, Any]], float]


def _limit(info: dict[str, Any]) -> float:
    """`maxmemory`; without one the machine's memory is the limit, and the kernel enforces it."""
    return info.get("maxmemory") or info.get("total_system_memory") or 0


GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("memory_bytes", "Memory in use.", lambda i: i.get("used_memory", 0)),
    ("memory_limit_bytes", "maxmemory; where none is set, the machine's memory.", _limit),
    ("clients", "Connections.", lambda i: i.get("connected_clients", 0)),
    ("replicas", "Replicas connected.", lambda i: i.get("connected_slaves", 0)),
    ("aof_enabled", "1 while there is an append-only file.", lambda i: bool(i.get("aof_enabled"))),
    ("aof_bytes", "Size of the append-only file.", lambda i: i.get("aof_current_size", 0)),
    (
        "aof_write_ok",
        "0 when the last write to the append-only file failed: Redis refuses writes.",
        lambda i: i.get("aof_last_write_status", "ok") == "ok",
    ),
    (
        "aof_rewrite_ok",
        "0 when the last rewrite of the append-only file failed: it only grows.",
        lambda i: i.get("aof_last_bgrewrite_status", "ok") == "ok",
    ),
    ("uptime_seconds", "Since it was started.", lambda i: i.get("uptime_in_seconds", 0)),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("commands", "Commands worked off since it was started.", lambda i: i.get("total_commands_processed", 0)),
    (
        "aof_delayed_syncs",
        "Times that a write waited for the disk.",
        lambda i: i.get("aof_delayed_fsync", 0),
    ),
    (
        "evicted_keys",
        "Keys it deleted for want of memory: state that is lost.",
        lambda i: i.get("evicted_keys", 0),
    ),
    ("rejected_connections", "Connections beyond maxclients.", lambda i: i.get("rejected_connections", 0)),
)


def server(client: redis.Redis) -> Iterator[Metric]:
    """Of the server that the gateway is connected to: with Sentinel, the master."""
    begun = time.perf_counter()
    client.ping()
    ping = time.perf_counter() - begun
    info = client.info()
    yield GaugeMetricFamily("rollout_redis_ping_seconds", "How long it took to answer a PING.", value=ping)
    for name, text, read in GAUGES:
        yield GaugeMetricFamily(f"rollout_redis_{name}", text, value=read(info))
    for name, text, read in COUNTERS:
        yield CounterMetricFamily(f"rollout_redis_{name}", text, value=read(info))
