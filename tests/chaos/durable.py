"""Real rollouts whose every part dies again and again: `python -m tests.chaos.durable --rollouts 1000`.

Each has 10 to 30 tool calls in a real sandbox; each appends a line to a file that is compared with the
trajectory. Every few seconds one of these gets SIGKILL and is started again: a RUN worker, that of INIT or
EVAL, the gateway, an engine, Redis, the sandbox host; or a RUN worker is told to stop, or frozen past its
lease. In the end each must have ended once, with every line written once and every turn sampled once, in
its first attempt; except where a sandbox was lost, or had done more than Redis knew of: these are told apart
by the notes of each attempt that another one followed. The last line is one JSON object; exits 1 if anything
does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import httpx
import redis

from benchmarks.harness import end_in_order_on_sigterm
from rollout.client import ApiError
from rollout.errors import RolloutError
from rollout.schema import Rollout, RolloutRequest, State, new_id
from sandbox.errors import SandboxError
from tests.chaos.harness import PATIENCE_S, STAGES, Chaos, Engine, diary_engine
from tests.helpers.blocking import SyncHostClient
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import wait_until

EVERY_S = 2.0
RUN_APART_S = 12.0
"""From one fault of a RUN worker to the next: who lost a worker has made a turn by then. Else it might be
what ends them, and would be tried anew."""
FROZEN_S = 9.0
STEP_MS, PAUSE_S = 0.5, 0.3
PER_CALL = 10
AT_ONCE = 48
"""Rollouts that may be live: two processors carry no more sandboxes at a pace."""
END_S = 900.0
ENV = {
    "ROLLOUT_HANDLERS": "tests.helpers.diary:Diary",
    "ROLLOUT_LEASE_S": "6",
    "ROLLOUT_SHUTDOWN_GRACE_S": "4",
}
EXCUSES = {
    "sandbox_lost": re.compile(r"sandbox is blamed: .*SandboxGone"),
    "sandbox_ahead": re.compile(r"SandboxAhead|Redis has lost what came between"),
}
"""Notes of an attempt that may be followed by another one. Each such attempt needs one of its own."""
MOST_TOLD = 5


class Durable:
    """One run, and what came of it."""

    def __init__(self, chaos: Chaos, engines: list[Engine], rollouts: int, every_s: float, seed: int) -> None:
        self.chaos, self.engines, self.every_s = chaos, engines, every_s
        self.random = random.Random(seed)
        self.lines = {new_id(): self.random.randint(10, 30) for _ in range(rollouts)}
        self.sent: list[str] = []
        self.faults: Counter[str] = Counter()

    def run(self) -> dict:
        """All of it; the result to print."""
        began, deck = time.monotonic(), []
        run_at = began
        threading.Thread(target=self._submit, name="submit", daemon=True).start()
        while not self._over() and time.monotonic() - began < END_S * 4:
            time.sleep(self.every_s * self.random.uniform(0.5, 1.5))
            if not deck:
                deck = [kind for kind, count in FAULTS.items() for _ in range(count)]
                self.random.shuffle(deck)
            soon = time.monotonic() < run_at + RUN_APART_S
            place = next((at for at, kind in enumerate(deck) if not (soon and kind in OF_RUN)), None)
            if place is None:
                continue
            fault = deck.pop(place)
            self.faults[fault.__name__.strip("_")] += fault(self) is not False
            run_at = time.monotonic() if fault in OF_RUN else run_at
        ids = list(self.lines)
        # What has not ended then is in the result, and not an error that hides the rest of it.
        with suppress(TimeoutError):
            wait_until(lambda: self.chaos.all_ended(ids), END_S, "all rollouts to end")
        return self._judge(ids) | {"seconds": round(time.monotonic() - began), "faults": dict(self.faults)}

    def _submit(self) -> None:
        waiting = list(self.lines.items())
        while waiting:
            with suppress(RolloutError, httpx.HTTPError, redis.RedisError):
                states = self.chaos.states(self.sent) if self.sent else Counter()
                live = len(self.sent) - sum(states[state] for state in State if state.terminal)
                if live + PER_CALL <= AT_ONCE:
                    part = waiting[:PER_CALL]
                    self.chaos.client.submit(
                        [
                            RolloutRequest(
                                handler="diary",
                                id=i,
                                task={"lines": n, "pause_s": PAUSE_S},
                                limits={"max_turns": 40},
                            )
                            for i, n in part
                        ]
                    )
                    self.sent += [rollout_id for rollout_id, _ in part]
                    waiting = waiting[PER_CALL:]
            time.sleep(0.5)

    def _over(self) -> bool:
        with suppress(redis.RedisError):
            return len(self.sent) == len(self.lines) and self.chaos.all_ended(self.sent)
        return False

    # -- faults ---------------------------------------------------------------------------------

    def _run_worker(self) -> None:
        name = self.random.choice([name for name in self.chaos.workers if name.startswith("run")])
        worker = self.chaos.workers.pop(name)
        worker.kill()
        self.chaos.processes.remove(worker)
        self._start_run(name)

    def _start_run(self, key: str) -> None:
        self.chaos._generation += 1
        name = f"{key.replace(' ', '')}g{self.chaos._generation}"
        self.chaos.workers[key] = self.chaos._launch_worker("run", name, slots=64)

    def _stopped_run_worker(self) -> None:
        name = self.random.choice([name for name in self.chaos.workers if name.startswith("run")])
        worker = self.chaos.workers.pop(name)
        worker.ask_to_stop()
        self._start_run(name)
        worker.stop(60)

    def _frozen_run_worker(self) -> None:
        worker = self.chaos.workers[
            self.random.choice([n for n in self.chaos.workers if n.startswith("run")])
        ]
        worker.popen.send_signal(signal.SIGSTOP)
        threading.Timer(FROZEN_S, worker.popen.send_signal, [signal.SIGCONT]).start()

    def _other_worker(self) -> None:
        stage = self.random.choice(("init", "eval"))
        self.chaos.kill_workers([stage])
        self.chaos.start_stages([stage], wait=False)

    def _gateway(self) -> None:
        self.chaos.restart_gateway()

    def _engine(self) -> None:
        self.random.choice(self.engines).restart(wait=False)

    def _redis(self) -> None:
        self.chaos.restart_redis()

    def _host(self) -> bool:
        """Whether there was one: the one before may have died a moment ago."""
        with suppress(SandboxError, OSError):
            if stats := SyncHostClient(self.chaos.sandbox_dir).stats():
                os.kill(stats["pid"], signal.SIGKILL)
                return True
        return False

    # -- the verdict ----------------------------------------------------------------------------

    def _judge(self, ids: list[str]) -> dict:
        sandboxes = SyncHostClient(self.chaos.sandbox_dir)
        with suppress(TimeoutError):
            wait_until(lambda: not sandboxes.list(), PATIENCE_S, "every sandbox to end")
        exact = self.chaos.count(ids)
        items = []
        for rollout_id in self.sent:
            with suppress(ApiError):  # it is counted as lost
                items.append(self.chaos.client.get(rollout_id))
        why = Counter(self._why(item) for item in items)
        calls = Counter(call for item in items for call in _calls(item))
        wrong = {
            "not_as_the_file_says": [i for i in items if (i.state, i.reward) != (State.COMPLETED, 1.0)],
            "turns_missing_or_twice": [i for i in items if not self._has_its_turns(i)],
        }
        for name, its in wrong.items():
            for item in its[:MOST_TOLD]:
                print(
                    f"{name}: {item.id} {item.state} {item.error} {item.metrics} {_notes(item)}", flush=True
                )
        zero = {
            "other": why["other"],
            **{name: exact[name] for name in ("ended_twice", "lost", "leftovers", "wrong")},
            **{name: len(its) for name, its in wrong.items()},
            "calls_in_two_places": sum(count > 1 for count in calls.values()),
            "logs_left": len(self.chaos.redis.client.keys("*:turns:*")),
            "sandboxes_left": len(sandboxes.list()),
        }
        return {
            "rollouts": len(ids),
            "tool_calls": sum(self.lines.values()),
            "resumed": sum(item.resumed for item in items),
            "rollouts_resumed": sum(item.resumed > 0 for item in items),
            **{name: why[name] for name in ("attempts_1", *EXCUSES)},
            "ended": exact["ended"],
            **zero,
            "holds": exact["ended"] == len(ids) and not any(zero.values()),
        }

    def _has_its_turns(self, item: Rollout) -> bool:
        """Whether it made one model call a line and one to end, each of its own."""
        calls, turns = _calls(item), self.lines[item.id] + 1
        return len(calls) == len(set(calls)) == item.metrics.get("turns") == turns

    def _why(self, item: Rollout) -> str:
        """In its first attempt, or by what it came to the last of its others."""
        found = "attempts_1"
        for attempt in range(1, item.attempt):
            told = "; ".join(note.text for note in item.notes if note.attempt == attempt)
            found = next((name for name, words in EXCUSES.items() if words.search(told)), "other")
            print(f"{found}: {item.id} after attempt {attempt}: {told}", flush=True)
            if found == "other":
                break
        return found


FAULTS = {
    Durable._run_worker: 4,
    Durable._stopped_run_worker: 2,
    Durable._frozen_run_worker: 1,
    Durable._other_worker: 2,
    Durable._gateway: 1,
    Durable._engine: 1,
    Durable._redis: 1,
    Durable._host: 1,
}
"""Faults, and how often each comes before they are shuffled anew. What died is started at once; only the
gateway and Redis are waited for."""
OF_RUN = {Durable._run_worker, Durable._stopped_run_worker, Durable._frozen_run_worker}


def _notes(item: Rollout) -> str:
    return "; ".join(note.text for note in item.notes)


def _calls(item: Rollout) -> list[str]:
    """Ids of its model calls in order; the segments of one, by policy version, follow each other."""
    chains = item.trajectory.chains if item.trajectory else []
    return [call for c in chains for call, _ in groupby(s.call_id for s in c.segments if s.sampled)]


def main() -> int:
    """Run, print, and say by the exit status whether everything holds."""
    end_in_order_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="rd-", dir="/tmp") as place,
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes,
    ):
        try:
            with Chaos(Path(place), Path(sandboxes), ENV) as chaos:
                chaos.start_stages([stage for stage in STAGES if stage != "run"])
                engines = [
                    Engine(chaos, f"engine{k}", lambda port: diary_engine(port, STEP_MS)) for k in range(2)
                ]
                durable = Durable(chaos, engines, options.rollouts, options.every, options.seed)
                for k in range(2):
                    durable._start_run(f"run {k}")
                result = durable.run()
        finally:
            stop_host(Path(sandboxes))
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
