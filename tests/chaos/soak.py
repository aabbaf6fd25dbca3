"""Thousands of short rollouts while random parts are killed: `python -m tests.chaos.soak --rollouts 5000`.

Every few seconds a part is drawn: a worker of some stage, all workers, the gateway or Redis gets SIGKILL and
is started again, a worker is frozen past its leases, or all connections are cut. Then the rollouts are
counted. The last line is one JSON object; exits 1 when a rollout was lost or ended twice, or something is
left.

Redis and attempts are as shipped. `--real` takes all else as shipped as well: real sandboxes in the runtime
that the machine has (Apptainer, where it is there), leases of 30 s, and the embedded model, which is killed
too; every reward is worked out again from its trajectory. Else rollouts are short sleeps and leases last 3 s.
"""

from __future__ import annotations

import argparse
import json
import random
import re
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

from benchmarks.harness import end_in_order_on_sigterm
from rollout.client import ApiError, Client
from rollout.errors import RolloutError
from rollout.schema import RolloutRequest, new_id
from services.launch import parts
from services.launch.demo import TASKS_FILE, load_tasks
from services.settings import ENV_PREFIX, Settings
from tests.chaos.harness import ENV, STAGES, Chaos, Engine
from tests.helpers.blocking import SyncHostClient
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import FAST, wait_until

PER_CALL = 20
MOST_PER_S = 50
"""Rollouts submitted a second, at most."""
WORK_S = 0.3
"""Longest sleep of a rollout in each stage."""
REAL_PER_S = 8
REAL_EVERY_S = 10.0
LEASES = 1.3
"""For so many of them a worker is frozen."""
END_S = 600.0
EVERY_S = 3.0
SANDBOXES_S = 60.0
"""For the sandboxes of the last rollouts to be gone."""


