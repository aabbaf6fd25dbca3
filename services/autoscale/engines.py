"""Engines as the autoscaler sees them: what is reserved on LLM servers, what waits for room there, and the
jobs that carry them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import redis

from rollout.schema import Backend, State
from rollout.schema.base import DEFAULT_POLICY
from services.autoscale.policy import NodeState, Server, Waiting, engine_need
from services.launch.slurm.plan import ENGINE
from services.launch.slurm.stack import SlurmStack
from services.state import keys
from services.state.backends.store import BackendStore, PlacementPolicy
from services.state.policy.store import PolicyStore

NAME = "engines"
"""Of the kind of capacity, and of the reason why what waits for INIT and RUN asks for no node."""


def name_of(policy: str) -> str:
    """What a policy's engines are called in logs and metrics."""
    return NAME if policy == DEFAULT_POLICY else f"{NAME}/{policy}"


def waiting_for_room(client: redis.Redis) -> dict[str, Waiting]:
    """What waits for room on LLM servers, by policy: rollouts in RUN that have no placement, once one was
    refused. Each is taken to want as much as those that have one."""
    with client.pipeline(transaction=False) as pipe:
        pipe.exists(keys.BACKEND_WAITED)
        pipe.hget(keys.COUNTS, State.RUNNING)
        pipe.hvals(keys.BACKEND_PINS)
        waited, running, pins = pipe.execute()
    if not waited or (rollouts := int(running or 0) - len(pins)) <= 0:
        return {}
    reserved = sum(float(pin.split()[1]) for pin in pins)
    return {DEFAULT_POLICY: Waiting(rollouts, rollouts * reserved / max(1, len(pins)))}


@dataclass(frozen=True)
class LlmLoad:
    """What the LLM servers hold and what waits for them."""

    backends: list[Backend]
    """Those that take rollouts: healthy and not draining."""
    waiting: Mapping[str, Waiting]
    """Policy → what waits for room on its servers."""
    updating: frozenset[str] = frozenset()
    """Policies whose weights are being exchanged."""

    @property
    def share(self) -> float:
        """Share of what RUN holds that is of policies for which something waits: more of it would wait."""
        waiting = sum(its.rollouts for its in self.waiting.values())
        short = {policy for policy, its in self.waiting.items() if its.rollouts}
        full = sum(backend.live_rollouts for backend in self.backends if short & backend.served.keys())
        held = sum(backend.live_rollouts for backend in self.backends) + waiting
        return (full + waiting) / held if waiting else 0.0


@dataclass(frozen=True)
class EngineState:
    """Engine jobs of a policy, and the servers that have its rollouts."""

    nodes: NodeState
    own: list[Backend]
    """Of those jobs."""
    others: list[Backend]

    def needed(
        self, policy: str, llm: LlmLoad, kinds: Collection[str], placement: PlacementPolicy
    ) -> tuple[int, int, Waiting]:
        """Jobs that there should be, how many of them have to stay, and what waits for them.

        Args:
            kinds: Policies with engines of their own: what waits for them counts there alone.
        """
        served = {policy}.union(*(backend.served for backend in self.own)) - (set(kinds) - {policy})
        waiting = sum((llm.waiting.get(name, Waiting()) for name in served), Waiting())
        own, others = ([_server(backend, placement) for backend in some] for some in (self.own, self.others))
        needed, in_use = engine_need(own, others, waiting, max(1.0, len(own) / max(1, self.nodes.up)))
        # The last one is nobody's to take from what waits, whatever the bounds are.
        return needed, max(in_use, int(waiting.rollouts > 0)), waiting


def _server(backend: Backend, placement: PlacementPolicy) -> Server:
    capacity = backend.capacity_tokens if placement.weigh == "tokens" else None
    room = placement.admit * capacity if capacity else None
    stats = backend.stats
    of_its_own = (stats.running, stats.waiting, stats.kv_usage) if stats else (None, None, None)
    return Server(backend.load, room, backend.live_rollouts, backend.max_rollouts, *of_its_own)


class LlmObserver:
    """Looks at the LLM servers of a service."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._backends, self._policies = BackendStore(client), PolicyStore(client)

    def look(self) -> LlmLoad:
        """What they hold, and what waits for them; RedisError if Redis is away."""
        backends = self._backends.list()
        served = {policy for backend in backends for policy in backend.served}
        updating = (policy for policy in served if self._under_way(policy))
        usable = [backend for backend in backends if backend.healthy and not backend.draining]
        return LlmLoad(usable, waiting_for_room(self._redis), frozenset(updating))

    def _under_way(self, policy: str) -> bool:
        return policy == DEFAULT_POLICY and self._policies.under_way()


class SlurmEngines:
    """Engine jobs of the service in a run directory; SlurmError as of `SlurmNodes`."""

    def __init__(self, stack: SlurmStack, grace_s: float) -> None:
        self._stack, self._grace_s = stack, grace_s

    def look(self, policy: str, llm: LlmLoad) -> EngineState:
        """The jobs of a policy, those on their way included, those on their way out not."""
        jobs = self._stack.active(ENGINE, [policy])
        serving = {backend.id: backend for backend in llm.backends if policy in backend.served}
        members = [job.member for job in jobs if job.member is not None]
        own = {name for member in members for name in member.backends if name in serving}
        up = sum(not own.isdisjoint(member.backends) for member in members)
        return EngineState(
            NodeState(up, len(jobs) - up, {NAME: 1}),
            [backend for name, backend in serving.items() if name in own],
            [backend for name, backend in serving.items() if name not in own],
        )

    def set(self, policy: str, target: int, llm: LlmLoad) -> None:
        """Have so many jobs. Those that serve nobody yet go first, then those with the least reserved.

        Each is drained: its rollouts end there, or move to others after the grace.
        """
        loads = {backend.id: backend.load for backend in llm.backends}
        jobs = self._stack.active(ENGINE, [policy])
        held = {
            job.member.name: round(sum(1 + loads[name] for name in job.member.backends if name in loads))
            for job in jobs
            if job.member is not None
        }
        self._stack.scale(target, [policy], ENGINE, self._grace_s, held)
