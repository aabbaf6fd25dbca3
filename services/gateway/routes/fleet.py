"""`GET /v1/fleet`: workers, nodes and stages, for `rollout top` and whoever else watches without Redis."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flask import Blueprint

from rollout.schema import State
from rollout.schema.fleet import Fleet, NodeLoad, StageLoad, WorkerLoad
from services.gateway.context import Gateway, gateway
from services.gateway.http import operation
from services.queues import EVAL, INIT, RUN, STAGES
from services.state.api_keys import SHARED
from services.state.fleet import NodeAdmission
from services.state.observations import Ages, stage_totals

blueprint = Blueprint("fleet", __name__, url_prefix="/v1")


@blueprint.get("/fleet")
@operation(scope=SHARED)
def fleet() -> Fleet:
    """Workers, nodes and stages of the whole service, with what they carry."""
    return current(gateway())


def current(gate: Gateway) -> Fleet:
    """The fleet as it is now."""
    workers, totals = gate.fleet.workers(), gate.rollouts.totals()
    ages, states = gate.observations.ages(), gate.rollouts.counts()
    ended = stage_totals(gate.observations.histograms())
    return Fleet(
        at=time.time(),
        states=states,
        stages={stage: _stage(stage, workers, ended, ages, states) for stage in STAGES},
        workers=workers,
        nodes=_nodes(workers, gate.fleet.nodes(), gate.fleet.admissions()),
        oldest_s=dict(ages.oldest),
        reaper_lag_s=ages.reaper_lag,
        leases_lost=sum(count for name, count in totals.items() if name.startswith("lost_")),
    )


def _stage(
    stage: str,
    workers: Sequence[WorkerLoad],
    ended: Mapping[str, tuple[float, int]],
    ages: Ages,
    states: Mapping[str, int],
) -> StageLoad:
    serving = [worker for worker in workers if stage in worker.stages]
    busy = ages.leases[stage]
    waiting = {
        INIT: states.get(State.QUEUED, 0),
        RUN: states.get(State.READY, 0),
        # EVAL has no state of its own for waiting.
        EVAL: max(0, states.get(State.EVALUATING, 0) - busy),
    }[stage]
    seconds, count = ended.get(stage, (0.0, 0))
    return StageLoad(
        workers=len(serving),
        slots=sum(worker.slots for worker in serving),
        busy=busy,
        waiting=waiting,
        ended=count,
        seconds=seconds,
    )


def _nodes(
    workers: Sequence[WorkerLoad],
    hosts: Mapping[str, Mapping[str, Any]],
    admissions: Mapping[str, NodeAdmission],
) -> list[NodeLoad]:
    nodes = []
    for name in sorted({worker.node for worker in workers} | set(hosts) | set(admissions)):
        local = [worker for worker in workers if worker.node == name]
        node = NodeLoad(
            node=name,
            stages=[stage for stage in STAGES if any(stage in worker.stages for worker in local)],
            slots=sum(worker.slots for worker in local),
            busy=sum(worker.busy for worker in local),
        )
        if host := hosts.get(name):
            node.sandboxes, node.warm = host.get("claimed", 0), host.get("warm", 0)
        if admission := admissions.get(name):
            node.free_disk, node.free_memory = admission.free_disk, admission.free_memory
            node.stopped, node.waits_for_run = list(admission.stopped.values()), admission.full
        nodes.append(node)
    return nodes
