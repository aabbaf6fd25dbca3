"""A million rollouts through one head whose parts are killed throughout: `python -m tests.soak.million`.

Redis as shipped with its append-only file, several gateways, workers of each stage. A trainer submits in
calls that it repeats until they are answered, reads by cursor, acknowledges, and counts each id. Meanwhile
workers, gateways and Redis get SIGKILL and are started again, and a worker is frozen past its leases: after
so many rollouts each, at random. One worker of each stage and one gateway are spared SIGKILL, so that
memory that grows shows. Records are forgotten soon; at each tenth the service comes to rest, until all of
them are, and what Redis then has is told.

`--directory` holds all there is to know: the same command goes on where it was, on another day too, if it
was killed or has worked for `--for` seconds. The last line is one JSON object; exits 1 if anything does not
hold.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import redis

from benchmarks.harness import end_in_order_on_sigterm, memory_mb
from services.state import keys
from tests.chaos.harness import STAGES, Chaos
from tests.chaos.soak import shipped
from tests.helpers.stack import Process, RedisServer, free_port, healthy, wait_until
from tests.soak import report
from tests.soak.ledger import Ledger, Trainer

GATEWAYS, WORKERS = 2, 2
"""Processes; workers for each stage."""
SLOTS = 32
"""Of a worker process."""
LEASES = 1.3
"""For so many of them a worker is frozen."""
END_S = 900.0
"""Without a result, and what has not ended by then is lost."""
SAMPLE_S = 5.0
LOOK_S = 0.25
QUIET_LOOKS = 5
"""At a Redis that has nothing to do, a second apart."""
EVERY = {"worker": 9000, "gateway": 18_000, "redis": 45_000, "freeze": 90_000}
"""Rollouts from one fault to the next, on average: a minute for the first on an idle machine."""


class Head(Chaos):
    """Redis, gateways and fleets; the first process of each kind is only frozen."""

    def __init__(self, directory: Path, sandboxes: Path, options: argparse.Namespace) -> None:
        (directory / "redis").mkdir(exist_ok=True)
        env = {} if options.quick else shipped()
        env |= {"ROLLOUT_LOG_LEVEL": "WARNING", "ROLLOUT_RETENTION_S": str(options.retention)}
        env |= {"ROLLOUT_PRELOAD_TOKENIZERS": "0"}
        super().__init__(directory, sandboxes, env, RedisServer(directory / "redis"))
        self.ports = [self.port, *(free_port() for _ in range(GATEWAYS - 1))]
        self.gateways = [self.gateway]
        self.gateways += [self._launch_gateway(f"gateway{port}", port) for port in self.ports[1:]]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        wait_until(lambda: all(map(healthy, self.urls)), 120, "the gateways")

    def start_fleets(self, queues: list[str]) -> None:
        """Workers under names that they keep when they are started again, as by a supervisor."""
        for line in queues:
            for number in range(WORKERS):
                name = f"{line.replace(',', '-')}{number}"
                self.workers[name] = self._launch_worker(line, name, slots=SLOTS)
        for worker in self.workers.values():
            self._await_worker(worker)

    def spared(self) -> dict[str, Process]:
        """What is never killed, by its kind."""
        workers = {name[:-1]: worker for name, worker in self.workers.items() if name.endswith("0")}
        return {"gateway": self.gateway, **workers}

    def kill(self, process: Process) -> None:
        process.kill()
        self.processes.remove(process)

    def latest_end(self) -> str:
        """The place of the last result that there ever was."""
        with suppress(redis.ResponseError):  # there is none
            return self.redis.client.xinfo_stream(keys.RESULTS)["last-generated-id"]
        return "0-0"

    def used_mb(self) -> float:
        return self.redis.client.info("memory")["used_memory"] / 1e6

    def kinds_of_keys(self) -> dict[str, int]:
        """How many keys there are, by names without ids."""
        names = self.redis.client.scan_iter(count=1000)
        return dict(Counter(re.sub(r"\{.*?\}|[0-9a-f]{16,}|\d+", "#", name) for name in names))


class Million:
    """One piece of the run."""

    def __init__(self, head: Head, ledger: Ledger, options: argparse.Namespace) -> None:
        self.head, self.ledger, self.options = head, ledger, options
        self.trainer = Trainer(ledger, head.urls, options.live)
        self.random = random.Random(f"{ledger.seed} {ledger.state['pieces']}")
        self.every = {fault: every for fault in EVERY if (every := getattr(options, f"{fault}_every"))}
        self.next = {fault: ledger.count + self._apart(fault) for fault in self.every}
        self.recovering: list[tuple[list, float, Callable[[], bool]]] = []
        """Entries of the ledger, since when, and what tells that all is as before."""
        self.memory: dict[str, list[float]] = defaultdict(list)
        """By kind of process."""
        self.began = time.monotonic() - ledger.state["seconds"]
        """Less what the pieces before took, and rests."""
        self.until = time.monotonic() + (options.for_ or float("inf"))
        self.sampled_at = 0.0

    def _apart(self, fault: str) -> int:
        return round(self.every[fault] * self.random.uniform(0.5, 1.5))

    def run(self) -> None:
        """Go on until all have ended and are forgotten, or the time is over."""
        ledger, tenth = self.ledger, -(-self.ledger.total // self.options.rests)
        ledger.set(pieces=ledger.state["pieces"] + 1)
        try:
            while ledger.count < ledger.total and time.monotonic() < self.until:
                goal = min(ledger.total, (len(ledger.state["rests"]) + 1) * tenth)
                self.trainer.limit = goal
                if not self._work():
                    break
                if ledger.count >= goal:
                    self._rest()
        finally:
            self.trainer.stopping.set()
            self._note_growth()
        if self.trainer.failure:
            raise self.trainer.failure

    def _note_growth(self) -> None:
        """Of a piece, also one that is stopped: the end over what it was once warm. The most counts."""
        growth = self.ledger.state["growth"]
        for kind, values in self.memory.items():
            if tenth := len(values) // 10:
                ratio = statistics.median(values[-tenth:]) / statistics.median(values[tenth : 2 * tenth])
                growth[kind] = max(round(ratio, 3), growth.get(kind, 0.0))
        self.ledger.set(seconds=time.monotonic() - self.began)

    def _work(self) -> bool:
        """Break things until what is to be submitted has ended; False: nothing has for too long."""
        ledger, trainer, latest = self.ledger, self.trainer, (-1, 0.0)
        while trainer.failure is None and (ledger.count < trainer.limit or self.recovering):
            time.sleep(LOOK_S)
            if ledger.count != latest[0]:
                latest = ledger.count, time.monotonic()
            elif time.monotonic() - latest[1] > END_S:
                return False
            if time.monotonic() > self.until:
                trainer.limit = ledger.state["sent"]
            self._look()
            for fault in self.every:
                if self.next[fault] <= ledger.count < trainer.limit:
                    self._break(fault)
                    self.next[fault] = ledger.count + self._apart(fault)
        return trainer.failure is None

    def _break(self, fault: str) -> None:
        head, under_way = self.head, self.ledger.under_way()
        recovered = lambda: bool(self.ledger.ended[under_way].all())  # noqa: E731
        began = time.monotonic()
        if fault == "worker":
            name = self.random.choice(sorted(set(head.workers) - {f"{kind}0" for kind in head.spared()}))
            head.kill(head.workers[name])
            head.workers[name] = head._launch_worker(name[:-1].replace("-", ","), name, slots=SLOTS)
        elif fault == "gateway":
            place = self.random.randrange(1, GATEWAYS)
            recovered = lambda: healthy(head.urls[place])  # noqa: E731
            head.kill(head.gateways[place])
            head.gateways[place] = head._launch_gateway(f"gateway{head.ports[place]}", head.ports[place])
        elif fault == "redis":
            head.restart_redis()
        else:
            frozen = self.random.choice([p for kind, p in head.spared().items() if kind != "gateway"]).popen
            frozen.send_signal(signal.SIGSTOP)
            seconds = LEASES * float(head.env["ROLLOUT_LEASE_S"])
            threading.Timer(seconds, frozen.send_signal, [signal.SIGCONT]).start()
        entry = [round(began - self.began, 1), None]
        self.ledger.state["faults"].setdefault(fault, []).append(entry)
        self.recovering.append((entry, began, recovered))

    def _look(self) -> None:
        """Note what has recovered, and now and then how large everything is."""
        now = time.monotonic()
        for entry, began, recovered in self.recovering:
            entry[1] = round(now - began, 1) if recovered() else None
        self.recovering = [waiting for waiting in self.recovering if waiting[0][1] is None]
        if now < self.sampled_at + SAMPLE_S:
            return
        self.sampled_at = now
        sizes = {kind: memory_mb([process.pid], "rss") for kind, process in self.head.spared().items()}
        with suppress(redis.RedisError), (self.head.directory / "samples.jsonl").open("a") as file:
            row = {"t": round(now - self.began, 1), "ended": self.ledger.count, "redis": self.head.used_mb()}
            file.write(json.dumps(row | sizes) + "\n")
        for kind, size in sizes.items():
            self.memory[kind].append(size)
        self.ledger.set(seconds=now - self.began)

    def _rest(self) -> None:
        """Wait until Redis has forgotten all rollouts and what they left, and note what it still has."""
        client, began = self.head.redis.client, time.monotonic()
        patterns = [keys.record("*")] + ([] if self.options.quick else [keys.fair_claim("*")])
        while client.zcard(keys.CREATED) or any(next(client.scan_iter(p, 10_000), None) for p in patterns):
            time.sleep(1.0)
            if time.monotonic() - began > END_S:
                break
        redis_mb = min(self.head.used_mb() for _ in range(QUIET_LOOKS) if time.sleep(1.0) is None)
        rest = {"ended": self.ledger.count, "redis_mb": redis_mb, "keys": self.head.kinds_of_keys()}
        self.ledger.set(rests=[*self.ledger.state["rests"], rest])
        self.began += time.monotonic() - began


def main() -> int:
    """Do a piece, print what has been done so far, and say by the exit status whether it holds."""
    end_in_order_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, default=Path(".local/million"))
    parser.add_argument("--for", type=float, dest="for_", help="seconds of this piece; none = to the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--live", type=int, default=1000, help="rollouts under way at most")
    parser.add_argument("--retention", type=float, default=60.0, help="seconds")
    parser.add_argument("--rests", type=int, default=10, help="looks at a Redis that has nothing to do")
    for fault, every in EVERY.items():
        parser.add_argument(f"--{fault}-every", type=int, default=every, help="in rollouts; 0 = never")
    parser.add_argument("--quick", action="store_true", help="short leases; each worker serves every stage")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(directory, options.rollouts, options.seed)
    with (
        tempfile.TemporaryDirectory(prefix="mi-", dir="/tmp") as sandboxes,
        Head(directory, Path(sandboxes), options) as head,
    ):
        ledger.take_back(head.latest_end())
        million = Million(head, ledger, options)
        million.trainer.start()
        head.start_fleets([",".join(STAGES)] if options.quick else list(STAGES))
        million.run()
    result = report.write(directory, ledger)
    print(json.dumps(result))
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
