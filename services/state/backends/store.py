"""LLM backends: who they are, how loaded they are, and which rollout is pinned to which.

Each policy has a heap, the sorted set `backends:load` of `default` and `backends/NAME:load` of another. Its
scores are what live rollouts reserve, so they are true whatever crashed: a reservation is made, extended and
given back by one script each, belongs to the lease of its rollout, and goes when that does. Who finds no room
waits in line (`waiting.lua`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import redis

from rollout.schema import Backend, BackendStats
from rollout.schema.base import DEFAULT_POLICY
from services.state import keys
from services.state.backends.reading import LIVE_FIELDS, described, fleet, verdict_of
from services.state.scripts import Call, Operations, request, send_many
from services.state.tenants import DEFAULT_TENANT


@dataclass(frozen=True)
class PlacementPolicy:
    """How rollouts are spread. The defaults are the ones that `benchmarks/routing.py` was run with."""

    weigh: Literal["tokens", "rollouts"] = "tokens"
    """A rollout's share of the score: its reserved context tokens, or 1 (plain in-flight counting)."""
    priority_step_s: float = 600.0
    """Seconds of waiting for room that one step of priority is worth."""
    admit: float = 0.75
    """New rollouts wait when a backend's reservations would pass this multiple of its key-value cache; the
    rest is what live rollouts still grow by."""
    group_slack: float = 8.0
    """A group's backend is preferred while it is at most so many such rollouts above the least loaded one."""
    spill_at: float = 1.0
    """A rollout may move when its backend's reservations pass this multiple of its cache …"""
    spill_to: float = 0.85
    """… to one that stays below this multiple of its own …"""
    spill_gap: int = 2
    """… and has so many rollouts fewer."""


@dataclass(frozen=True)
class Placed:
    """Where a rollout's calls go."""

    word: Literal["ok", "full", "none", "lost"]
    """`full`: all that fit are at capacity, so the rollout waits in line; it asks again when it is told, or
    after a while. `none`: none is healthy, unpaused and of the wanted version. `lost`: the rollout is not the
    caller's any more."""
    backend: Backend | None
    why: str
    """With `ok`: `group`, `spill`, `failover` or empty. Else what is in the way, as `2 full, 1 unhealthy`."""

    @property
    def moved(self) -> bool:
        """The rollout was on another backend before."""
        return self.why in ("spill", "failover")


@dataclass(frozen=True)
class Corrections:
    """What `reconcile` found wrong. All zero in a service that lost nothing."""

    reclaimed: int
    """Reservations of rollouts that nobody runs."""
    restored: int
    """Reservations that Redis had lost, made again from the records of live rollouts."""
    corrected: int
    """Backends whose counters were not the sum of their reservations."""


