"""What it costs that turns outlive their worker, and what a killed worker still costs.

* `turn_cost_ratio`: a turn with one tool call (`execute_bash` in a real sandbox) at an engine in a process of
  its own that answers at once, with the turn log and numbered operations of the sandbox against without. One
  rollout at a time, the two in turns; ratio of the medians of all turns.
* `redis_bytes_per_token`: what the logs of these rollouts take in Redis, for each id in them. The tokens of
  the demo model are one to three characters of text each.
* `takeover_s_over_lease`: from the SIGKILL of a RUN worker, less the lease, until the slowest of the rollouts
  that it held has made a new turn by another worker; the largest of all kills. The reaper is as shipped.
* `wasted_tokens_share`: of the tokens that engines sampled under a SIGKILL of a RUN worker every ten seconds,
  those in no trajectory. `wasted_tokens_share_0_2_0`: the same with the workers of the release before, in the
  same run; -1 where its commit is not in this copy, and in the short form.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tarfile
import time
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx

from benchmarks import harness
from rollout.schema import Backend, RolloutRequest, new_id
from rollout.trajectory import Message
from sandbox.client import SandboxClient
from sandbox.spec import SandboxSpec
from services.state import keys
from services.state.backends.store import BackendStore
from services.state.redis import connect
from services.state.turns.entries import Appended, Begun, Sampled, decode
from services.state.turns.store import TurnStore
from tests.helpers.diary import Diary
from tests.helpers.fake_engine import fake_engine
from tests.helpers.llm_servers import DEMO_MODEL
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import ROOT, Stack, wait_until
from workers.agent.llm import session
from workers.agent.loop import AgentLoop
from workers.agent.placement import Placements
from workers.agent.router import BackendRouter
from workers.agent.turns import TurnLog
from workers.held import Held

SCRIPT = "tests.helpers.diary:script"
RELEASE = "4f85e171fc421e742080d3d064d790ac219f36f4"
LEASE_S = 5.0
KILL_EVERY_S = 10.0
AT_ONCE = 12
STEP_MS = 1.5
"""A turn of some 70 tokens takes 0.1 s then."""
PATIENCE_S = 300


class Turns:
    """Rollouts in this process, with the log and without."""

    def __init__(self, redis_url: str, host, http) -> None:
        self.client, self.host, self.http = connect(redis_url), host, http
        self.placements = Placements(BackendStore(self.client))
        self.store = TurnStore(self.client)
        self.bytes = self.tokens = 0

    async def play(self, lines: int, logged: bool) -> list[float]:
        """Seconds of each turn of one rollout."""
        rollout_id = new_id()
        record = {
            "fence": 1,
            "owner": "w",
            "attempt": 1,
            "deadline": int(2000 * time.time()),
            "state": "running",
        }
        self.client.hset(keys.record(rollout_id), mapping=record)

        async def write(at, entries):
            return await self.placements.send(self.store.append(rollout_id, 1, 1, at, entries))

        box = await self.host.start(SandboxSpec())
        sandbox = SandboxClient(box.socket)
        log = TurnLog((), write, Held(rollout_id, None, fence=1)) if logged else TurnLog()
        if logged:
            await log.follow(sandbox)
        router = BackendRouter(rollout_id, self.placements, self.http, fence=1)
        agent = AgentLoop(RolloutRequest(handler="diary"), 0, router, Diary.tools, False, log)
        await agent.start([Message(role="user", content=f"{lines} lines, pause 0")])
        times = []
        for _ in range(lines):
            began = time.perf_counter()
            turn, _ = await agent.query()
            agent.observe(turn, await agent.act(turn, sandbox))
            times.append(time.perf_counter() - began)
        await log.flush()
        if logged:
            log_key = keys.turns(rollout_id, 1)
            self.bytes += self.client.memory_usage(log_key, samples=0)
            entries = decode(self.store.read(rollout_id, 1))
            self.tokens += sum(len(e.ids) // 4 for e in entries if isinstance(e, Begun | Sampled | Appended))
        await router.release()
        await sandbox.close()
        await self.host.release(box.id)
        return times


async def turn_cost(server, host, options) -> dict[str, float]:
    """The figures of single turns."""
    with fake_engine(script=SCRIPT, step_ms=0.01) as engine:
        async with session() as http:
            turns = Turns(server.url, host, http)
            backend = Backend(
                id="fake", url=engine.url, model="fake", tokenizer=str(DEMO_MODEL), max_model_len=32768
            )
            BackendStore(turns.client).put(backend)
            times: dict[bool, list[float]] = {True: [], False: []}
            for number in range(2 * options.rounds + 2):
                logged = bool((number + number // 2) % 2)
                took = await turns.play(options.count, logged)
                if number > 1:  # the first two load what all need
                    times[logged] += took[1:]
    medians = {logged: 1000 * statistics.median(took) for logged, took in times.items()}
    return {
        "turn_cost_ratio": medians[True] / medians[False],
        "turn_ms": medians[True],
        "turn_ms_without_log": medians[False],
        "redis_bytes_per_token": turns.bytes / turns.tokens,
    }


# ------------------------------------------------------------------------------------ real workers


@contextmanager
def service(directory: Path, engine, tree: Path | None = None):
    """A stack with the diary's handler, two RUN workers and the rest; of the release in `tree`, if given."""
    env = {
        "ROLLOUT_HANDLERS": "tests.helpers.diary:Diary",
        "ROLLOUT_LEASE_S": str(LEASE_S),
        "ROLLOUT_REAPER_INTERVAL_S": "1",
        "ROLLOUT_REQUEUE_S": "30",
    }
    with harness.private_directory() as sandboxes, Stack(directory, sandboxes, env) as stack:
        stack.client.add_backend(engine.url, id="fake")
        fleet = Fleet(stack, tree)
        fleet.start("init,eval")
        for _ in range(2):
            fleet.start("run")
        try:
            yield fleet
        finally:
            stop_host(sandboxes)


