"""What it costs that a power cut loses nothing: Redis with `appendfsync always` against `everysec`.

Rollouts go through their whole life in Redis (submitted, claimed and finished in three stages; no other
work): first by one caller at a time, for the time a submission takes to be answered, then by 32 at once, for
the rate. Turns of the two settings alternate on one server, whose file is in the directory given: measure on
the disk that matters. `fdatasync_ms` is what that disk takes for 4 KiB.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import harness
from rollout.schema import RolloutRequest, Stage, State, new_id
from services.settings import Settings
from services.state.redis import connect
from services.state.rollouts.store import Claim, Finish, NewRollout, RolloutStore

SETTINGS = ("everysec", "always")
CALLERS = 32
AFTER = {Stage.INIT: State.READY, Stage.RUN: State.EVALUATING, Stage.EVAL: State.COMPLETED}


class Lives:
    """Rollouts that go through a store."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._request = RolloutRequest(handler="noop")
        self._body = self._request.model_dump_json()

    def submit(self, rollout_id: str) -> None:
        """Put a rollout into the queue."""
        new = NewRollout(rollout_id, rollout_id, 0, self._request, self._body, "digest")
        assert self._store.submit([new]) == ["new"]

    def live(self, rollout_id: str) -> None:
        """Submit a rollout and take it through the three stages."""
        self.submit(rollout_id)
        for stage, after in AFTER.items():
            claim = self._store.claim(rollout_id, 1, stage, "worker")
            assert isinstance(claim, Claim), claim
            assert self._store.finish(claim, Finish(after)) == after

    def rate(self, count: int) -> float:
        """Whole lives a second, many at once."""
        ids = [new_id() for _ in range(count)]
        with ThreadPoolExecutor(CALLERS) as pool:
            return count / harness.timed(lambda: list(pool.map(self.live, ids)))


def main(options: harness.Options) -> harness.Report:
    submits: dict[str, list[float]] = {name: [] for name in SETTINGS}
    rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with harness.private_redis(options.directory) as server:
        lives = Lives(RolloutStore(connect(server.url), Settings(redis_url=server.url)))
        lives.rate(min(100, options.count))
        for number, name in harness.in_turns(SETTINGS, options.rounds):
            server.client.config_set("appendfsync", name)
            for _ in range(options.count // 5):
                submits[name].append(harness.timed(lambda: lives.submit(new_id())))
            rates[name].append(lives.rate(options.count))
            harness.say(f"round {number + 1}, {name}: {rates[name][-1]:.0f} lives/s")
        redis_ping_ms = harness.median_ms(server.client.ping, 200)
        with tempfile.TemporaryFile(dir=server.directory, buffering=0) as file:
            fdatasync_ms = harness.median_ms(
                lambda: (file.write(bytes(4096)), os.fdatasync(file.fileno())), 50
            )
    submit_ms = {name: harness.spread_ms(seconds) for name, seconds in submits.items()}
    return {
        "results": {
            "always_throughput_ratio": statistics.median(harness.ratios(rates["always"], rates["everysec"])),
            "always_submit_ratio": submit_ms["always"]["p50_ms"] / submit_ms["everysec"]["p50_ms"],
            "always_submit_ms": submit_ms["always"]["p50_ms"],
            "everysec_submit_ms": submit_ms["everysec"]["p50_ms"],
            "fdatasync_ms": fdatasync_ms,
        },
        "lives_per_s": {name: harness.summary(values) for name, values in rates.items()},
        "submit_ms": submit_ms,
        "redis_ping_ms": redis_ping_ms,
    }


if __name__ == "__main__":
    directory = {"type": Path, "help": "where Redis keeps its file; default: a temporary one"}
    harness.run(main, count=1000, rounds=5, directory=directory)
