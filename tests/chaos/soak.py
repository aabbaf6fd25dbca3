"""Thousands of short rollouts while random parts are killed: `python -m tests.chaos.soak --rollouts 5000`.

Every few seconds a part is drawn: a worker of some stage, all workers, the gateway or Redis gets SIGKILL and
is started again, a worker is frozen past its leases, or all connections are cut. Then the rollouts are
counted. The last line is one JSON object; exits 1 when a rollout was lost or ended twice, or something is
left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import redis

from benchmarks._latency import end_in_order_on_sigterm
from rollout.client import ApiError, Client
from rollout.errors import RolloutError
from rollout.schema import RolloutRequest, new_id
from tests.chaos.harness import STAGES, Chaos
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import wait_until

PER_CALL = 20
MOST_PER_S = 50
"""Rollouts submitted a second, at most."""
WORK_S = 0.3
"""Longest sleep of a rollout in each stage."""
FREEZE_S = 4.0
"""Longer than a lease, which is 3 s here."""
END_S = 600.0


class Soak:
    """One run, and what came of it."""

    def __init__(self, chaos: Chaos, rollouts: int, every_s: float, least: int, seed: int) -> None:
        self.chaos = chaos
        self.random = random.Random(seed)
        self.every_s, self.least = every_s, least
        self.ids = [f"soak-{new_id()}" for _ in range(rollouts)]
        self.faults: Counter[str] = Counter()

    def run(self) -> dict:
        """All of it; the result to print."""
        began = time.monotonic()
        submitting = threading.Thread(target=self._submit, name="submit", daemon=True)
        submitting.start()
        kinds = (self._worker, self._all_workers, self._gateway, self._redis, self._freeze, self._cut)
        turns: list = []
        while submitting.is_alive() or not self._all_ended() or sum(self.faults.values()) < self.least:
            if time.monotonic() - began > END_S + len(self.ids):
                break
            if submitting.is_alive() or sum(self.faults.values()) < self.least:
                # Each kind comes once before any comes again.
                turns = turns or self.random.sample(kinds, len(kinds))
                fault = turns.pop()
                fault()
                self.faults[fault.__name__.lstrip("_")] += 1
            time.sleep(self.random.uniform(0.5, 1.5) * self.every_s)
        counted = self.chaos.count(self.ids)
        return {
            "results": {
                name: counted[name] for name in ("submitted", "ended", "ended_twice", "lost", "leftovers")
            },
            "wrong": counted["wrong"],
            "faults": dict(self.faults),
            "seconds": round(time.monotonic() - began, 1),
        }

    def _submit(self) -> None:
        """As a trainer does: in calls, each repeated with the same ids until it is answered."""
        client = Client(self.chaos.url)
        calls = [self.ids[k : k + PER_CALL] for k in range(0, len(self.ids), PER_CALL)]
        for call in calls:
            requests = [
                RolloutRequest(
                    handler="noop",
                    id=rollout_id,
                    task={"reward": 1.0} | {f"{stage}_s": self.random.uniform(0, WORK_S) for stage in STAGES},
                    limits={"max_attempts": 20},
                )
                for rollout_id in call
            ]
            while True:
                with suppress(RolloutError, httpx.HTTPError):
                    client.submit(requests)
                    break
                time.sleep(0.2)
            # So that the faults meet work: never faster than they come.
            time.sleep(max(PER_CALL / MOST_PER_S, self.least * self.every_s / len(calls)))

    def _all_ended(self) -> bool:
        with suppress(redis.RedisError), self.chaos.redis.client.pipeline(transaction=False) as pipe:
            for rollout_id in self.ids:
                pipe.hexists(f"rollout:{{{rollout_id}}}", "finished")
            return all(pipe.execute())
        return False

    # -- faults ---------------------------------------------------------------------------------

    def _worker(self) -> None:
        stage = self.random.choice(STAGES)
        self.chaos.kill_workers([stage])
        self.chaos.start_workers([stage])

    def _all_workers(self) -> None:
        self.chaos.kill_workers()
        self.chaos.start_workers()

    def _gateway(self) -> None:
        self.chaos.restart_gateway()

    def _redis(self) -> None:
        self.chaos.restart_redis()

    def _freeze(self) -> None:
        worker = self.chaos.workers[self.random.choice(STAGES)]
        worker.popen.send_signal(signal.SIGSTOP)
        time.sleep(FREEZE_S)
        worker.popen.send_signal(signal.SIGCONT)

    def _cut(self) -> None:
        with redis.Redis(port=self.chaos.redis.port) as admin:
            for kind in ("normal", "pubsub"):
                admin.client_kill_filter(_type=kind, skipme=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=5000)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two faults, on average")
    parser.add_argument("--faults", type=int, default=6, help="at least so many; six are one of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end_in_order_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as name:
        directory = Path(name)
        try:
            with Chaos(directory, directory / "s") as chaos:
                chaos.start_workers()
                wait_until(lambda: "noop" in _handlers(chaos), 60, "the handlers to be announced")
                result = Soak(chaos, options.rollouts, options.every, options.faults, options.seed).run()
        finally:
            stop_host(directory / "s")
    print(json.dumps(result))
    counts = result["results"]
    whole = counts["submitted"] == counts["ended"] and not result["wrong"]
    return 0 if whole and not any(counts[name] for name in ("ended_twice", "lost", "leftovers")) else 1


def _handlers(chaos: Chaos) -> set[str]:
    with suppress(ApiError, httpx.HTTPError):
        return {info.name for info in chaos.client.handlers()}
    return set()


if __name__ == "__main__":
    sys.exit(main())
