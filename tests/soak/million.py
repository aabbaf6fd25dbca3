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
import os
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

SAMPLE_S = 5.0
LOOK_S = 0.25
SLOTS = 32
"""Of a worker process."""
LEASES = 1.3
"""For so many of them a worker is frozen."""
END_S = 900.0
"""Without a result, and what has not ended by then is lost."""
QUIET_LOOKS = 5
"""At a Redis that has nothing to do, a second apart."""


class Head(Chaos):
    """Redis, gateways and fleets, of which each first process is only frozen."""

    def __init__(self, directory: Path, sandboxes: Path, options: argparse.Namespace) -> None:
        server = directory / "redis"
        server.mkdir(exist_ok=True)
        env = {} if options.quick else shipped()
        env |= {"ROLLOUT_LOG_LEVEL": "WARNING", "ROLLOUT_PRELOAD_TOKENIZERS": "0"}
        env |= {"ROLLOUT_RETENTION_S": str(options.retention)}
        super().__init__(directory, sandboxes, env, RedisServer(server))
        self.ports = [self.port, *(free_port() for _ in range(options.gateways - 1))]
        self.gateways = {"gateway": self.gateway}
        for number, port in enumerate(self.ports[1:], 1):
            self.gateways[f"gateway{number}"] = self._launch_gateway(f"gateway{number}", port)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        wait_until(lambda: all(map(healthy, self.urls)), 120, "the gateways")

    def start_fleets(self, queues: list[str], each: int) -> None:
        for line in queues:
            for number in range(each):
                self.start_anew(f"{line.replace(',', '-')}{number}", line)
        for worker in self.workers.values():
            self._await_worker(worker)

    def start_anew(self, name: str, queues: str) -> None:
        """A worker under its name, as a supervisor does."""
        self.workers[name] = self._launch_worker(queues, name, slots=SLOTS)
        self.workers[name].queues = queues

    def kill(self, process: Process) -> None:
        process.kill()
        self.processes.remove(process)

    def latest_end(self) -> str:
        """The place of the last result that there ever was."""
        with suppress(redis.ResponseError):  # there is none
            return self.redis.client.xinfo_stream(keys.RESULTS)["last-generated-id"]
        return "0-0"

    def kinds_of_keys(self) -> Counter[str]:
        """How many keys there are, by names without ids."""
        names = self.redis.client.scan_iter(count=1000)
        return Counter(re.sub(r"\{.*?\}|[0-9a-f]{16,}|\d+", "#", name) for name in names)


