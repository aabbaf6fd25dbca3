"""Engines as the autoscaler sees them: what is reserved on LLM servers, what waits for room there, and the
jobs that carry them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import redis
from pydantic_core import from_json

from rollout.schema import Backend
from rollout.schema.base import DEFAULT_POLICY
from services.autoscale.policy import NodeState, Waiting, engine_need
from services.launch.slurm.plan import ENGINE
from services.launch.slurm.stack import SlurmStack
from services.state import keys
from services.state.backends.store import BackendStore
from services.state.policy.store import PolicyStore

NAME = "engines"
"""Of the kind of capacity, and of the reason why what waits for INIT and RUN asks for no node."""


def name_of(policy: str) -> str:
    """What a policy's engines are called in logs and metrics."""
    return NAME if policy == DEFAULT_POLICY else f"{NAME}/{policy}"


def waiting_for_room(client: redis.Redis) -> dict[str, Waiting]:
    """What waits in line for room on LLM servers, by policy."""
    waiting: defaultdict[str, Waiting] = defaultdict(Waiting)
    for raw in client.hvals(keys.BACKEND_ASKS):
        tokens, _, ask = raw.partition(" ")
        policy = from_json(ask).get("policy", DEFAULT_POLICY)
        its = waiting[policy]
        waiting[policy] = Waiting(its.rollouts + 1, its.tokens + float(tokens))
    return dict(waiting)


@dataclass(frozen=True)
class LlmLoad:
    """What the LLM servers hold and what waits for them."""

    backends: Sequence[Backend]
    """Those that take rollouts: healthy and not draining."""
    waiting: Mapping[str, Waiting]
    """Policy → what waits for room on its servers."""
    updating: frozenset[str] = frozenset()
    """Policies whose weights are being exchanged."""
    refused: bool = False
    """A rollout of some policy, which no server could take, was refused a moment ago; it is not in line."""

    @property
    def share(self) -> float:
        """Share of what RUN holds that is of policies for which something waits: more of it would wait."""
        waiting = sum(its.rollouts for its in self.waiting.values())
        full = sum(its.live_rollouts for its in self.backends if self.waiting.keys() & its.served.keys())
        held = sum(its.live_rollouts for its in self.backends) + waiting
        return (full + waiting) / held if waiting else float(self.refused and not self.backends)


def llm_load(client: redis.Redis) -> LlmLoad:
    """What LLM servers hold, and what waits for them; RedisError if Redis is away."""
    backends, policies = BackendStore(client).list(), PolicyStore(client)
    served = {policy for backend in backends for policy in backend.served}
    updating = frozenset(policy for policy in served if policies.under_way(policy))
    usable = [backend for backend in backends if backend.healthy and not backend.draining]
    return LlmLoad(usable, waiting_for_room(client), updating, bool(client.exists(keys.BACKEND_WAITED)))


@dataclass(frozen=True)
class EngineState:
    """Engine jobs of a policy, and the servers that have its rollouts."""

    nodes: NodeState
    own: Sequence[Backend]
    """Of those jobs."""
    others: Sequence[Backend]
    held: Mapping[str, int] = field(default_factory=dict)
    """Job that serves → what is reserved there."""

    def needed(self, policy: str, llm: LlmLoad, admit: float) -> tuple[int, int, str] | None:
        """Jobs that there should be, how many have to stay, and why, by all that their servers serve.

        None while weights are exchanged there: what would be placed waits for that, and the next look is the
        truth.
        """
        served = {policy}.union(*(backend.served for backend in self.own))
        if llm.updating & served:
            return None
        waits = [llm.waiting[name] for name in served & llm.waiting.keys()]
        waiting = Waiting(sum(its.rollouts for its in waits), sum(its.tokens for its in waits))
        each = max(1.0, len(self.own) / max(1, self.nodes.up))
        held = sum(backend.live_rollouts for backend in self.own)
        why = f"{waiting.rollouts} rollouts with {waiting.tokens:.0f} tokens wait for room, {held} are placed"
        needed, in_use = engine_need(self.own, self.others, waiting, admit, each)
        least = int(llm.refused and not self.others)
        return max(needed, least), max(in_use, least), why


class SlurmEngines:
    """Engine jobs of the service in a run directory; SlurmError as of `SlurmNodes`."""

    def __init__(self, stack: SlurmStack, grace_s: float) -> None:
        """`grace_s`: for the rollouts of a drained engine, before they move to others."""
        self._stack, self._grace_s = stack, grace_s

    def look(self, policy: str, llm: LlmLoad) -> EngineState:
        """The jobs of a policy, those on their way included, those on their way out not."""
        jobs = self._stack.active(ENGINE, [policy])
        others = {backend.id: backend for backend in llm.backends if policy in backend.served}
        own, held = [], {}
        for member in (job.member for job in jobs if job.member):
            if servers := [others.pop(name) for name in member.backends if name in others]:
                own += servers
                held[member.name] = round(sum(1 + server.load for server in servers))
        nodes = NodeState(len(held), len(jobs) - len(held), {NAME: 1})
        return EngineState(nodes, own, [*others.values()], held)

    def set(self, policy: str, target: int, held: Mapping[str, int]) -> None:
        """Have so many jobs. Those that serve nobody yet go first, then those with the least reserved.

        Each is drained: its rollouts end there, or move to others after the grace.
        """
        self._stack.scale(target, [policy], ENGINE, self._grace_s, held)
