"""A service to break, and the count of what became of its rollouts.

Redis syncs its file as shipped (`everysec`) until it is killed, and rollouts have the attempts that they have
by default.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rollout.client import ApiError
from rollout.schema import TERMINAL_STATES, Rollout, RolloutRequest, State, new_id
from services.launch.parts import answers
from tests.helpers.stack import Process, RedisServer, Stack, free_port, wait_until

STAGES = ("init", "run", "eval")
ENTERED = {"init": State.INITIALIZING, "run": State.RUNNING, "eval": State.EVALUATING}
HANDLERS = "tests.helpers.chaos_handlers:all_handlers,tests.helpers.handlers:Lottery"
ENV = {"ROLLOUT_HANDLERS": HANDLERS, "ROLLOUT_STOP_PATIENCE_S": "2"}
PATIENCE_S = 120.0
"""For what takes seconds on an idle machine: a loaded one must not fail the test."""


class Engine:
    """An LLM server on a port that stays, registered under its name."""

    def __init__(self, stack: Stack, name: str, command: Callable[[int], list[str]]) -> None:
        self.stack, self.name, self.command, self.port = stack, name, command, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        stack.client.add_backend(self.url, id=name)

    def start(self, wait: bool = True) -> None:
        self.process = self.stack.start(self.name, self.command(self.port))
        if wait:
            wait_until(lambda: answers(f"{self.url}/health") is None, PATIENCE_S, self.name, self.process)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.stack.processes.remove(self.process)

    def restart(self, wait: bool = True) -> None:
        self.kill()
        self.start(wait)


def diary_engine(port: int, step_ms: float = 0.2) -> list[str]:
    """The command of an `Engine` for the handlers of `tests.helpers.diary`."""
    options = ["--port", str(port), "--step-ms", str(step_ms), "--script", "tests.helpers.diary:script"]
    return [sys.executable, "-m", "tests.helpers.fake_engine", *options]


def remember(redis: RedisServer) -> Path:
    """A copy of what Redis has now; see `put_back`."""
    return Path(shutil.copytree(_kept(redis), redis.directory / "remembered"))


def put_back(redis: RedisServer, copy: Path) -> RedisServer:
    """A new server that has lost what came after the copy was made; end this one first."""
    shutil.rmtree(_kept(redis))
    copy.rename(_kept(redis))
    return redis.restarted()


def _kept(redis: RedisServer) -> Path:
    return redis.directory / "appendonlydir"


class Chaos(Stack):
    """A stack whose workers are killed and replaced, with a gate for each stage."""

    def __init__(
        self,
        directory: Path,
        sandbox_dir: Path,
        env: dict[str, str] | None = None,
        redis: RedisServer | None = None,
    ) -> None:
        super().__init__(directory, sandbox_dir, ENV | (env or {}), redis)
        self.workers: dict[str, Process] = {}
        self.slots: dict[str, int] = {}
        """By stage, where they are fewer than 128."""
        self._generation = 0
        self.gates_made = 0

    # -- workers --------------------------------------------------------------------------------

    def start_stages(self, stages: Iterable[str] = STAGES, wait: bool = True) -> None:
        """One worker a stage, started at the same time; names are new, so that owners can be told apart."""
        self._generation += 1
        for stage in stages:
            slots = self.slots.get(stage, 128)
            self.workers[stage] = self._launch_worker(stage, f"{stage}{self._generation}", slots=slots)
        for stage in stages if wait else ():
            self._await_worker(self.workers[stage])

    def kill_workers(self, stages: Iterable[str] = STAGES) -> None:
        """SIGKILL, all of them before the first is waited for."""
        doomed = [self.workers.pop(stage) for stage in stages]
        for worker in doomed:
            worker.require_alive()
        for worker in doomed:
            os.killpg(worker.pid, signal.SIGKILL)
        for worker in doomed:
            worker.kill()
            self.processes.remove(worker)

    # -- the rest -------------------------------------------------------------------------------

    def restart_redis(self) -> None:
        """A crash, then a new server on the same port and append-only file."""
        self.redis.crash()
        self.redis = self.redis.restarted()

    def restart_gateway(self) -> None:
        """SIGKILL, then a new one on the same port."""
        self.gateway.kill()
        self.processes.remove(self.gateway)
        self.gateway = self.start_gateway()

    # -- rollouts -------------------------------------------------------------------------------

    def gates(self) -> Path:
        """A directory whose gates are all shut."""
        self.gates_made += 1
        directory = self.directory / f"gates{self.gates_made}"
        directory.mkdir()
        return directory

    def submit(self, count: int, gates: Path | None = None, **limits: float) -> list[str]:
        """Rollouts that will pass the gates."""
        requests = [
            RolloutRequest(
                handler="gated",
                id=new_id(),
                task={"gates": str(gates or "")},
                limits=limits,
            )
            for _ in range(count)
        ]
        self.client.submit(requests)
        return [request.id for request in requests]

    def submit_up_to(self, stage: str, count: int) -> tuple[list[str], Path]:
        """Rollouts that get as far as a stage and stay in it, and their gates."""
        gates = self.gates()
        for earlier in STAGES[: STAGES.index(stage)]:
            (gates / earlier).touch()
        return self.submit(count, gates), gates

    def fields(self, ids: Sequence[str], *names: str) -> list[list[str | None]]:
        """These fields of each record."""
        with self.redis.client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(f"rollout:{{{rollout_id}}}", *names)
            return pipe.execute()

    def wait_for_held(self, ids: Sequence[str], stage: str, count: int, worker: str = "") -> None:
        """Until a worker, or the one of that name, holds so many of them in a stage."""

        def held() -> int:
            pairs = self.fields(ids, "state", "owner")
            owners = [owner for state, owner in pairs if state == ENTERED[stage] and owner]
            return sum(owner.startswith(f"{worker}@" if worker else "") for owner in owners)

        wait_until(lambda: held() >= count, PATIENCE_S, f"{count} leases in {stage} {worker}")

    def wait_for_arrived(self, gates: Path, stage: str, count: int) -> None:
        """Until the handlers of so many rollouts stand at the gate.

        A rollout is held before that: its worker may not have read Redis's answer yet.
        """
        wait_until(
            lambda: len(list(gates.glob(f"{stage}.*"))) >= count, PATIENCE_S, f"{count} handlers in {stage}"
        )

    def states(self, ids: Sequence[str]) -> Counter[str]:
        """How many of them are in which state."""
        return Counter(state for (state,) in self.fields(ids, "state"))

    def all_ended(self, ids: Sequence[str]) -> bool:
        return sum(self.states(ids)[state] for state in TERMINAL_STATES) == len(ids)

    def record_count(self, ids: Sequence[str]) -> int:
        """How many of the ids have a record."""
        return self.redis.client.exists(*(f"rollout:{{{rollout_id}}}" for rollout_id in ids))

    def cancel(self, rollout_id: str) -> None:
        """Cancel, as often as it takes while connections are cut."""

        def cancelled() -> bool:
            try:
                return bool(self.client.cancel(rollout_id))
            except ApiError:
                return False

        wait_until(cancelled, PATIENCE_S, f"the cancel of {rollout_id} to be heard")

    def wait_for_ends(self, ids: Sequence[str]) -> None:
        wait_until(lambda: self.all_ended(ids), PATIENCE_S, f"{len(ids)} rollouts to end")

    # -- the count ------------------------------------------------------------------------------

    def count(self, ids: Sequence[str]) -> dict[str, int]:
        """What became of the rollouts, by the API's records and by Redis' own accounts.

        Returns:
            `submitted`, `ended`, `ended_twice`, `lost`, `leftovers` and `wrong`; details of what should be 0
            are printed.
        """
        records = {item.id: item for item in self._records(ids)}
        stream = Counter(entry["id"] for _, entry in self.redis.client.xrange("results"))
        lost = [i for i in ids if i not in records or not records[i].state.terminal or not stream[i]]
        twice = [i for i in ids if stream[i] > 1] + [
            item.id for item in records.values() if sum(e.state.terminal for e in item.timeline) > 1
        ]
        faults = {
            "lost": lost,
            "ended_twice": sorted(set(twice)),
            "leftovers": self._leftovers(ids),
            "wrong": [why for item in records.values() for why in _wrong(item)] + self._wrong_counts(),
        }
        for name, what in faults.items():
            if what:
                print(f"{name}: {what[:5]}{' …' if len(what) > 5 else ''}", flush=True)
        ended = sum(stream[i] > 0 for i in ids)
        return {
            "submitted": len(ids),
            "ended": ended,
            **{name: len(what) for name, what in faults.items()},
        }

    def _records(self, ids: Sequence[str]) -> list[Rollout]:
        records = []
        for rollout_id in ids:
            try:
                records.append(self.client.get(rollout_id, include="summary"))
            except ApiError as error:
                if error.status != 404:
                    raise
        return records

    def _leftovers(self, ids: Sequence[str]) -> list[str]:
        client = self.redis.client
        mine = set(ids)
        traces = [f"due {i}" for i in client.zrange("rollouts:due", 0, -1) if i in mine]
        traces += [f"pin {i}" for i in client.hkeys("backends:pins") if i in mine]
        for line in client.scan_iter("fair:waiting:*"):
            traces += [f"waiting {i}" for i in client.zrange(line, 0, -1) if i in mine]
        for place in client.scan_iter("ahead:*"):
            traces += [f"{place} {i}" for i in client.smembers(place) if i in mine]
        traces += [
            f"load {i} {load}" for i, load in client.zrange("backends:load", 0, -1, withscores=True) if load
        ]
        leases = self.fields(ids, "owner", "lease")
        return traces + [f"lease {i}" for i, lease in zip(ids, leases, strict=True) if any(lease)]

    def _wrong_counts(self) -> list[str]:
        """The counters against the records themselves, all of the service's."""
        client = self.redis.client
        names = [name for name in client.scan_iter("rollout:{*}", count=1000) if name.endswith("}")]
        with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(name, "state")
            real = Counter(pipe.execute())
        counted = {state: int(n) for state, n in client.hgetall("rollouts:counts").items() if int(n)}
        indexed = {s.value: n for s in State if (n := client.zcard(f"rollouts:state:{s}"))}
        wrong = [] if counted == real else [f"counts {counted}, records {dict(real)}"]
        return wrong + ([] if indexed == real else [f"index {indexed}, records {dict(real)}"])

    def require_exact(self, ids: Sequence[str]) -> None:
        """Every rollout ended exactly once, with nothing left and every count right."""
        self.wait_for_ends(ids)
        assert self.count(ids) == {
            "submitted": len(ids),
            "ended": len(ids),
            "lost": 0,
            "ended_twice": 0,
            "leftovers": 0,
            "wrong": 0,
        }


def _wrong(item: Rollout) -> list[str]:
    """What is not as it must be in an ended record."""
    scored = item.state in (State.COMPLETED, State.TIMED_OUT) and not item.drop
    wrong = []
    if (item.reward is not None) != scored:
        wrong.append(f"{item.id} is {item.state}, drop {item.drop}, with reward {item.reward}")
    task = item.request.task
    if scored and "answer" not in task and item.reward not in task.get("rewards", [task.get("reward", 1.0)]):
        wrong.append(f"{item.id} has reward {item.reward}")
    if item.drop and not item.drop_reason:
        wrong.append(f"{item.id} is dropped without a reason")
    if item.timeline[-1].state is not item.state:
        wrong.append(f"{item.id} ends its timeline with {item.timeline[-1].state}")
    fences = [event.fence for event in item.timeline]
    if fences != sorted(fences):
        wrong.append(f"{item.id} has fences out of order: {fences}")
    return wrong
