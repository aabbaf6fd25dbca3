"""Which backend serves a rollout: the pinned one, and another when that one fails or is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol

import aiohttp
import structlog

from rollout.schema import Backend
from rollout.schema.base import DEFAULT_POLICY
from services.engines.base import Completion, SampleRequest
from services.state.backends.store import Placed
from services.state.tenants import DEFAULT_TENANT
from workers.agent.llm import BackendUnavailable, BrokenCall, EngineClient
from workers.agent.pieces import Pieces, Watch
from workers.agent.placement import Placements
from workers.errors import InfrastructureError, ModelError

log = structlog.get_logger("router")

MIN_ATTEMPTS = 4
"""Calls tried for one turn before the attempt may fail, however long each of them took."""
MAX_PAUSE_S = 5.0
"""The longest pause between two calls of one turn, when no other backend is left to try."""


class RolloutLost(InfrastructureError):
    """Another worker holds the rollout, or nobody does."""


class Router(Protocol):
    """What all model calls of one rollout go through: a `BackendRouter`, or what stands in for it."""

    backend: Backend | None
    """The one that serves it now."""
    accepts: Callable[[Backend], Awaitable[str | None]] | None
    """Says why a backend cannot continue the ids so far; None = it can. Set by the agent loop."""
    metrics: dict[str, float]

    async def acquire(self, tokens: int = 1) -> Backend: ...
    async def generate(self, request: SampleRequest, timeout_s: float) -> Completion: ...
    async def release(self) -> None: ...


@dataclass(eq=False)
class BackendRouter:
    """All calls of one rollout. The token buffer makes a retry exact: a broken call adds nothing to it."""

    rollout_id: str
    placements: Placements
    http: aiohttp.ClientSession
    _: KW_ONLY
    fence: int | None = None
    group_id: str | None = None
    policy_version: str | None = None
    """Where the rollout may start; one under way goes on at any version."""
    wait_s: float = 120.0
    """Seconds to wait, at the start or within a turn, while no backend is usable."""
    policy: str = DEFAULT_POLICY
    """As `BackendStore.acquire` has it, and so are tenant, priority and slot."""
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    slot: str = ""
    accepts: Callable[[Backend], Awaitable[str | None]] | None = field(default=None, init=False)
    backend: Backend | None = field(default=None, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    _asked: bool = field(default=False, init=False)
    _reserved: int = field(default=1, init=False)
    _foreign: tuple[str, ...] = field(default=(), init=False)
    """Backends that cannot take the rollout over."""

    async def acquire(self, tokens: int = 1) -> Backend:
        """The rollout's backend; waits for one that has room and pins the rollout to it.

        Args:
            tokens: Context that the rollout is expected to need.

        Raises:
            InfrastructureError: No backend became usable within `wait_s`, or the rollout is lost.
        """
        if self.backend is not None:
            return self.backend
        self._asked, self._reserved = True, max(1, tokens)
        started = time.monotonic()
        unusable_since: float | None = None
        with self.placements.waiting(self.rollout_id, self.slot) as granted:
            while True:
                changed = self.placements.changed
                granted.clear()
                placed = await self._ask()
                if placed.word == "ok":
                    self.metrics["backend_wait_s"] = round(time.monotonic() - started, 3)
                    return self._take(placed)
                if placed.word == "lost":
                    raise self._lost()
                if placed.word == "full":
                    # It is in line now, and is told when it has got room.
                    unusable_since, changed = None, granted
                else:
                    unusable_since = unusable_since or self.placements.clock()
                    if self.placements.clock() - unusable_since >= self.wait_s:
                        raise self._none_usable(placed.why)
                await self.placements.change(changed)

    async def _ask(self) -> Placed:
        return await self.placements.acquire(
            self.rollout_id,
            tokens=self._reserved,
            fence=self.fence,
            group=self.group_id,
            policy_version=self.policy_version,
            policy=self.policy,
            tenant=self.tenant,
            priority=self.priority,
            slot=self.slot,
        )

    async def release(self) -> None:
        """Give the reservation back. Harmless without one."""
        if self._asked:
            # Also when no answer was seen: the reservation of a cancelled acquire may have been made.
            self._asked, self.backend = False, None
            await self.placements.release(self.rollout_id, self.slot)

    async def generate(
        self, request: SampleRequest, timeout_s: float, watch: Watch | None = None
    ) -> Completion:
        """One call; retried on another backend, or on the same while there is no other.

        Args:
            timeout_s: Of each try.
            watch: Is told the ids as they are sampled; those of an engine that does not stream at the end. A
                call that breaks off goes on from the ids it has, and the answer is its pieces joined.

        Raises:
            ModelError: The engine refused the call, or every answer broke the contract; trying again would
                not help.
            InfrastructureError: No backend gave an answer.
            BrokenCall: Ids that `watch` was told do not count: what came with them broke the contract, or
                their weights were wrong. Somebody has seen them, so the call is not made elsewhere.
        """
        failed: tuple[str, ...] = ()
        attempts, trouble_since, last = 0, None, None
        pieces = Pieces(request)
        while True:
            backend = await self._extend(len(pieces.rest.prompt), failed)
            if backend is not None:
                client = EngineClient(self.http, backend)
                try:
                    return pieces.joined(await self._call(client, pieces.rest, timeout_s, watch))
                except BackendUnavailable as error:
                    last = error
                if piece := await self._piece(client, last):
                    if answer := pieces.add(piece, backend):
                        return answer
                    attempts, trouble_since = 0, None
                attempts += 1
                self._count("failed_calls")
                log.warning(
                    "model call failed",
                    kept=0 if piece is None else len(piece.token_ids),
                    rollout_id=self.rollout_id,
                    backend=backend.id,
                    attempt=attempts,
                    error=str(last),
                )
            trouble_since = trouble_since or self.placements.clock()
            # Whoever ends every call by itself is no better than one that fails it.
            if backend is not None and not (last.aborted and attempts < MIN_ATTEMPTS):
                failed = (*failed, backend.id)
                if not last.after_s:
                    await self.placements.suspect(backend.id)
                continue
            # None: every backend has failed this turn or is down, so begin again with the pinned one.
            # Aborted: the engine lives and says so (a weight update); the prefix is cached there, so stay.
            failed = ()
            waited = self.placements.clock() - trouble_since
            over = waited >= self.wait_s and (backend is None or attempts >= MIN_ATTEMPTS)
            if isinstance(last, BrokenCall) and (over or attempts >= MIN_ATTEMPTS):
                raise ModelError(f"{attempts} answers could not be used; the last: {last}") from last
            if over:
                raise InfrastructureError(
                    f"no backend answered for {waited:.0f} s, {attempts} calls failed; the last: {last}"
                ) from last
            pause_s = min(0.1 * 2 ** min(attempts, 6), MAX_PAUSE_S)
            await asyncio.sleep(max(pause_s, last.after_s if last else 0))

    async def _call(
        self, client: EngineClient, request: SampleRequest, timeout_s: float, watch: Watch | None
    ) -> Completion:
        backend = client.backend
        call = asyncio.ensure_future(client.generate(request, timeout_s, watch))
        self.placements.watch(backend.id, call, backend.policy)
        try:
            completion = await call
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise BackendUnavailable(f"backend {backend.id} was found unusable during the call") from None
        finally:
            call.cancel()
        await self._trust(backend, completion)
        if watch is not None and not client.partial.token_ids:
            watch(completion.token_ids)
        return completion

    async def _piece(self, client: EngineClient, why: BackendUnavailable) -> Completion | None:
        """What a watched call told before it failed; None = nothing. Raises as `generate` does."""
        backend = client.backend
        try:
            if (piece := client.cut()) is None:
                return None
            if isinstance(why, BrokenCall):
                raise why
            if piece.spans[0][0] is not None:
                await self._trust(backend, piece)
                return piece
            # Nobody said which weights they are from; a call that was ended for new ones had the old.
            if (kept := await self.placements.kept(backend)) is False:
                raise BackendUnavailable(f"backend {backend.id}: its weights turned out to be wrong")
            version = backend.policy_version if kept or why.aborted else None
            return replace(piece, spans=[(version, 0, len(piece.token_ids))])
        except BackendUnavailable as error:
            await self.placements.suspect(backend.id)
            raise BrokenCall(f"ids that were passed on do not count: {error}") from error

    async def _trust(self, backend: Backend, completion: Completion) -> None:
        # Weights that came during the call: an engine samples from them before the canary has passed. And
        # none that the service does not know of: they would pass for another policy's samples.
        for version in dict.fromkeys(version for version, _, _ in completion.spans):
            if backend.policy_version in (None, version):
                continue
            if not await self.placements.trusted(backend.id, version, backend.policy):
                raise BackendUnavailable(f"backend {backend.id}: weights {version!r} turned out to be wrong")

    async def _extend(self, context: int, failed: tuple[str, ...]) -> Backend | None:
        """Reserve what the call needs; the backend to use, or None when every one has failed."""
        self._reserved = max(1, context)
        while True:
            placed = await self.placements.extend(
                self.rollout_id,
                self._reserved,
                fence=self.fence,
                policy_version=self.policy_version,
                exclude=(*failed, *self._foreign),
                policy=self.policy,
                tenant=self.tenant,
                slot=self.slot,
            )
            if placed.word == "lost":
                raise self._lost()
            if placed.backend is None:
                return None
            same = self.backend is not None and self.backend.id == placed.backend.id
            why_not = None if same or self.accepts is None else await self.accepts(placed.backend)
            if why_not is None:
                return self._take(placed)
            log.warning(
                "backend cannot take the rollout over",
                rollout_id=self.rollout_id,
                backend=placed.backend.id,
                why=why_not,
            )
            self._foreign = (*self._foreign, placed.backend.id)

    def _take(self, placed: Placed) -> Backend:
        if placed.moved:
            self._count(f"moved_{placed.why}")
            log.info("rollout moved", rollout_id=self.rollout_id, backend=placed.backend.id, why=placed.why)
        self.backend = placed.backend
        return placed.backend

    def _count(self, name: str) -> None:
        self.metrics[name] = self.metrics.get(name, 0) + 1

    def _lost(self) -> RolloutLost:
        return RolloutLost(f"rollout {self.rollout_id} is not this worker's any more")

    def _none_usable(self, why: str) -> InfrastructureError:
        version = f" of policy version {self.policy_version!r}" if self.policy_version else ""
        if self.policy != DEFAULT_POLICY:
            version = f" of policy {self.policy!r}{version and f', version {self.policy_version!r},'}"
        if not why:
            why = f"no backend serves policy {self.policy!r}"
        return InfrastructureError(
            f"no LLM backend{version} was usable for {self.wait_s:g} s ({why}); register "
            "one with POST /v1/backends, or see GET /v1/backends for what ails them (`version`: it lacks the "
            "current weights; where nobody can bring them any more, `rollout policy forget`)"
        )
