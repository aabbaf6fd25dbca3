"""What the stages and the chores of a worker share: who it is, its stores, the way to the LLM servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import aiohttp
import redis
from celery import Celery

from rollout.schema import Stage
from sandbox.host_client import HostClient
from services.dispatch import Dispatcher
from services.settings import Settings
from services.state.backends.store import BackendStore, PlacementPolicy
from services.state.checkpoints import CheckpointStore
from services.state.fleet import FleetStore
from services.state.policy.store import PolicyStore
from services.state.redis import LoopConnection, connect
from services.state.rollouts.store import Claim, RolloutStore
from services.state.tenants import TenantStore
from services.state.together import Together
from services.state.turns.store import TurnStore
from workers.agent.llm import session
from workers.agent.placement import Placements, PromptSizes
from workers.agent.router import BackendRouter
from workers.agent.turns import TurnLog
from workers.handlers.registry import Registry
from workers.held import Held
from workers.metrics import WorkerMetrics
from workers.weights import LEASE_S, WeightUpdates


class WorkerServices:
    """The services of one worker process; a `workers.stage.StageServices`."""

    def __init__(self, app: Celery, settings: Settings, name: str, stages: list[Stage], slots: int) -> None:
        """
        Args:
            name: The worker's, as Celery knows it.
            slots: How many rollouts it carries at once.
        """
        self.app = app
        self.settings = settings
        self.name = name
        self.owner = f"{name}/{os.getpid()}"
        """Names this process in locks."""
        self.stages = stages
        self.slots = slots
        """Rollouts it carries at once now; `set_slots` changes it."""
        self.most_slots = slots
        self.held: dict[tuple[str, int], Held] = {}
        """(id, fence) → the rollouts in hand; `WorkerProcess` writes it."""
        self.loop = asyncio.new_event_loop()
        self.redis: redis.Redis = connect(settings.redis_url)
        self.store = RolloutStore(self.redis, settings, Together(self.redis))
        self.tenants = TenantStore(self.redis)
        placing = PlacementPolicy(settings.backend_load, settings.priority_step_s)
        self.backends = BackendStore(self.redis, placing)
        self.policy = PolicyStore(self.redis)
        lease_s = min(LEASE_S, settings.lease_s)
        self.weights = WeightUpdates(self.policy, self.backends, self.owner, lease_s=lease_s)
        self.fleet = FleetStore(self.redis)
        self.dispatcher = Dispatcher(app, self.store)
        self.handlers = Registry(settings)
        self.handler, self.tenant, self.note = self.handlers.of, self.tenants.get, self.store.note
        self.host = HostClient()
        self._connection = LoopConnection(settings.redis_url)
        self.placements = Placements(self.backends, self._connection)
        self._turns = TurnStore(self.redis)
        self.checkpoints = CheckpointStore(self.redis, settings)
        self.prompts = PromptSizes()
        self.metrics = WorkerMetrics(self.held.values)
        self._http: aiohttp.ClientSession | None = None

    def serves(self, stage: Stage) -> bool:
        """Whether the worker takes rollouts into this stage."""
        return stage in self.stages

    def announce(self) -> None:
        """Say that the worker lives, and what it carries.

        Raises:
            redis.RedisError: Redis is away.
        """
        node, held = self.settings.node, len(self.held)
        self.fleet.announce(self.name, self.stages, node, self.slots, most_slots=self.most_slots, held=held)

    # -- what a stage asks for -----------------------------------------------------------------

    def router(self, claim: Claim, policy: str | None = None, slot: str = "") -> BackendRouter:
        """What model calls go through, to another `policy` in a slot beside its own; made on the loop."""
        if self._http is None:
            self._http = session()
        return BackendRouter(
            claim.rollout_id,
            self.placements,
            self._http,
            fence=claim.fence,
            # Each tenant has its own groups: one of the same name elsewhere is another one.
            group_id=f"{claim.tenant}/{claim.group_id}" if claim.group_id != claim.rollout_id else None,
            # A pinned version is one of the rollout's own policy.
            policy_version=None if slot else claim.request.policy_version,
            wait_s=self.settings.backend_wait_s,
            policy=policy or claim.request.policy,
            tenant=claim.tenant,
            priority=claim.request.priority,
            slot=slot,
        )

    def turn_log(self, claim: Claim, held: Held) -> TurnLog:
        """Where RUN writes its turns; made on the event loop."""

        async def write(at: int, entries: Sequence[bytes]) -> dict[str, Any]:
            call = self._turns.append(claim.rollout_id, claim.attempt, claim.fence, at, entries)
            return await self.placements.send(call)

        return TurnLog(claim.turns, write, held)

    def other_nodes(self, rollout_id: str, stage: Stage = Stage.INIT) -> tuple[set[str], set[str]]:
        """The other nodes that do this stage now, and those of them that have not tried to start it.

        Raises:
            redis.RedisError: Redis is away.
        """
        nodes = {worker.node for worker in self.fleet.workers() if stage.value in worker.stages}
        nodes.discard(self.settings.node)
        return nodes, nodes - self.store.absent_on(rollout_id)

    async def close(self) -> None:
        """Let go of the connections to the LLM servers, and of those to Redis that the event loop has."""
        await self._connection.close()
        if self._http is not None:
            await self._http.close()
