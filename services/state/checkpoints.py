"""Checkpoints: what is kept of a rollout's turns, and what a fork of it is given."""

from __future__ import annotations

import redis
from pydantic import Field

from rollout.schema import Checkpoint, Origin
from rollout.schema.trajectory import Branch, Trajectory
from services.settings import Settings
from services.state import keys
from services.state.scripts import Operations
from services.state.turns import store as turns
from services.state.turns.entries import Answered, Sampled, decode, encode


class Kept(Checkpoint):
    """A checkpoint, with what carrying out a fork takes."""

    attempt: int
    """Whose turn log it is."""
    entries: int
    """So many of the log's are shared."""
    operations: int = 0
    """Numbered ones that the sandbox had done."""
    snapshot: str | None = None
    """Name of the files in the store of `node`; None = there are none, or they were not kept."""
    image: str | None = None
    """Of the sandbox."""
    counts: dict[str, float] = Field(default_factory=dict)
    """What the agent loop had counted."""


class CheckpointStore:
    """The checkpoints of rollouts. They expire with the record, and so do the turn logs that go with them."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        self._turns = turns.TurnStore(client)
        self._do = Operations(client, "checkpoints", RETENTION_MS=int(settings.retention_s * 1000))

    def put(self, rollout_id: str, kept: Kept, fence: int) -> bool:
        """Keep one, in place of an earlier one of the same turn. False: the rollout is not ours any more."""
        return self._do(
            "keep_checkpoint", kept.model_dump_json(), rollout=rollout_id, fence=fence, turn=kept.turn
        )

    def get(self, rollout_id: str, turn: int, tenant: str | None = None) -> Kept | None:
        """That of a turn; None: there is none, or not any more, or the rollout is another tenant's by now."""
        owner = self._redis.hget(keys.record(rollout_id), "tenant") if tenant else None
        if owner not in (None, tenant):
            return None
        stored = self._redis.hget(keys.checkpoints(rollout_id), str(turn))
        return Kept.model_validate_json(stored) if stored else None

    def list(self, rollout_id: str) -> list[Kept]:
        """All, by turn."""
        stored = self._redis.hvals(keys.checkpoints(rollout_id))
        return sorted(map(Kept.model_validate_json, stored), key=lambda kept: kept.turn)

    def files_suffice(self, rollout_id: str) -> bool:
        """Whether INIT of a rollout has not said that of its task processes count."""
        return self._redis.hget(keys.record(rollout_id), "survives") != "nothing"

    def hold(self, rollout_id: str, attempt: int, until: float) -> bool:
        """Have the checkpoints and the turn log of that attempt live at least until then (s, Redis' clock):
        forks wait. False: one of them is not there any more.
        """
        ends = int(until * 1000)
        return self._do("hold_checkpoints", rollout=rollout_id, attempt=attempt, ends=ends)

    def copy_turns(self, kept: Kept, origin: Origin, rollout_id: str, attempt: int, fence: int) -> bool:
        """Begin the turn log of a fork with what it shares; its time and calls are the other one's.

        False: the checkpoint is not there any more, or is another one by now.
        """
        entries = decode(turns.read(self._redis, origin.rollout, kept.attempt)[: kept.entries])
        if len(entries) < kept.entries or self.get(origin.rollout, origin.turn) != kept:
            return False
        for entry in entries:
            if isinstance(entry, Sampled):
                entry.spent_s, entry.routed_experts = 0.0, None
            if isinstance(entry, Sampled | Answered):
                entry.call = None
        do, ask = self._turns.append(rollout_id, attempt, fence, 0, [*map(encode, entries)])
        do.send(ask)  # to whom it is lost, the end of INIT says so
        return True


def given(trajectory: Trajectory, origin: Origin) -> Branch:
    """Make the first turns of a fork's trajectory what they are to it: shared, and not sampled here.

    A chain in which nothing else was sampled is not to be learned from.
    """
    branch = Branch(rollout=origin.rollout, turn=origin.turn, tokens=0, sampled_tokens=0)
    calls = dict.fromkeys(s.call_id for chain in trajectory.own for s in chain.segments if s.sampled)
    shared = set(list(calls)[: origin.turn])
    own = False
    for chain in trajectory.own:
        for segment in chain.segments:
            own |= segment.sampled and segment.call_id not in shared
            if own:
                break
            branch.tokens += len(segment.token_ids)
            if segment.sampled:
                branch.sampled_tokens += len(segment.token_ids)
                version = segment.policy_version
                if version is not None and version not in branch.policy_versions:
                    branch.policy_versions.append(version)
                segment.sampled, segment.call_id, segment.finish_reason = False, None, None
                segment.logprobs = segment.policy_version = segment.routed_experts = None
        if not own:
            chain.trained = False
    trajectory.branch = branch
    return branch
