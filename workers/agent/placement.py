"""The heap of backends as a worker's event loop uses it: many rollouts, few round trips.

A worker carries hundreds of rollouts; what they ask for while a round trip is under way shares the next one.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from contextvars import Context
from typing import Any

import redis
from pydantic_core import from_json

from rollout.schema import Backend
from rollout.schema.base import DEFAULT_POLICY
from rollout.trajectory import Trajectory
from services.state.backends.store import BackendStore, Placed, placed
from services.state.redis import LoopConnection
from services.state.scripts import Call, commands
from workers.agent.room import Room
from workers.patience import ask, stopped

MAX_BATCH = 256
"""Calls in one round trip; Redis serves nobody else meanwhile (about 40 µs a call)."""
CHARACTERS_PER_TOKEN = 4
SHARE_OF_THE_NEWEST = 0.1
EXCHANGE_POLL_S = 0.02
"""A canary takes about as long; only calls that end while one runs ask so often."""
OUTAGE_S = 1.0
"""A round trip takes a millisecond; what takes longer than this is no round trip."""


class PromptSizes:
    """How long the first prompts of a handler are: what a rollout reserves before its own is rendered."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def expected(self, handler: str, task: dict[str, Any]) -> int:
        """Tokens. Before the first one was seen, guessed from the size of the task."""
        return round(self._mean.get(handler) or len(json.dumps(task)) / CHARACTERS_PER_TOKEN) + 1

    def seen(self, handler: str, trajectory: Trajectory) -> None:
        """Learn from a rollout; one without a model call teaches nothing."""
        if trajectory.chains and trajectory.chains[0].segments:
            tokens = len(trajectory.chains[0].segments[0].token_ids)
            mean = self._mean.get(handler, tokens)
            self._mean[handler] = mean + SHARE_OF_THE_NEWEST * (tokens - mean)


class Placements(Room):
    """The backends that the rollouts of a worker's event loop are on, by Redis. Call it on that loop only."""

    def __init__(self, store: BackendStore, connection: LoopConnection | None = None) -> None:
        """`connection`: saves the way through a thread; None = there is none."""
        super().__init__()
        self._store = store
        self._connection = connection
        self._queue: list[tuple[Call, asyncio.Future[Any]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._calls: dict[str, dict[asyncio.Task[Any], str]] = {}
        """Calls under way to a backend, with their policies."""
        self._away_s = 0.0

    async def acquire(self, rollout_id: str, **options: Any) -> Placed:
        """See `BackendStore.acquire`."""
        return placed(await self._ask(self._store.acquire(rollout_id, process=self.process, **options)))

    async def extend(self, rollout_id: str, tokens: int, **options: Any) -> Placed:
        """See `BackendStore.extend`."""
        return placed(await self._ask(self._store.extend(rollout_id, tokens, **options)))

    async def release(self, rollout_id: str, slot: str = "") -> bool:
        """See `BackendStore.release`."""
        return bool(await self._ask(self._store.release(rollout_id, slot)))

    async def send(self, call: Call, patient: bool = True) -> Any:
        """Another store's call, in one round trip with the placements that are asked for meanwhile.

        Args:
            patient: Whether a Redis that is full is waited for.
        """
        try:
            return await self._ask(call)
        except redis.RedisError:
            if not patient:
                raise
            return await ask(call[0].send, call[1])

    async def suspect(self, backend_id: str) -> None:
        """Have a backend probed at once, because a call to it failed."""
        await ask(self._store.suspect, backend_id)

    async def trusted(self, backend_id: str, version: str | None, policy: str = DEFAULT_POLICY) -> bool:
        """Whether tokens that a backend sampled from these weights count. Waits while they are exchanged.

        They do where it is known to serve them, or did: a long call may see several updates. A label that
        nobody knows is a server that was started anew, and is probed, or one that lies.
        """
        while (backend := await ask(self._store.get, backend_id, policy)) is not None and backend.paused:
            await asyncio.sleep(EXCHANGE_POLL_S)
        if backend is None or backend.policy_version == version:
            return backend is not None and policy not in backend.rejected
        return backend.healthy and await ask(self._store.knows_version, version, policy)

    async def kept(self, backend: Backend) -> bool | None:
        """Whether a backend has sampled from no other weights than it had when it was placed.

        Waits while they are exchanged. None: it got others meanwhile. False: the ones it got may be wrong.
        """
        exchanged = False
        while (now := await ask(self._store.get, backend.id, backend.policy)) is not None and now.paused:
            exchanged = True
            await asyncio.sleep(EXCHANGE_POLL_S)
        # Who died during an exchange did not pass its canary.
        if now is not None and not now.healthy and (now.reachable or exchanged):
            return False
        return True if now is not None and now.policy_version == backend.policy_version else None

    def clock(self) -> float:
        """Monotonic seconds without those of Redis' outages: nobody hears of a usable backend then."""
        return time.monotonic() - self._away_s

    # -- calls under way ---------------------------------------------------------------------

    def watch(self, backend_id: str, call: asyncio.Task[Any], policy: str = DEFAULT_POLICY) -> None:
        """Enter a call, so that `down` can end it."""
        calls = self._calls.setdefault(backend_id, {})
        calls[call] = policy
        call.add_done_callback(lambda done: calls.pop(done, None))

    def down(self, message: str) -> None:
        """Give up calls that would hang or count for nothing: `<backend>`, or `<backend> <policy>` alone."""
        backend_id, _, policy = message.partition(" ")
        for call, its in [*self._calls.get(backend_id, {}).items()]:
            if policy in ("", its):
                call.cancel()

    # -- round trips -------------------------------------------------------------------------

    async def _ask(self, call: Call) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((call, answer))
        if self._flushing is None or self._flushing.done():
            # In no rollout's context: it serves many.
            self._flushing = asyncio.create_task(self._flush(), context=Context())
        with stopped():
            return await answer

    async def _flush(self) -> None:
        while self._queue:
            batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
            began = time.monotonic()
            try:
                replies = await self._round_trip([call for call, _ in batch])
            except Exception as error:
                replies = [error] * len(batch)
            if (taken := time.monotonic() - began) > OUTAGE_S:
                self._away_s += taken
            for (_, answer), reply in zip(batch, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)

    async def _round_trip(self, calls: list[Call]) -> list[Any]:
        if self._connection is not None:
            with suppress(redis.RedisError, TimeoutError):
                return [from_json(reply) for reply in await self._connection.send(commands(calls))]
        # All of it again, and with patience: each may be done twice.
        return await ask(self._store.many, calls)
