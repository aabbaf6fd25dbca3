"""What it costs that a power cut loses nothing: Redis with `appendfsync always` against `everysec`.

Rollouts go through their whole life in Redis (submitted, claimed and finished in three stages; no other
work): first by one caller at a time, for the time a submission takes to be answered, then by 32 at once, for
the rate. Turns of the two settings alternate on one server, whose file is in the directory given: measure on
the disk that matters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks._harness import report, summary
from benchmarks._latency import end_in_order_on_sigterm, private_directory, say, spread_ms
from rollout.schema import RolloutRequest, Stage, State, new_id
from services.settings import Settings
from services.state.redis import connect
from services.state.rollouts import Claim, Finish, NewRollout, RolloutStore
from tests.helpers.stack import RedisServer

SETTINGS = ("everysec", "always")
CALLERS = 32
AFTER = {Stage.INIT: State.READY, Stage.RUN: State.EVALUATING, Stage.EVAL: State.COMPLETED}


class Lives:
    """Rollouts that go through a store."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._request = RolloutRequest(handler="noop")
        self._body = self._request.model_dump_json()

    def submit(self, rollout_id: str) -> float:
        """Seconds until it was answered."""
        began = time.perf_counter()
        new = NewRollout(rollout_id, rollout_id, 0, self._request, self._body, "digest")
        assert self._store.submit([new]) == ["new"]
        return time.perf_counter() - began

    def live(self, rollout_id: str) -> None:
        """The three stages."""
        for stage, after in AFTER.items():
            claim = self._store.claim(rollout_id, 1, stage, "worker")
            assert isinstance(claim, Claim), claim
            assert self._store.finish(claim, Finish(after)) == after

    def rate(self, count: int) -> float:
        """Whole lives a second, many at once."""
        ids = [new_id() for _ in range(count)]
        began = time.perf_counter()
        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(lambda one: (self.submit(one), self.live(one)), ids))
        return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="rollouts a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each setting")
    parser.add_argument("--directory", type=Path, help="where Redis keeps its file; default: a temporary one")
    options = parser.parse_args()
    end_in_order_on_sigterm()
    submits: dict[str, list[float]] = {name: [] for name in SETTINGS}
    rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with private_directory() as directory:
        server = RedisServer(options.directory or directory)
        try:
            lives = Lives(RolloutStore(connect(server.url), Settings(redis_url=server.url)))
            lives.rate(min(100, options.count))
            for number in range(options.rounds):
                for name in SETTINGS:
                    server.client.config_set("appendfsync", name)
                    submits[name] += [lives.submit(new_id()) for _ in range(options.count // 5)]
                    rates[name].append(lives.rate(options.count))
                said = ", ".join(f"{name} {rates[name][-1]:.0f}" for name in SETTINGS)
                say(f"round {number + 1}: {said} rollouts a second")
        finally:
            server.stop()
    ratios = [always / every for every, always in zip(rates["everysec"], rates["always"], strict=True)]
    report(
        "durability",
        {
            "always_throughput_ratio": round(statistics.median(ratios), 3),
            "always_submit_ms": spread_ms(submits["always"])["p50_ms"],
            "everysec_submit_ms": spread_ms(submits["everysec"])["p50_ms"],
        },
        rollouts_per_s={name: summary(found) for name, found in rates.items()},
        submit_ms={name: spread_ms(found) for name, found in submits.items()},
        count=options.count,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
