"""What `rollout top` shows, asked through the HTTP API alone, and the rates between two looks."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable

from pydantic import BaseModel

from rollout.client import Client
from rollout.errors import ApiError
from rollout.schema import Backend, Batch, Fleet, PolicyStatus, ResultPage, Rollout, State

WINDOW_S = 15.0
"""Rates are over so many seconds: steady enough to read, and the numbers of backends come every 5 s."""
RECENT = 50
"""Rollouts that ended, kept to be shown; a window has room for fewer."""
BATCHES = 20
WORKED_ON = (State.RUNNING, State.EVALUATING, State.INITIALIZING)
LIVE, GROUPS, MEMBERS = 20, 5, 64
"""At each look: rollouts of a state, groups, and rollouts of a group. Each brings its request, maybe long."""
EVERYBODY = "*"
FORBIDDEN, NOT_FOUND = 403, 404


class Progress(BaseModel):
    """How far a group is."""

    id: str
    size: int
    """Its rollouts, of which at most 64 are looked at."""
    ended: int
    reward: float | None
    """Mean of those scored so far; None = none is."""
    since: float
    """When the first was submitted, seconds since the epoch."""


class Look(BaseModel):
    """The service at one moment, and what happened a second lately; names are those of the API."""

    at: float
    """The gateway's clock, seconds since the epoch."""
    version: str
    tenant: str
    """Whose batches and rollouts these are; `*` = everybody's."""
    flower: str | None
    fleet: Fleet
    rates: dict[str, dict[str, float]]
    """A second, empty after the first look: `stages`, times that each ended, over all attempts; `ended`,
    rollouts by state; `tokens` that each backend sampled, where it says."""
    policies: list[PolicyStatus]
    backends: list[Backend]
    batches: list[Batch]
    """The newest first."""
    groups: list[Progress]
    """Of the groups with the most live rollouts, the largest first."""
    live: list[Rollout]
    """Summaries of what is worked on, by state, of each the newest first; a part where there are many."""
    recent: list[Rollout]
    """Summaries of what ended, the latest first."""


class Rates:
    """What a second brings of counts that only grow, over the latest `WINDOW_S`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, int]]] = deque()

    def add(self, at: float, counts: dict[str, int]) -> dict[str, float]:
        """The rates, once two moments are known."""
        if self._seen and any(counts.get(name, 0) < count for name, count in self._seen[-1][1].items()):
            self._seen.clear()  # another Redis, or an engine that was started anew
        if not self._seen or at > self._seen[-1][0]:
            self._seen.append((at, counts))
        while len(self._seen) > 2 and self._seen[1][0] <= at - WINDOW_S:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        if last <= first:
            return {}
        return {name: (count - before.get(name, 0)) / (last - first) for name, count in after.items()}


def mean_reward(rollouts: Iterable[Rollout]) -> float | None:
    """Of those that were scored and are not dropped; None = none is."""
    rewards = [item.reward for item in rollouts if item.reward is not None and not item.drop]
    return sum(rewards) / len(rewards) if rewards else None


class Watcher:
    """Looks at a service again and again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tenant: str | None = EVERYBODY
        self._cursor: str | None = None
        self._recent: deque[Rollout] = deque(maxlen=RECENT)
        self._stages, self._ends = Rates(), Rates()
        self._tokens: dict[str, Rates] = {}

    def look(self) -> Look:
        """Ask for everything.

        Raises:
            Unavailable: The gateway, or its Redis, does not answer; a later look may find it again.
            ApiError: It refuses; the message says why.
        """
        fleet = self._client.fleet()
        status = self._client.status()
        try:
            batches = self._client.batches.list(BATCHES, tenant=self._tenant)
        except ApiError as error:
            if error.status != FORBIDDEN or self._tenant is None:
                raise
            # A key without the scope admin sees its own tenant.
            self._tenant = None
            batches = self._client.batches.list(BATCHES)
        self._follow()
        live = [
            rollout
            for state in WORKED_ON
            if fleet.states.get(state)
            for rollout in self._client.list(state=state, limit=LIVE, tenant=self._tenant).rollouts
        ]
        backends = [Backend.model_validate(backend) for backend in status["backends"]]
        stages = {name: load.ended for name, load in fleet.stages.items()}
        ended = {state: count for state, count in fleet.states.items() if State(state).terminal}
        return Look(
            at=fleet.at,
            version=status["version"],
            tenant=self._tenant or status["tenant"]["name"],
            flower=(status.get("flower") or {}).get("url"),
            fleet=fleet,
            rates={
                "stages": self._stages.add(fleet.at, stages),
                "ended": self._ends.add(fleet.at, ended),
                "tokens": self._sampled(backends),
            },
            policies=self._policies(),
            backends=backends,
            batches=batches,
            groups=self._progress(live),
            live=live,
            recent=list(self._recent),
        )

    def _policies(self) -> list[PolicyStatus]:
        try:
            return self._client.policies()
        except ApiError as error:
            if error.status != NOT_FOUND:  # a gateway of the release before knows one
                raise
            return []

    def _progress(self, live: list[Rollout]) -> list[Progress]:
        """Of groups, single rollouts left out."""
        groups = []
        counts = Counter((item.tenant, item.group_id) for item in live)
        for tenant, name in sorted(counts, key=lambda group: -counts[group])[:GROUPS]:
            whose = self._tenant and tenant
            members = self._client.list(group_id=name, limit=MEMBERS, tenant=whose).rollouts
            if len(members) > 1:
                groups.append(
                    Progress(
                        id=name,
                        size=len(members),
                        ended=sum(item.state.terminal for item in members),
                        reward=mean_reward(members),
                        since=min(item.created_at for item in members),
                    )
                )
        return groups

    def _results(self, cursor: str) -> ResultPage:
        return self._client.results(cursor, limit=RECENT, include="summary", tenant=self._tenant)

    def _follow(self) -> None:
        """Add what ended since the last look."""
        if self._cursor is None:
            # Where to follow from is asked first, so that nothing falls between.
            self._cursor = self._results("$").cursor
            newest = self._client.list(limit=RECENT, tenant=self._tenant).rollouts
            ended = [rollout for rollout in newest if rollout.finished_at is not None]
            self._recent.extend(sorted(ended, key=lambda rollout: -(rollout.finished_at or 0.0)))
            return
        page = self._results(self._cursor)
        # Where more ended than anybody reads, go on from now.
        self._cursor = self._results("$").cursor if len(page.rollouts) == RECENT else page.cursor
        listed = {rollout.id for rollout in self._recent}
        self._recent.extendleft(rollout for rollout in page.rollouts if rollout.id not in listed)

    def _sampled(self, backends: list[Backend]) -> dict[str, float]:
        """Tokens a second, of the backends that say how many they have sampled."""
        sampled: dict[str, float] = {}
        for backend in backends:
            stats = backend.stats
            if stats is None or stats.generation_tokens is None:
                continue
            rates = self._tokens.setdefault(backend.id, Rates())
            latest = rates.add(stats.at, {backend.id: stats.generation_tokens})
            # An engine that was not probed for long says nothing of now.
            if time.time() - stats.at < 2 * WINDOW_S:
                sampled |= latest
        return sampled
