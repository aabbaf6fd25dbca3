"""Which backend serves a rollout: the pinned one, and another when that one fails."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import structlog

from rollout.schema import Backend, SamplingParams
from services.state.backends import BackendStore
from workers.agent.llm import BackendUnavailable, Completion, EngineClient
from workers.errors import InfrastructureError

log = structlog.get_logger("router")

ATTEMPTS = 4
"""Calls tried for one turn before the rollout is given up to its next attempt."""


class BackendRouter:
    """All calls of one rollout. The token buffer makes a retry elsewhere exact."""

    def __init__(
        self,
        rollout_id: str,
        policy_version: str | None,
        store: BackendStore,
        http: aiohttp.ClientSession,
    ) -> None:
        self._rollout_id = rollout_id
        self._policy_version = policy_version
        self._store = store
        self._http = http
        self.backend: Backend | None = None

    async def acquire(self, exclude: tuple[str, ...] = ()) -> Backend:
        """The rollout's backend; takes one and pins it if there is none yet.

        Raises:
            InfrastructureError: No backend fits.
        """
        # Redis may be slow to answer; the loop of all rollouts must not wait with us.
        self.backend = await asyncio.to_thread(
            self._store.acquire,
            self._rollout_id,
            policy_version=self._policy_version,
            exclude=exclude,
        )
        if self.backend is None:
            wanted = f" of policy version {self._policy_version!r}" if self._policy_version else ""
            raise InfrastructureError(
                f"no LLM backend{wanted} is usable; register one with POST /v1/backends"
            )
        return self.backend

    async def release(self) -> None:
        """Give the load back. Harmless without a backend."""
        if self.backend is not None:
            self.backend = None
            await asyncio.to_thread(self._store.release, self._rollout_id)

    async def generate(self, prompt: list[int], sampling: SamplingParams, **call: Any) -> Completion:
        """One call, retried on another backend (or, if it is the only one, on the same).

        Raises:
            ModelError: The engine refused the call; another one would as well.
            InfrastructureError: No backend gave an answer.
        """
        failed: tuple[str, ...] = ()
        last: BackendUnavailable | None = None
        for attempt in range(ATTEMPTS):
            backend = self.backend or await self.acquire()
            try:
                return await EngineClient(self._http, backend).generate(prompt, sampling, **call)
            except BackendUnavailable as error:
                last = error
                log.warning("model call failed", attempt=attempt + 1, error=str(error))
                failed = (*failed, backend.id)
            try:
                await self.acquire(exclude=failed)
            except InfrastructureError:
                failed, self.backend = (), None
                await asyncio.sleep(0.2 * 2**attempt)
        raise InfrastructureError(f"no backend answered after {ATTEMPTS} calls: {last}") from last
