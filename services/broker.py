"""Celery's messages on Redis: kombu's Redis transport, with two things of a channel done differently.

Registered in place of kombu's own for `redis://`, `rediss://` and `sentinel://` by `register`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import redis
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as kombu_redis


class _KeptClient:
    """A channel of kombu's that keeps one Redis client for its commands, and puts no message back."""

    # kombu puts messages in hand back when a channel closes. When it closes because Redis is away, that
    # raises (kombu 5.7) and the worker exits. The reaper rings again for a rollout that waits.
    do_restore = False

    _kept: redis.Redis | None = None

    @contextmanager
    def conn_or_acquire(self, client: redis.Redis | None = None) -> Iterator[redis.Redis]:
        """The given client, or the channel's own.

        kombu makes a client for every command, each with a table of 200 callbacks: a tenth of a worker's
        time. A client has no state beside its pool.

        Raises:
            redis.ConnectionError: Another thread lost the connection, and closed the channel. After what
                kombu itself would raise, an AttributeError, it does not try again.
        """
        if client is None:
            if self.connection is None:
                raise redis.ConnectionError("the channel was closed: its connection is lost")
            client = self._kept
            # A lost connection gets the channel another pool.
            if client is None or client.connection_pool is not self.pool:
                with super().conn_or_acquire() as client:
                    self._kept = client
        yield client


class Channel(_KeptClient, kombu_redis.Channel):
    """A channel to one Redis server."""


class SentinelChannel(_KeptClient, kombu_redis.SentinelChannel):
    """A channel to the master that sentinels name."""


class Transport(kombu_redis.Transport):
    """See the module."""

    Channel = Channel


class SentinelTransport(kombu_redis.SentinelTransport):
    """See the module."""

    Channel = SentinelChannel


def register() -> None:
    """Have kombu use these transports in this process."""
    single, group = (f"{__name__}:{kind.__name__}" for kind in (Transport, SentinelTransport))
    TRANSPORT_ALIASES.update(redis=single, rediss=single, sentinel=group)


def binding_keys(queues: Iterable[str]) -> list[str]:
    """The keys by which kombu knows of queues, whether or not there are messages in them."""
    return [
        pattern % name
        for name in queues
        for pattern in (Channel.keyprefix_queue, Channel.keyprefix_binding_permanent)
    ]