class Soak:
    """One run, and what came of it."""

    def __init__(
        self, chaos: Chaos, rollouts: int, every_s: float, least: int, seed: int, backend: Engine | None
    ) -> None:
        """
        Args:
            backend: The model of real rollouts; None: they are sleeps.
        """
        self.chaos, self.backend = chaos, backend
        self.random = random.Random(seed)
        self.every_s, self.least = every_s, least
        self.tasks = load_tasks(TASKS_FILE, 200) if backend is not None else []
        self.ids = [f"soak-{new_id()}" for _ in range(rollouts)]
        self.faults: Counter[str] = Counter()

    def run(self) -> dict:
        """All of it; the result to print."""
        began = time.monotonic()
        submitting = threading.Thread(target=self._submit, name="submit", daemon=True)
        submitting.start()
        kinds = [self._worker, self._all_workers, self._gateway, self._redis, self._freeze, self._cut]
        if self.backend is not None:
            kinds.append(self._backend)
        self.least = max(self.least, len(kinds))
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
        if self.backend is not None:
            counted["wrong"] += self._wrong_rewards()
            counted["leftovers"] += self._sandboxes_left()
        return {
            "results": {
                name: counted[name] for name in ("submitted", "ended", "ended_twice", "lost", "leftovers")
            },
            "wrong": counted["wrong"],
            "states": dict(self.chaos.states(self.ids)),
            "faults": dict(self.faults),
            "seconds": round(time.monotonic() - began, 1),
        }

    def _submit(self) -> None:
        """As a trainer does: in calls, each repeated with the same ids until it is answered."""
        client = Client(self.chaos.url)
        # A few rollouts are spread over all faults, too.
        per_call = max(1, min(PER_CALL, len(self.ids) // self.least))
        calls = [self.ids[k : k + per_call] for k in range(0, len(self.ids), per_call)]
        for call in calls:
            requests = [self._request(rollout_id) for rollout_id in call]
            while True:
                with suppress(RolloutError, httpx.HTTPError):
                    client.submit(requests)
                    break
                time.sleep(0.2)
            # So that the faults meet work: never faster than they come.
            per_s = MOST_PER_S if self.backend is None else REAL_PER_S
            time.sleep(max(per_call / per_s, self.least * self.every_s / len(calls)))

    def _request(self, rollout_id: str) -> RolloutRequest:
        if self.backend is not None:
            task = self.tasks[sum(rollout_id.encode()) % len(self.tasks)]
            return RolloutRequest(handler="calculator", id=rollout_id, task=task)
        task = {"reward": 1.0} | {f"{stage}_s": self.random.uniform(0, WORK_S) for stage in STAGES}
        return RolloutRequest(handler="noop", id=rollout_id, task=task)

    def _wrong_rewards(self) -> int:
        """Rewards that do not follow from their trajectories, which are printed."""
        wrong = []
        for rollout_id in self.ids:
            item = self.chaos.client.get(rollout_id)
            if item.reward is None:
                continue
            numbers = re.findall(r"-?\d+", item.trajectory.final_text())
            right = bool(numbers) and numbers[-1] == item.request.task["answer"]
            if item.reward != float(right):
                wrong.append(rollout_id)
        if wrong:
            print(f"wrong rewards: {wrong[:5]}", flush=True)
        return len(wrong)

    def _sandboxes_left(self) -> int:
        """Sandboxes that somebody still has, some time after the last rollout ended."""
        deadline = time.monotonic() + SANDBOXES_S
        while True:
            count = (SyncHostClient(self.chaos.sandbox_dir).stats() or {}).get("claimed", 0)
            if not count or time.monotonic() > deadline:
                return count
            time.sleep(1.0)

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
        self.chaos.start_stages([stage])

    def _all_workers(self) -> None:
        self.chaos.kill_workers()
        self.chaos.start_stages()

    def _gateway(self) -> None:
        self.chaos.restart_gateway()

    def _redis(self) -> None:
        self.chaos.restart_redis()

    def _freeze(self) -> None:
        worker = self.chaos.workers[self.random.choice(STAGES)]
        worker.popen.send_signal(signal.SIGSTOP)
        time.sleep(LEASES * float(self.chaos.env["ROLLOUT_LEASE_S"]))
        worker.popen.send_signal(signal.SIGCONT)

    def _backend(self) -> None:
        self.backend.restart()

    def _cut(self) -> None:
        with redis.Redis(port=self.chaos.redis.port) as admin:
            for kind in ("normal", "pubsub"):
                admin.client_kill_filter(_type=kind, skipme=True)


def embedded(port: int) -> list[str]:
    """The command of the embedded model."""
    return parts.embedded_backend(port).command


def shipped() -> dict[str, str]:
    """What the tests' stack makes faster or more patient, as it is by default."""
    defaults = Settings.from_env({})
    names = (*FAST, *ENV)
    fields = {name: name.removeprefix(ENV_PREFIX).lower() for name in names if name != "ROLLOUT_HANDLERS"}
    return {name: str(getattr(defaults, field)) for name, field in fields.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=5000)
    parser.add_argument("--every", type=float, help="seconds between two faults, on average")
    parser.add_argument("--real", action="store_true", help="real sandboxes and model, and all as shipped")
    parser.add_argument("--faults", type=int, default=6, help="at least so many, and one of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end_in_order_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o711)  # for the user whom root starts sandboxes as
        try:
            with Chaos(directory, directory / "s", shipped() if options.real else None) as chaos:
                if options.real:
                    chaos.slots = {stage: parts.slots_of(stage, {}) for stage in STAGES}
                chaos.start_stages()
                wait_until(lambda: "noop" in _handlers(chaos), 120, "the handlers to be announced")
                backend = Engine(chaos, "backend", embedded) if options.real else None
                every = options.every or (REAL_EVERY_S if options.real else EVERY_S)
                soak = Soak(chaos, options.rollouts, every, options.faults, options.seed, backend)
                result = soak.run()
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
