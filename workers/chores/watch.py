"""Showing what the sandboxes of rollouts in RUN print, while somebody looks: gateways name whom they watch,
and each worker looks into its own. It is all beside the rollout, which nothing of this can fail."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass

from rollout.schema import Stage
from sandbox.errors import SandboxError
from sandbox.peek import Peek
from services.state import keys
from workers.chores.base import Chore
from workers.services import WorkerServices

LOOK_S = 0.1
"""Between two looks into a sandbox."""
WATCH_S = 12.0
"""So long after the last word of a gateway that somebody looks."""
ANSWER_S = 0.5
"""For a sandbox to answer; the others wait meanwhile."""


@dataclass
class Watched:
    """A sandbox that somebody looks into."""

    peek: Peek
    until: float = 0.0

    def look(self) -> list[dict]:
        """What it has printed since the last look. One that cannot tell is let go of."""
        try:
            return self.peek.look()
        except Exception:  # gone, slow, or its answer is none: the others are shown all the same
            self.until = 0.0
            return []


class Watch(Chore):
    """Publishes what is printed, for as long as a gateway asks."""

    name = "watch"
    stage = Stage.RUN
    interval_s = 3600.0
    channel = keys.WATCH_CHANNEL

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._rung = False
        self._watched: dict[tuple[str, int], Watched] = {}

    def ring(self) -> None:
        self._rung = True
        super().ring()

    def tick(self) -> float | None:
        held, now = self._services.held, time.monotonic()
        if self._rung:
            self._rung = False
            self._hear(now + WATCH_S)
        for place, watched in list(self._watched.items()):
            pieces = watched.look() if place in held else []
            if watched.until < now or place not in held:
                # What was read behind RUN's end may be of the scoring, and is nobody's to see.
                watched.peek.close()
                del self._watched[place]
                continue
            for piece in pieces:
                self._services.redis.publish(keys.live(place[0]), json.dumps(piece))
        return LOOK_S if self._watched else None

    def _hear(self, until: float) -> None:
        """Find out which of the rollouts in hand are watched."""
        client, in_hand = self._services.redis, list(self._services.held.items())
        in_run = [place for place, held in in_hand if held.stage is Stage.RUN]
        wanted = client.mget([keys.watched(rollout_id) for rollout_id, _ in in_run]) if in_run else []
        for place in (place for place, word in zip(in_run, wanted, strict=True) if word is not None):
            box = None if place in self._watched else client.hget(keys.record(place[0]), "sandbox")
            with suppress(SandboxError):
                if box is not None:
                    self._watched[place] = Watched(Peek(json.loads(box)["socket"], ANSWER_S))
            if place in self._watched:
                self._watched[place].until = until

    def close(self) -> None:
        for watched in self._watched.values():
            watched.peek.close()
