"""What the autoscaler sees: the load of each stage, from Redis."""

from __future__ import annotations

from collections.abc import Mapping

import redis

from rollout.schema import State
from services.autoscale.policy import INIT, STAGES, Load
from services.state import keys
from services.state.fleet import FleetStore, NodeAdmission, Worker
from services.state.observations import Observations, stage_totals

WAITS_IN = {"init": State.QUEUED, "run": State.READY, "eval": State.EVALUATING}
"""In the last one rollouts also are while they are worked on; those have an owner."""
WORKED_ON_IN = {"init": State.INITIALIZING, "run": State.RUNNING}
LOOKED_AT = 100
"""Rollouts of a stage, the oldest by submission, among which the one that has waited longest is sought."""
SMOOTHING = 0.3
"""Weight of what ended since the last look, in the mean time of a stage."""


class Observer:
    """Looks at the service again and again; times of stages are those of what ended in between."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._fleet = FleetStore(client)
        self._observations = Observations(client)
        self._ended: dict[str, tuple[float, int]] = {}
        self._service_s: dict[str, float] = {}

    def look(self) -> tuple[dict[str, Load], list[Worker]]:
        """The load of each stage, and the live workers.

        Raises:
            redis.RedisError: Redis is away.
        """
        workers = self._fleet.workers()
        admissions = self._fleet.admissions()
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.COUNTS)
            pipe.time()
            counts, (seconds, micros) = pipe.execute()
        scoring = self._observations.ages().leases["eval"]
        self._measure(stage_totals(self._observations.histograms()))
        now_ms = seconds * 1000 + micros / 1000
        waiting = {stage: int(counts.get(state, 0)) for stage, state in WAITS_IN.items()}
        waiting["eval"] = max(0, waiting["eval"] - scoring)
        busy = {stage: int(counts.get(state, 0)) for stage, state in WORKED_ON_IN.items()} | {"eval": scoring}
        loads = {
            stage: Load(
                waiting=waiting[stage],
                oldest_s=self._oldest_s(stage, now_ms) if waiting[stage] else 0.0,
                busy=busy[stage],
                slots=_slots(stage, workers, admissions),
                service_s=self._service_s.get(stage),
                blocked=stage == INIT and _waits_for_run(admissions),
            )
            for stage in STAGES
        }
        return loads, workers

    def _measure(self, ended: Mapping[str, tuple[float, int]]) -> None:
        """Mean seconds at work of the stages that ended since the last look, smoothed."""
        for stage in STAGES:
            (seconds, count), (seconds_before, before) = (
                totals.get(stage, (0.0, 0)) for totals in (ended, self._ended)
            )
            if count > before:
                mean = (seconds - seconds_before) / (count - before)
                known = self._service_s.get(stage, mean)
                self._service_s[stage] = known + SMOOTHING * (mean - known)
        self._ended = dict(ended)

    def _oldest_s(self, stage: str, now_ms: float) -> float:
        ids = self._redis.zrange(keys.by_state(WAITS_IN[stage]), 0, LOOKED_AT - 1)
        with self._redis.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(keys.record(rollout_id), "since", "owner")
            waits = [now_ms - int(since) for since, owner in pipe.execute() if since and not owner]
        return max(waits, default=0.0) / 1000


def _waits_for_run(admissions: Mapping[str, NodeAdmission]) -> bool:
    """Whether INIT is far enough ahead of RUN on every node that has room."""
    able = [one for one in admissions.values() if not one.stopped]
    return bool(able) and all(one.full for one in able)


def _slots(stage: str, workers: list[Worker], admissions: Mapping[str, NodeAdmission]) -> int:
    """Of the live workers; INIT's only where the node is not short of disk or memory."""
    stopped = {node for node, one in admissions.items() if one.stopped} if stage == INIT else set()
    return sum(one.slots for one in workers if stage in one.stages and one.node not in stopped)