class Fleet:
    """Workers that come and go."""

    def __init__(self, stack: Stack, tree: Path | None) -> None:
        self.stack, self.tree, self.number = stack, tree, 0
        self.running: list = []

    def start(self, queues: str) -> None:
        self.number += 1
        name = f"{queues.partition(',')[0]}{self.number}"
        if self.tree is None:
            worker = self.stack.start_worker(queues, name)
        else:
            command = [
                "sh",
                "-c",
                f'cd {self.tree} && exec "$@"',
                "sh",
                *Stack.worker_argv(queues, name),
                "-c64",
            ]
            worker = self.stack.start(name, command, {"PYTHONPATH": str(self.tree)})
            self.stack._await_worker(worker)
        if queues == "run":
            self.running.append(worker)

    def submit(self, count: int, lines: int, pause_s: float) -> list[str]:
        task = {"lines": lines, "pause_s": pause_s}
        requests = [RolloutRequest(handler="diary", id=new_id(), task=task) for _ in range(count)]
        self.stack.client.submit(requests)
        return [request.id for request in requests]

    def held(self, ids: list[str], name: str) -> list[str]:
        hget = self.stack.redis.client.hget
        return [i for i in ids if (hget(keys.record(i), "owner") or "").startswith(f"{name}@")]

    def entries(self, rollout_id: str) -> int:
        return self.stack.redis.client.llen(keys.turns(rollout_id, 1))

    def all_ended(self, ids: list[str]) -> bool:
        return all(self.stack.client.get(i, include="summary").state.terminal for i in ids)


def takeovers(fleet: Fleet, kills: int) -> list[float]:
    """Seconds beyond the lease, of each kill."""
    seconds = []
    ids = fleet.submit(AT_ONCE, 400, 0.3)
    wait_until(lambda: all(fleet.entries(i) > 3 for i in ids), PATIENCE_S, "turns of all")
    for _ in range(kills):
        victim = fleet.running.pop(0)
        held = fleet.held(ids, victim.name)
        victim.kill()
        began = time.monotonic()
        before = {i: fleet.entries(i) for i in held}
        wait_until(lambda: all(fleet.entries(i) > before[i] for i in held), PATIENCE_S, "new turns")  # noqa: B023
        seconds.append(time.monotonic() - began - LEASE_S)
        fleet.start("run")
    fleet.stack.client.cancel_many(ids=ids)
    wait_until(lambda: fleet.all_ended(ids), PATIENCE_S, "their ends")
    return seconds


def wasted(fleet: Fleet, engine, kills: int) -> float:
    """The share of the tokens that were sampled for nothing."""
    sampled_before = sampled(engine)
    ids = fleet.submit(AT_ONCE, 30 * kills, 0.0)
    wait_until(lambda: fleet.held(ids, fleet.running[0].name), PATIENCE_S, "the first RUN")
    for _ in range(kills):
        time.sleep(KILL_EVERY_S)
        victim = fleet.running.pop(0)
        victim.kill()
        fleet.start("run")
    wait_until(lambda: fleet.all_ended(ids), PATIENCE_S, "the ends of all")
    kept = sum(fleet.stack.client.get(i).trajectory.sampled_tokens for i in ids)
    return 1 - kept / (sampled(engine) - sampled_before)


def sampled(engine) -> int:
    """Tokens that an engine has sampled so far."""
    return sum(call["sampled"] for call in httpx.get(f"{engine.url}/calls").json())


def release_before(directory: Path) -> Path | None:
    """The tree of release 0.2.0 with the diary's handler; None: it is not in this copy."""
    made = subprocess.run(["git", "archive", RELEASE], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        return None
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(directory, filter="data")
    diary = (ROOT / "tests" / "helpers" / "diary.py").read_text()
    diary = diary.replace("    repeatable = EVERY_STAGE\n", "").replace("EVERY_STAGE, ", "")
    (directory / "tests" / "helpers" / "diary.py").write_text(diary)
    return directory


def main(options: harness.Options) -> harness.Report:
    with (
        harness.private_directory() as state,
        harness.private_redis() as server,
        harness.private_host(state, 0) as host,
    ):
        results = asyncio.run(turn_cost(server, host, options))
    harness.say(f"turns: {results}")
    kills = options.kills if options.rounds > 1 else 1
    with fake_engine(script=SCRIPT, step_ms=STEP_MS) as engine:
        with harness.private_directory() as directory, service(directory, engine) as fleet:
            seconds = takeovers(fleet, kills)
            results["takeover_s_over_lease"] = max(seconds)
            results["wasted_tokens_share"] = wasted(fleet, engine, kills)
        harness.say(f"takeovers: {seconds}, wasted {results['wasted_tokens_share']}")
        results["wasted_tokens_share_0_2_0"] = wasted_before(engine, kills) if options.rounds > 1 else -1.0
    return {"results": results, "takeovers_s": seconds, "lease_s": LEASE_S, "kills": kills}


def wasted_before(engine, kills: int) -> float:
    """The share of the release before; -1: it is not there."""
    with harness.private_directory() as tree, harness.private_directory() as directory:
        before = release_before(tree)
        if before is None:
            return -1.0
        with service(directory, engine, before) as fleet:
            return wasted(fleet, engine, kills)


if __name__ == "__main__":
    harness.run(main, count=30, rounds=8, kills={"type": int, "default": 5, "help": "kills of RUN workers"})