class Million:
    """One piece of the run."""

    def __init__(self, head: Head, ledger: Ledger, options: argparse.Namespace) -> None:
        self.head, self.ledger, self.options = head, ledger, options
        self.trainer = Trainer(ledger, head.urls, options.live)
        self.random = random.Random(f"{ledger.seed} {ledger.state['pieces']}")
        every = {self._worker: options.worker_every, self._gateway: options.gateway_every}
        every |= {self._redis: options.redis_every, self._freeze: options.freeze_every}
        self.every = {fault: number for fault, number in every.items() if number}
        self.next = {fault: ledger.count + self._apart(fault) for fault in self.every}
        self.recovering: list[tuple[str, float, Callable[[], bool]]] = []
        self.file = (head.directory / "samples.jsonl").open("a")
        self.memory: dict[str, list[float]] = defaultdict(list)
        """By kind of process, of those that are only frozen."""
        self.began = time.monotonic() - ledger.state["seconds"]
        self.until = time.monotonic() + (options.for_ or float("inf"))
        self.sampled_at = 0.0

    def _apart(self, fault: Callable[[], None]) -> int:
        return round(self.every[fault] * self.random.uniform(0.5, 1.5))

    @property
    def seconds(self) -> float:
        """For which the service has been at work, in all pieces."""
        return time.monotonic() - self.began

    def run(self) -> None:
        """Go on until all have ended and are forgotten, or the time is over."""
        ledger, tenth = self.ledger, -(-self.ledger.total // self.options.rests)
        ledger.set(pieces=ledger.state["pieces"] + 1)
        self.trainer.start()
        while self.trainer.failure is None:
            goal = min(ledger.total, (len(ledger.state["rests"]) + 1) * tenth)
            self.trainer.limit = ledger.state["sent"] if time.monotonic() > self.until else goal
            if not self._work():
                break
            if ledger.count >= goal:
                self._rest()
            if ledger.count == ledger.total or time.monotonic() > self.until:
                break
        self.trainer.stopping.set()
        self._note_growth()
        ledger.set(seconds=self.seconds)
        if self.trainer.failure:
            raise self.trainer.failure

    def _work(self) -> bool:
        """Break things until what is to be submitted has ended; False: nothing has for too long."""
        ledger, latest = self.ledger, (self.ledger.count, time.monotonic())
        while self.trainer.failure is None and (ledger.count < self.trainer.limit or self.recovering):
            time.sleep(LOOK_S)
            self._note_recoveries()
            if ledger.count != latest[0]:
                latest = ledger.count, time.monotonic()
            elif time.monotonic() - latest[1] > END_S:
                return False
            if time.monotonic() > self.until:
                self.trainer.limit = ledger.state["sent"]
            self._sample()
            for fault in self.every:
                if self.next[fault] <= ledger.count < self.trainer.limit:
                    fault()
                    self.next[fault] = ledger.count + self._apart(fault)
        return self.trainer.failure is None

    # -- what is broken -------------------------------------------------------------------------

    def _worker(self) -> None:
        name = self.random.choice([name for name in self.head.workers if not name.endswith("0")])
        worker = self.head.workers[name]
        self._wait_for("worker", self._all_ended())
        self.head.kill(worker)
        self.head.start_anew(name, worker.queues)

    def _gateway(self) -> None:
        number = self.random.randrange(1, len(self.head.ports))
        name, url = f"gateway{number}", self.head.urls[number]
        self._wait_for("gateway", lambda: healthy(url))
        self.head.kill(self.head.gateways[name])
        self.head.gateways[name] = self.head._launch_gateway(name, self.head.ports[number])

    def _redis(self) -> None:
        self._wait_for("redis", self._all_ended())
        self.head.restart_redis()

    def _freeze(self) -> None:
        name = self.random.choice([name for name in self.head.workers if name.endswith("0")])
        worker, lease_s = self.head.workers[name], float(self.head.env["ROLLOUT_LEASE_S"])
        self._wait_for("freeze", self._all_ended())
        worker.popen.send_signal(signal.SIGSTOP)
        threading.Timer(LEASES * lease_s, worker.popen.send_signal, [signal.SIGCONT]).start()

    def _all_ended(self) -> Callable[[], bool]:
        """Whether all that is under way now has ended."""
        numbers = self.ledger.open()
        return lambda: bool(self.ledger.ended[numbers].all())

    def _wait_for(self, fault: str, recovered: Callable[[], bool]) -> None:
        kills = self.ledger.state["kills"].setdefault(fault, [])
        kills.append(None)
        self.recovering.append((fault, len(kills) - 1, time.monotonic(), recovered))

    def _note_recoveries(self) -> None:
        for entry in list(self.recovering):
            fault, place, began, recovered = entry
            if recovered():
                self.ledger.state["kills"][fault][place] = round(time.monotonic() - began, 1)
                self.recovering.remove(entry)

    # -- what is looked at ----------------------------------------------------------------------

    def _sample(self) -> None:
        if time.monotonic() < self.sampled_at + SAMPLE_S:
            return
        self.sampled_at = time.monotonic()
        with suppress(redis.RedisError):
            row = {"t": round(self.seconds, 1), "ended": self.ledger.count, "redis": self._redis_mb()}
            row |= {kind: memory_mb([process.pid], "rss") for kind, process in self._lasting().items()}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            for kind in row.keys() - {"t", "ended", "redis"}:
                self.memory[kind].append(row[kind])
            self.ledger.set(seconds=self.seconds)

    def _lasting(self) -> dict[str, Process]:
        workers = {f"worker {name[:-1]}": w for name, w in self.head.workers.items() if name.endswith("0")}
        return {"gateway": self.head.gateways["gateway"], **workers}

    def _redis_mb(self) -> float:
        return self.head.redis.client.info("memory")["used_memory"] / 1e6

    def _rest(self) -> None:
        """Wait until Redis has forgotten all rollouts and what they left, and note what it still has."""
        client, began = self.head.redis.client, time.monotonic()
        patterns = [keys.record("*")] + ([] if self.options.quick else [keys.fair_claim("*")])
        while client.zcard(keys.CREATED) or any(next(client.scan_iter(p, 10_000), None) for p in patterns):
            time.sleep(1.0)
            if time.monotonic() - began > END_S:
                break
        redis_mb = min(self._redis_mb() for _ in range(QUIET_LOOKS) if time.sleep(1.0) is None)
        kinds = dict(self.head.kinds_of_keys())
        rest = {"ended": self.ledger.count, "redis_mb": redis_mb, "keys": kinds}
        self.ledger.set(rests=[*self.ledger.state["rests"], rest])
        self.began += time.monotonic() - began  # the service had nothing to do

    def _note_growth(self) -> None:
        """Memory at the end of the piece over that once it was warm, of each kind the most of all pieces."""
        for kind, values in self.memory.items():
            tenth = len(values) // 10
            if tenth:
                ratio = statistics.median(values[-tenth:]) / statistics.median(values[tenth : 2 * tenth])
                known = self.ledger.state["growth"]
                known[kind] = max(round(ratio, 3), known.get(kind, 0.0))


def main() -> int:
    """Do a piece, print what has been done so far, and say by the exit status whether it holds."""
    end_in_order_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, default=Path(".local/million"))
    parser.add_argument(
        "--for", type=float, dest="for_", help="seconds, then end in order; go on another time"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="processes of each stage")
    parser.add_argument("--live", type=int, default=1000, help="rollouts under way at most")
    parser.add_argument("--retention", type=float, default=60.0, help="seconds")
    parser.add_argument("--rests", type=int, default=10, help="looks at a Redis that has nothing to do")
    for fault, number in (("worker", 9000), ("gateway", 18_000), ("redis", 45_000), ("freeze", 90_000)):
        text = (
            f"rollouts from one fault of a {fault} to the next; 0 = none" if fault != "freeze" else "the same"
        )
        parser.add_argument(f"--{fault}-every", type=int, default=number, help=text)
    parser.add_argument(
        "--quick", action="store_true", help="short leases, and workers that serve every stage"
    )
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
        million.trainer.catch_up()
        head.start_fleets([",".join(STAGES)] if options.quick else list(STAGES), options.workers)
        million.run()
    result = report.write(directory, ledger, os.cpu_count())
    print(json.dumps(result))
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
