"""What the workers announce of themselves: that they live, and which handlers they carry."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import redis

from rollout.schema import HandlerInfo
from rollout.schema.fleet import WorkerLoad
from services.broker import binding_keys
from services.queues import EVAL, RUN, STAGES, queue_for
from services.state import keys
from services.state.redis import now
from services.state.scripts import Operations

ANNOUNCE_EVERY_S = 5.0
ALIVE_S = 3 * ANNOUNCE_EVERY_S
"""A worker not heard of for so long does not count as ready."""


STOP_REASONS = ("disk", "memory")
"""What a node may be short of, as `sandbox.room` has it."""


@dataclass(frozen=True)
class NodeAdmission:
    """Whether INIT takes rollouts on a node, as its INIT workers see it."""

    stopped: dict[str, str]
    """`disk` or `memory` → a sentence that says what is short; empty while there is room."""
    full: bool
    """Whether INIT is far enough ahead of RUN."""
    ahead: int
    """Rollouts of the node between the start of INIT and RUN."""
    most_ahead: int
    """Their bound."""
    free_disk: int
    """Bytes left where the node's sandboxes write."""
    free_memory: int
    """Bytes that the node, or the job's cgroup, can still give."""


class FleetStore:
    """Live workers by stage, and the registry of handlers."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._do = Operations(client, "fleet")

    def announce(
        self,
        worker: str,
        stages: Iterable[str],
        node: str = "",
        slots: int = 0,
        *,
        most_slots: int | None = None,
        held: int = 0,
    ) -> None:
        """Say that a worker lives, and where, with how many slots; call it every `ANNOUNCE_EVERY_S`.

        Args:
            most_slots: What `set_slots` may give it; None = as many as it has.
            held: Rollouts that it works on.
        """
        most = slots if most_slots is None else most_slots
        self._do("announce", worker=worker, forget_s=100 * ALIVE_S, stages=list(stages))
        self._say(keys.FLEET_SLOTS, worker, {"node": node, "slots": slots, "most": most, "held": held})

    def _say(self, place: str, name: str, what: dict[str, Any]) -> None:
        """Keep what somebody said with Redis' time, by which all ages are told."""
        self._do("say", place=place, name=name, fields=json.dumps(what))

    def leave(self, worker: str) -> None:
        """Take a worker that stops off the list."""
        with self._redis.pipeline(transaction=False) as pipe:
            for stage in STAGES:
                pipe.zrem(keys.workers(stage), worker)
            pipe.hdel(keys.FLEET_SLOTS, worker)
            pipe.execute()

    def alive(self) -> dict[str, list[str]]:
        """Names of the live workers of each stage."""
        since = now(self._redis) - ALIVE_S
        with self._redis.pipeline(transaction=False) as pipe:
            for stage in STAGES:
                pipe.zrangebyscore(keys.workers(stage), since, "+inf")
            return dict(zip(STAGES, pipe.execute(), strict=True))

    def workers(self) -> list[WorkerLoad]:
        """Every live worker that has said how many slots it has, by name."""
        stages: dict[str, list[str]] = {}
        for stage, names in self.alive().items():
            for name in names:
                stages.setdefault(name, []).append(stage)
        announced = self._redis.hgetall(keys.FLEET_SLOTS)
        notes = {name: json.loads(announced[name]) for name in stages if name in announced}
        return [
            WorkerLoad(
                name=name,
                node=note["node"],
                stages=stages[name],
                slots=note["slots"],
                slots_limit=note["most"],
                busy=note["held"],
            )
            for name, note in sorted(notes.items())
        ]

    def run_slots(self, node: str) -> tuple[int, int]:
        """How many rollouts the live RUN workers of a node carry at once, and those of all nodes."""
        running = [worker for worker in self.workers() if RUN in worker.stages]
        here = sum(worker.slots for worker in running if worker.node == node)
        return here, sum(worker.slots for worker in running)

    def put_admission(self, node: str, admission: NodeAdmission) -> None:
        """Say whether INIT takes rollouts on a node; at every change, and every `ANNOUNCE_EVERY_S`."""
        self._say(keys.FLEET_ADMISSION, node, asdict(admission))

    def admissions(self) -> dict[str, NodeAdmission]:
        """Whether INIT takes rollouts, by node; of the nodes whose INIT workers were heard of lately."""
        since = now(self._redis) - ALIVE_S
        notes = {node: json.loads(raw) for node, raw in self._redis.hgetall(keys.FLEET_ADMISSION).items()}
        return {
            node: NodeAdmission(**note) for node, note in sorted(notes.items()) if note.pop("at") >= since
        }

    def put_node(self, node: str, sandboxes: dict[str, Any]) -> None:
        """Pass on what a node's sandbox host says of itself (`HostClient.stats`)."""
        self._say(keys.NODES, node, {"sandboxes": sandboxes})

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the sandbox hosts said of themselves, of each node heard of lately."""
        since = now(self._redis) - ALIVE_S
        notes = {name: json.loads(raw) for name, raw in self._redis.hgetall(keys.NODES).items()}
        return {name: note["sandboxes"] for name, note in sorted(notes.items()) if note["at"] >= since}

    def lost_nodes(self, silent_s: float) -> list[str]:
        """Nodes with a sandbox host of which no worker has said anything in so many seconds.

        One that was silent for a hundred times as long is forgotten.
        """
        at = now(self._redis)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.NODES)
            pipe.hgetall(keys.FLEET_SLOTS)
            hosts, workers = pipe.execute()
        heard_at = {node: json.loads(raw)["at"] for node, raw in hosts.items()}
        # A host may be silent, or slow, on a node whose workers are well.
        for note in map(json.loads, workers.values()):
            if note["node"] in heard_at:
                heard_at[note["node"]] = max(heard_at[note["node"]], note["at"])
        if old := [node for node, spoke in heard_at.items() if spoke < at - 100 * silent_s]:
            self.forget_nodes(old)
        return sorted(node for node, spoke in heard_at.items() if spoke < at - silent_s)

    def forget_nodes(self, nodes: Iterable[str]) -> None:
        """Take nodes off the list whose workers have ended, with their queues."""
        if not (gone := list(nodes)):
            return
        queues = [queue_for(stage, node) for node in gone for stage in (RUN, EVAL)]
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hdel(keys.NODES, *gone)
            pipe.hdel(keys.FLEET_ADMISSION, *gone)
            # And what kombu knows of the queues, or they would be listed for ever.
            pipe.delete(*queues, *binding_keys(queues))
            pipe.execute()

    def put_handlers(self, handlers: Iterable[HandlerInfo]) -> None:
        """Announce handlers; a name announced before gets its newest description."""
        infos = {info.name: info for info in handlers}
        if infos:
            repeatable = {name: " ".join(info.repeatable) for name, info in infos.items()}
            self._redis.hset(keys.HANDLERS, mapping={name: i.model_dump_json() for name, i in infos.items()})
            self._redis.hset(keys.HANDLERS_REPEATABLE, mapping=repeatable)

    def put_filters(self, names: Iterable[str]) -> None:
        """Announce filters of batches."""
        if filters := list(names):
            self._redis.sadd(keys.FILTERS, *filters)

    def filters(self) -> list[str]:
        """Every filter that some worker has announced."""
        return sorted(self._redis.smembers(keys.FILTERS))

    def handlers(self) -> dict[str, HandlerInfo]:
        """Every handler that some worker has announced since Redis was set up."""
        stored = self._redis.hgetall(keys.HANDLERS)
        return {name: HandlerInfo.model_validate(json.loads(raw)) for name, raw in sorted(stored.items())}