class BackendStore:
    """The heap of backends in Redis. Every change is one script: no crash leaves half of it."""

    def __init__(self, client: redis.Redis, policy: PlacementPolicy | None = None) -> None:
        self._redis = client
        self._policy = policy or PlacementPolicy()
        self._do = Operations(client, "backends/backends")
        self._place = Operations(client, "backends/placement")
        self._upkeep = Operations(client, "backends/upkeep")

    @staticmethod
    def id_of(url: str) -> str:
        """The id a URL gets when its owner names none: registering twice is harmless."""
        return "b-" + hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:10]

    # -- the fleet ---------------------------------------------------------------------------

    def put(self, backend: Backend, *, drain: bool = False) -> Backend:
        """Add a backend, or replace its description; load, drain and pause stay, an error is forgotten.

        Args:
            drain: It takes no new rollouts from the first moment on; False = as before.
        """
        served = [*backend.served]
        versions = {served[0]: backend.policy_version} | backend.versions
        self._do(
            "put",
            backend=backend.id,
            described=backend.model_dump_json(exclude=LIVE_FIELDS),
            capacity=backend.capacity_tokens or 0,
            most=backend.max_rollouts or 0,
            policies=served,
            versions={policy: versions.get(policy) or "" for policy in served},
            rejected=backend.rejected,
            drain=drain,
        )
        return self.get(backend.id) or backend

    def remove(self, backend_id: str) -> bool:
        """Forget a backend. Its rollouts move to others at their next call. False: there was none."""
        return self._do("remove", backend=backend_id)

    def get(self, backend_id: str, policy: str | None = None) -> Backend | None:
        """One backend, or None; as it serves a policy, where one is named."""
        return next(iter(fleet(self._redis, policy, backend_id)), None)

    def list(self, policy: str | None = None) -> list[Backend]:
        """All backends, or those of a policy as they serve it, the least loaded first."""
        return fleet(self._redis, policy)

    def _set(self, backend_id: str, field: str, value: str) -> bool:
        return self._do("set", backend=backend_id, field=field, value=value)

    def drain(self, backend_id: str, drain: bool = True) -> bool:
        """Let a backend take no new rollouts, or again some. False: no such backend (also below)."""
        return self._set(backend_id, "draining", "1" if drain else "")

    def pause(self, backend_id: str) -> bool:
        """No new rollouts while its weights are exchanged."""
        return self._set(backend_id, "paused", "1")

    def resume(self, backend_id: str) -> bool:
        """The end of `pause`."""
        return self._set(backend_id, "paused", "")

    def fail(
        self,
        backend_id: str,
        error: str,
        *,
        by: Literal["health", "weights"] = "weights",
        policy: str = DEFAULT_POLICY,
    ) -> bool:
        """Say why a backend cannot be used. Its rollouts move; workers with calls to it are told at once.

        Args:
            by: Whose verdict it is: a health probe's, or a weight update's. Each recovers on its own.
            policy: Whose weights are wrong. Calls of other policies go on.
        """
        known = self._set(backend_id, verdict_of(by, policy), error or "unknown")
        if known:
            backend = self.get(backend_id)
            alone = by == "health" or backend is None or [*backend.served] == [DEFAULT_POLICY]
            self._redis.publish(keys.BACKEND_DOWN_CHANNEL, backend_id if alone else f"{backend_id} {policy}")
        return known

    def recover(
        self, backend_id: str, *, by: Literal["health", "weights"] = "weights", policy: str = DEFAULT_POLICY
    ) -> bool:
        """The end of `fail` by the same."""
        return self._set(backend_id, verdict_of(by, policy), "")

    def set_version(self, backend_id: str, version: str | None, policy: str = DEFAULT_POLICY) -> bool:
        """Note which weights of a policy a backend serves."""
        return self._set(backend_id, f"version{keys.of(policy)}", version or "")

    def put_stats(self, backend_id: str, stats: BackendStats) -> bool:
        """Note what a backend's own metrics say."""
        return self._set(backend_id, "stats", stats.model_dump_json())

    def suspect(self, backend_id: str) -> None:
        """Have a backend probed at once: a call to it failed."""
        self._do("suspect", backend=backend_id)

    def take_suspects(self) -> dict[str, int]:
        """Those entered since this was asked last, with their number of failed calls."""
        return self._do("suspects")

    def want_version(self, version: str | None, policy: str = DEFAULT_POLICY) -> None:
        """Let only backends with these weights take new rollouts of a policy; None = any."""
        self._do("want", policy=policy, version=version)

    def wanted_version(self, policy: str = DEFAULT_POLICY) -> str | None:
        """What `want_version` said last."""
        return self._redis.get(keys.backends_version(keys.of(policy)))

    def knows_version(self, version: str | None, policy: str = DEFAULT_POLICY) -> bool:
        """Whether an update has brought weights of this version of the policy to the fleet."""
        known = keys.policy_sequence(keys.of(policy))
        return version is not None and self._redis.zscore(known, version) is not None

    # -- rollouts ----------------------------------------------------------------------------

    def acquire(
        self,
        rollout_id: str,
        *,
        group: str | None = None,
        priority: int = 0,
        process: str | None = None,
        **options: Any,
    ) -> Call:
        """For `many`: the pinned backend, else the group's, else the least loaded that may take the rollout.

        Args:
            group: Rollouts that share a prompt; they share a backend until it is loaded.
            priority: Higher goes first among the tenant's waiting rollouts; waiting lifts the others in time.
            process: That is told when the rollout has got room (`keys.room_of`).
            policy: Only backends that serve it.
            tenant: Whose rollout it is: tenants that wait for room get it by their weights.
            slot: Names a further reservation of the same rollout, such as for calls to another policy.
            tokens: Context that the rollout is expected to need; 1 if nothing is said.
            fence: Of the caller's claim, so that a stalled worker cannot reserve for a rollout it lost;
                None = unchecked.
            policy_version: Only backends with these weights; None = those that the fleet wants.
            exclude: Ids not to be used, because they just failed this rollout.
        """
        policy = self._policy
        admit = policy.admit if policy.weigh == "tokens" else None
        more = {
            "group": group or "-",
            "admit": admit,
            "group_slack": policy.group_slack,
            "lift": int(1000 * priority * policy.priority_step_s),
            "process": process,
        }
        return self._call("acquire", rollout_id, more, **options)

    def extend(self, rollout_id: str, tokens: int, **options: Any) -> Call:
        """For `many`: set what a rollout reserves, before each call; the answer may be another backend.

        A rollout under way is never refused for want of room. It moves when its backend is gone, unhealthy or
        excluded, and when that one is over its capacity while another has room. Without a place to move to
        the answer is `none` and the reservation stays.

        Args:
            tokens: Context now, the call's own room included.
            options: `policy`, `tenant`, `slot`, `fence`, `policy_version` and `exclude`, as for `acquire`.
        """
        policy = self._policy
        more = {
            "limited": policy.weigh == "tokens",
            "spill_at": policy.spill_at,
            "spill_to": policy.spill_to,
            "spill_gap": policy.spill_gap,
        }
        return self._call("extend", rollout_id, more, tokens=tokens, **options)

    def release(self, rollout_id: str, slot: str = "") -> Call:
        """For `many`: give the rollout's reservation back, or its place in line. False: there was none."""
        return self._place, request("release", rollout=rollout_id, slot=slot or None)

    def _call(
        self,
        operation: str,
        rollout_id: str,
        more: dict[str, Any],
        *,
        policy: str = DEFAULT_POLICY,
        tenant: str = DEFAULT_TENANT,
        slot: str = "",
        tokens: int = 1,
        fence: int | None = None,
        policy_version: str | None = None,
        exclude: tuple[str, ...] = (),
    ) -> Call:
        return self._place, request(
            operation,
            rollout=rollout_id,
            slot=slot or None,
            policy=None if policy == DEFAULT_POLICY else policy,
            tenant=None if tenant == DEFAULT_TENANT else tenant,
            fence=None if fence is None else str(fence),
            weight=max(1, int(tokens)) if self._policy.weigh == "tokens" else 1,
            version=policy_version or None,
            exclude=exclude,
            **more,
        )

    def many(self, calls: list[Call]) -> list[Any]:
        """Answers to several of these calls, and to others', in one round trip, in order (see `placed`)."""
        return send_many(self._redis, calls)

    # -- upkeep ------------------------------------------------------------------------------

    def reconcile(self) -> Corrections:
        """Make the counters what the live rollouts say. Cheap enough for every half minute."""
        return Corrections(**self._upkeep("reconcile"))

    def totals(self) -> dict[str, int]:
        """Sums for /metrics: `placed`, `placed_group`, `moved_spill`, `moved_failover`, `refused_full` …"""
        return {name: int(value) for name, value in self._redis.hgetall(keys.BACKEND_TOTALS).items()}


def placed(answer: dict[str, str] | Exception) -> Placed:
    """The answer to `acquire` and `extend`.

    Raises:
        redis.ResponseError: It is an error.
    """
    if isinstance(answer, Exception):
        raise answer
    backend = None
    if "backend" in answer:
        policy, version = answer.get("policy", DEFAULT_POLICY), answer["version"] or None
        # Only of this policy: what the others have may have changed since.
        known = described(answer["described"]).model_copy(update={"versions": {policy: version}})
        backend = known.of(policy)
    return Placed(answer["word"], backend, answer["why"])  # type: ignore[arg-type]
