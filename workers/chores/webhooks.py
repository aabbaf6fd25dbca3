"""Delivers webhooks: in every worker that has the secret; the elected one does the work."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import redis
from aiohttp.abc import AbstractResolver, ResolveResult

from rollout.schema import Rollout
from rollout.webhooks import EVENT, signed_headers, tenant_secret
from services.settings import Settings, SettingsError
from services.state import keys
from services.state.redis import now
from services.state.tenants import DEFAULT_TENANT
from services.state.webhooks import Delivery, WebhookStore
from services.webhook_address import AddressRefused, AllowedAddresses
from workers.chores.base import Chore
from workers.services import WorkerServices

TIMEOUT_S = 15.0
"""A receiver must answer within it; what it has to do it can do afterwards."""
AT_ONCE, AT_ONCE_PER_HOST = 32, 8
BATCH = 200
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 1800.0
"""Pauses between two tries of one delivery, doubling."""
LONGEST_HOLD_S = 60.0
"""A receiver that fails is left alone for a while, all deliveries to it: others shall not wait behind it."""
MAX_RETRY_AFTER_S = 3600.0
GONE = 410
"""The status by which a receiver says that it wants no more."""


@dataclass
class _Receiver:
    """What is remembered of a host that was sent to."""

    failures: int = 0
    """Failures in a row."""
    hold_until: float = 0.0
    """Until when it is left alone, by the monotonic clock."""


class _GuardedResolver(AbstractResolver):
    """Resolves and checks in one step: the address that was checked is the one that is called."""

    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed = allowed
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await self._resolver.resolve(host, port, family)
        for result in results:
            self._allowed.check_address(host, ip_address(result["host"].partition("%")[0]))
        return results

    async def close(self) -> None:
        await self._resolver.close()


class Deliverer(Chore):
    """Sends what is due, many at once, few to each host."""

    name = "webhooks"
    interval_s = 0.5
    lock = keys.WEBHOOKS_LOCK

    def __init__(self, services: WorkerServices) -> None:
        """
        Raises:
            WebhookError: The secret cannot be used.
        """
        super().__init__(services)
        settings = services.settings
        self._store = WebhookStore(services.redis, settings.webhook_url)
        self._service_url = settings.webhook_url
        self._secrets = webhook_secrets(settings)
        signed_headers(self._secrets, "", 0, b"")
        self._allowed = AllowedAddresses(settings.webhook_allow)
        self._tries, self._give_up_s = settings.webhook_tries, settings.webhook_give_up_s
        self._under_way: dict[str, tuple[str, Future[None]]] = {}
        """Rollout id → the receiver's host and the sending."""
        self._receivers: dict[str, _Receiver] = {}

    @classmethod
    def is_for(cls, services: WorkerServices) -> bool:
        signs = bool(webhook_secrets(services.settings))
        if services.settings.webhook_url and not signs:
            raise SettingsError("ROLLOUT_WEBHOOK_URL is set, but no ROLLOUT_WEBHOOK_SECRET to sign with")
        return signs

    def run(self) -> None:
        """Deliver until the worker stops. What is under way then is tried again by the next one."""
        ready = threading.Event()
        # Not the turns in an executor of the loop: Python joins its threads when it exits, and a worker that
        # Celery ends without a signal has told no chore to stop.
        sending = self._send(ready)
        threading.Thread(target=asyncio.run, args=(sending,), name="webhooks-send", daemon=True).start()
        ready.wait()
        super().run()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)

    async def _send(self, ready: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(resolver=_GuardedResolver(self._allowed), limit=AT_ONCE)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as self._http:
            ready.set()
            await self._ended.wait()
            for _, sending in list(self._under_way.values()):
                sending.cancel()

    def tick(self) -> None:
        """Begin to send what is due."""
        while self._store.collect() == 500:
            pass
        busy = Counter(host for host, _ in list(self._under_way.values()))
        wait: dict[float, list[str]] = {}
        for delivery in self._store.due(BATCH):
            if delivery.rollout_id in self._under_way:
                continue
            host = urlsplit(delivery.url).netloc
            hold = self._receivers.get(host, _Receiver()).hold_until - time.monotonic()
            if hold > 0:
                wait.setdefault(hold, []).append(delivery.rollout_id)
            elif busy[host] >= AT_ONCE_PER_HOST:
                wait.setdefault(self.interval_s, []).append(delivery.rollout_id)
            elif len(self._under_way) < AT_ONCE:
                busy[host] += 1
                self._begin(delivery, host)
        if wait:
            # Out of the way of what is due to others.
            at = now(self._services.redis)
            for pause, ids in wait.items():
                self._store.postpone(ids, at + pause)

    def _begin(self, delivery: Delivery, host: str) -> None:
        sending = asyncio.run_coroutine_threadsafe(self._deliver(delivery, host), self._loop)
        self._under_way[delivery.rollout_id] = (host, sending)
        # Only now, or a short one might be taken out before it was entered.
        sending.add_done_callback(lambda _: self._under_way.pop(delivery.rollout_id, None))

    async def _deliver(self, delivery: Delivery, host: str) -> None:
        try:
            await self._try(delivery, host)
        except redis.RedisError as error:
            self.log.warning(
                "webhook undecided: Redis does not answer", id=delivery.rollout_id, error=str(error)
            )
        except Exception:
            self.log.exception("webhook not sent", id=delivery.rollout_id)

    async def _try(self, delivery: Delivery, host: str) -> None:
        rollout = await asyncio.to_thread(
            self._services.store.get, delivery.rollout_id, trajectory=delivery.include == "trajectory"
        )
        if rollout is None:
            delivery.error = "the rollout is past its retention"
            await self._give_up(delivery, host)
            return
        delivery.tries += 1
        status, retry_after, delivery.error = await self._post(delivery, rollout)
        receiver = self._receivers.setdefault(host, _Receiver())
        if status is not None and 200 <= status < 300:
            receiver.failures, receiver.hold_until = 0, 0.0
            await asyncio.to_thread(self._store.delivered, delivery)
            return
        receiver.failures += 1
        hold = min(FIRST_PAUSE_S * 2 ** min(receiver.failures - 1, 10), LONGEST_HOLD_S)
        receiver.hold_until = time.monotonic() + hold
        at = await asyncio.to_thread(now, self._services.redis)
        if status == GONE or delivery.tries >= self._tries or at - delivery.since > self._give_up_s:
            await self._give_up(delivery, host)
            return
        pause = min(FIRST_PAUSE_S * 2 ** min(delivery.tries - 1, 20), LONGEST_PAUSE_S)
        pause = max(pause * random.uniform(0.8, 1.2), retry_after)
        self.log.info(
            "webhook failed", id=delivery.rollout_id, host=host, error=delivery.error, again_in_s=pause
        )
        await asyncio.to_thread(self._store.failed, delivery, at + pause)

    async def _give_up(self, delivery: Delivery, host: str) -> None:
        fields = {"id": delivery.rollout_id, "host": host, "tries": delivery.tries}
        self.log.warning("webhook given up", **fields, error=delivery.error)
        await asyncio.to_thread(self._store.give_up, delivery)

    def _secrets_for(self, delivery: Delivery, tenant: str) -> list[str]:
        """The service's own, for the operator's receiver and without tenants; else the tenant's."""
        if tenant == DEFAULT_TENANT or delivery.url == self._service_url:
            return self._secrets
        return [tenant_secret(secret, tenant) for secret in self._secrets]

    async def _post(self, delivery: Delivery, rollout: Rollout) -> tuple[int | None, float, str]:
        """Status, seconds that the receiver asks to wait, and what went wrong."""
        body = message(rollout)
        headers = {"content-type": "application/json", "user-agent": "rollout-service"}
        secrets = self._secrets_for(delivery, rollout.tenant)
        headers |= signed_headers(secrets, rollout.id, int(time.time()), body)
        try:
            self._allowed.check_url(delivery.url)
            # A redirect could lead anywhere, so none is followed.
            post = self._http.post(delivery.url, data=body, headers=headers, allow_redirects=False)
            async with post as answer:
                return answer.status, _retry_after(answer.headers), f"HTTP {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return None, 0.0, _reason(error)


def _reason(error: BaseException) -> str:
    """What went wrong; aiohttp keeps a refusal by the resolver as the cause of its own error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AddressRefused):
        cause = cause.__cause__
    return str(cause) if cause else f"{type(error).__name__}: {error}"


def webhook_secrets(settings: Settings) -> list[str]:
    """The secrets to sign with, the newest first."""
    secrets = settings.webhook_secret.get_secret_value().split(",")
    return [secret.strip() for secret in secrets if secret.strip()]


def message(rollout: Rollout) -> bytes:
    """The body of a webhook."""
    envelope = {"type": EVENT, "timestamp": rollout.finished_at}
    # The rollout's own JSON goes in as it is: floats keep their digits.
    return json.dumps(envelope)[:-1].encode() + b', "data": ' + rollout.model_dump_json().encode() + b"}"


def _retry_after(headers: Any) -> float:
    text = headers.get("Retry-After", "")
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdigit() else 0.0
