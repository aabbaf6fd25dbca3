"""Workers of RUN that end under a rollout, without a process: what their leases come to."""

from __future__ import annotations

import redis

from rollout.schema import HandlerInfo, RolloutRequest, Stage, State
from services.state import keys
from services.state.fleet import FleetStore
from services.state.rollouts.store import Claim, Finish, NewRollout, RolloutStore
from services.state.turns.store import TurnStore


class DyingFleet:
    """Workers of RUN that end whenever they carry the poison, over and over."""

    def __init__(self, client: redis.Redis, store: RolloutStore, repeatable: bool = False) -> None:
        """`repeatable`: the handler lets another worker go on with each stage."""
        self.client, self.store = client, store
        stages = list(Stage) if repeatable else []
        FleetStore(client).put_handlers([HandlerInfo(name="noop", repeatable=stages)])
        self.number = 0
        self.worker = "run0"

    def submit(self, *ids, **limits):
        request = RolloutRequest(handler="noop", limits=limits)
        body = request.model_dump_json()
        self.store.submit([NewRollout(id_, id_, 0, request, body, "digest") for id_ in ids])

    def claim(self, rollout_id, stage):
        attempt = self.store.get(rollout_id).attempt
        if stage is Stage.INIT:
            return self.store.claim(rollout_id, attempt, stage, "init@n")
        return self.store.claim(rollout_id, attempt, stage, self.worker)

    def carry(self, ids):
        """All that can be carried into RUN by the one worker there is."""
        held = []
        for rollout_id in ids:
            if self.store.get(rollout_id).state is State.QUEUED:
                claim = self.claim(rollout_id, Stage.INIT)
                assert isinstance(claim, Claim), claim
                assert self.store.finish(claim, Finish(State.READY)) == State.READY
            claim = self.claim(rollout_id, Stage.RUN)
            if isinstance(claim, Claim):
                held.append(claim)
            else:
                assert claim == "crowded"
        return held

    def turn(self, claim):
        """One more turn of a rollout is written."""
        place = self.client.llen(keys.turns(claim.rollout_id, claim.attempt))
        operations, ask = TurnStore(self.client).append(
            claim.rollout_id, claim.attempt, claim.fence, place, [b"turn"]
        )
        assert operations.send(ask) == {"word": "ok"}

    def die(self):
        """SIGKILL: the leases of all that it held run out."""
        for rollout_id in self.client.zrange(keys.by_state("running"), 0, -1):
            self.client.hset(keys.record(rollout_id), "lease", 0)
            self.client.zadd(keys.DUE, {rollout_id: 0})
        self.store.overdue(1000)
        self.number += 1
        self.worker = f"run{self.number}"

    def live_out(self, poison, neighbours):
        """Rounds of carrying until everything has ended; how often a worker ended."""
        everybody = [poison, *neighbours]
        for _ in range(50):
            live = [rollout_id for rollout_id in everybody if not self.store.get(rollout_id).state.terminal]
            if not live:
                return self.number
            held = self.carry(live)
            if any(claim.rollout_id == poison for claim in held):
                self.die()
                continue
            for claim in held:
                assert self.store.finish(claim, Finish(State.EVALUATING)) == State.EVALUATING
                claim = self.claim(claim.rollout_id, Stage.EVAL)
                assert self.store.finish(claim, Finish(State.COMPLETED, {"reward": "1.0"})) == State.COMPLETED
        raise AssertionError("it never ends")
