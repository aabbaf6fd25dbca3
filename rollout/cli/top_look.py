"""What `rollout top` shows, asked through the HTTP API alone, and the rates between two looks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rollout.client import Client
from rollout.errors import ApiError
from rollout.schema import TERMINAL_STATES, Backend, Batch, Fleet, ResultPage, Rollout, State

WINDOW_S = 15.0
"""Rates are over so many seconds: steady enough to read, and the numbers of backends come every 5 s."""
RECENT = 50
"""Rollouts that ended, kept to be shown; a window has room for fewer."""
BATCHES = 20
EVERYBODY = "*"
FORBIDDEN = 403


@dataclass(frozen=True)
class Look:
    """The service at one moment, and what happened a second lately."""

    fleet: Fleet
    backends: list[Backend]
    batches: list[Batch]
    """The newest first."""
    recent: list[Rollout]
    """Summaries of what ended, the latest first."""
    tenant: str | None
    """Whose batches and rollouts these are; None = everybody's."""
    version: str
    flower: str | None
    stages_per_s: dict[str, float] = field(default_factory=dict)
    """Times that a stage ended a second, over all attempts; empty after the first look."""
    ended_per_s: dict[str, float] = field(default_factory=dict)
    """Rollouts that ended a second, by state."""
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    """Tokens that a backend sampled a second, where it says."""

    def to_json(self) -> dict[str, Any]:
        """For scripts; names are those of the API."""
        return {
            "at": self.fleet.at,
            "version": self.version,
            "tenant": self.tenant or EVERYBODY,
            "flower": self.flower,
            "fleet": self.fleet.model_dump(),
            "rates": {
                "stages": self.stages_per_s,
                "ended": self.ended_per_s,
                "tokens": self.tokens_per_s,
            },
            "backends": [one.model_dump() for one in self.backends],
            "batches": [one.model_dump(mode="json") for one in self.batches],
            "recent": [
                one.model_dump(mode="json", exclude={"request", "trajectory", "timeline", "notes"})
                for one in self.recent
            ],
        }


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
        backends = [Backend.model_validate(one) for one in status["backends"]]
        return Look(
            fleet=fleet,
            backends=backends,
            batches=batches,
            recent=list(self._recent),
            tenant=None if self._tenant else status["tenant"]["name"],
            version=status["version"],
            flower=(status.get("flower") or {}).get("url"),
            stages_per_s=self._stages.add(fleet.at, _stage_counts(fleet)),
            ended_per_s=self._ends.add(fleet.at, _end_counts(fleet)),
            tokens_per_s=self._sampled(backends),
        )

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
        known = {rollout.id for rollout in self._recent}
        self._recent.extendleft(rollout for rollout in page.rollouts if rollout.id not in known)

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


def _stage_counts(fleet: Fleet) -> dict[str, int]:
    return {name: load.ended for name, load in fleet.stages.items()}


def _end_counts(fleet: Fleet) -> dict[str, int]:
    return {state.value: fleet.states.get(state.value, 0) for state in State if state in TERMINAL_STATES}
