"""What it costs that turns outlive their worker, and what a killed worker still costs.

* `turn_cost_ratio`: a turn with one tool call (`execute_bash` in a real sandbox) at an engine in a process of
  its own that answers at once, with the turn log and numbered operations of the sandbox against without. One
  rollout of each kind, which do their turns in turn; ratio of the medians of all turns.
* `redis_bytes_per_token`: what the logs of these rollouts take in Redis, for each id in them. The tokens of
  the demo model are one to three characters of text each.
* `takeover_s_over_lease`: from the SIGKILL of a RUN worker, less the lease, until the slowest of the rollouts
  that it held has made a new turn by another worker; the largest of all kills. The reaper is as shipped.
* `wasted_tokens_share`: of the tokens that engines sampled under a SIGKILL of a RUN worker every ten seconds,
  those in no trajectory, with 16 rollouts at once whose turns take 0.1 s of model time.
  `wasted_tokens_share_0_2_0`: the same with the workers of the release before, in the same run; null where
  its commit is not in this copy, and in the short form.

Settings are those of the other benchmarks of the service, as shipped, but for the lease: `--lease-s`.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx

from benchmarks import harness
from benchmarks.harness import PATIENCE_S, Process, Stack, wait_until
from rollout.schema import Backend, RolloutRequest, new_id
from rollout.trajectory import Message
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from services.state import keys
from services.state.backends.store import BackendStore
from services.state.redis import LoopConnection, connect
from services.state.turns.entries import Appended, Begun, Sampled, decode
from services.state.turns.store import TurnStore, read
from tests.helpers.diary import Diary, spoken
from tests.helpers.fake_engine import fake_engine
from tests.helpers.llm_servers import DEMO_MODEL, LLMServer
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import NODE, ROOT
from workers.agent.llm import session
from workers.agent.loop import AgentLoop
from workers.agent.placement import Placements
from workers.agent.router import BackendRouter
from workers.agent.turns import TurnLog
from workers.held import Held

RELEASE = "4f85e171fc421e742080d3d064d790ac219f36f4"
"""Tag 0.2.0: the last one without a turn log."""
KILL_EVERY_S = 10.0
STEP_MS = 1.5
"""A turn of some 70 tokens takes 0.1 s then."""


@cache
def trivial(*_: object) -> list[int]:
    """For `fake_engine --script`: always the same call, so that the engine costs next to nothing."""
    return spoken("execute_bash", {"command": "true"})


def script(prompt: list[int], number: int) -> list[int]:
    """The same without an argument that `cache` could not keep."""
    return trivial()


class Form(NamedTuple):
    """How much is done under kills."""

    kills: int
    lease_s: float
    every_s: float = KILL_EVERY_S
    at_once: int = 16
    lines: int = 40
    """Turns of a rollout but the last: about half of the time between two kills."""


class Turns:
    """A rollout in this process, with the log or without."""

    def __init__(self, server: Server, logged: bool) -> None:
        self.server, self.logged, self.id = server, logged, new_id()

    async def begin(self) -> None:
        """Play the first turn, which also waits for a place on the backend."""
        server, host = self.server, self.server.host
        hour = int(1000 * (time.time() + 3600))
        record = {"fence": 1, "owner": "w", "attempt": 1, "deadline": hour, "state": "running"}
        server.client.hset(keys.record(self.id), mapping=record)
        self.box = await host.start(SandboxSpec())
        self.sandbox = SandboxClient(self.box.socket)
        held = Held(self.id, None, fence=1)
        self.log = TurnLog((), self.write, held) if self.logged else TurnLog()
        if self.logged:
            await self.log.follow(self.sandbox)
        self.router = BackendRouter(self.id, server.placements, server.http, fence=1)
        request = RolloutRequest(handler="diary")
        self.agent = AgentLoop(request, 0, self.router, Diary.tools, False, self.log)
        await self.agent.start([Message(role="user", content="Do nothing.")])
        await self.play()

    async def write(self, at: int, entries: Sequence[bytes]) -> dict[str, Any]:
        append = self.server.turns.append(self.id, 1, 1, at, entries)
        return await self.server.placements.send(append)

    async def play(self) -> float:
        """Seconds of a turn."""
        began = time.perf_counter()
        turn, _ = await self.agent.query()
        self.agent.observe(turn, await self.agent.act(turn, self.sandbox))
        return time.perf_counter() - began

    async def end(self) -> tuple[int, int]:
        """What the log takes in Redis (bytes), and the ids that are in it."""
        await self.log.flush()
        await self.router.release()
        await self.sandbox.close()
        await self.server.host.release(self.box.id)
        size = self.server.client.memory_usage(keys.turns(self.id, 1), samples=0) or 0
        entries = decode(read(self.server.client, self.id, 1))
        return size, sum(len(e.ids) // 4 for e in entries if isinstance(e, Begun | Sampled | Appended))


class Server:
    """What such rollouts share."""

    def __init__(self, redis_url: str, host: HostClient, http: aiohttp.ClientSession) -> None:
        self.client, self.host, self.http = connect(redis_url), host, http
        self.placements = Placements(BackendStore(self.client), LoopConnection(redis_url))
        self.turns = TurnStore(self.client)


async def turn_cost(redis_url: str, host: HostClient, options: harness.Options) -> tuple[dict, dict]:
    """The figures of single turns, and what explains them."""
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    size = tokens = 0
    async with session() as http:
        with fake_engine(script="benchmarks.resume:script", step_ms=0.001) as engine:
            server = Server(redis_url, host, http)
            fields = {"url": engine.url, "tokenizer": str(DEMO_MODEL), "max_model_len": 32768}
            BackendStore(server.client).put(Backend(id="fake", model="fake", **fields))
            for _ in range(options.rounds):
                pair = {logged: Turns(server, logged) for logged in times}
                for logged, turns in pair.items():
                    await turns.begin()
                    times[logged].append([])
                for _, logged in harness.in_turns(pair, options.count):
                    times[logged][-1].append(await pair[logged].play())
                for turns in pair.values():
                    more = await turns.end()
                    size, tokens = size + more[0], tokens + more[1] * turns.logged
    spreads = {logged: harness.spread_ms([*chain.from_iterable(took)]) for logged, took in times.items()}
    by_round = {logged: [statistics.median(took) for took in rounds] for logged, rounds in times.items()}
    results = {
        "turn_cost_ratio": spreads[True]["p50_ms"] / spreads[False]["p50_ms"],
        "turn_ms": spreads[True]["p50_ms"],
        "turn_ms_without_log": spreads[False]["p50_ms"],
        "redis_bytes_per_token": size / tokens,
    }
    ratio_by_round = harness.summary(harness.ratios(by_round[True], by_round[False]))
    shown = {"with_log": spreads[True], "without_log": spreads[False]}
    return results, {"turns": shown, "ratio_by_round": ratio_by_round}


# -- real workers --------------------------------------------------------------------------------------


class Fleet:
    """Workers that come and go, of the release in `tree`, if given."""

    def __init__(self, stack: Stack, tree: Path | None) -> None:
        self.stack, self.tree, self.number = stack, tree, 0
        started = [self.launch(queues) for queues in ("init,eval", "run", "run")]
        for worker in started:
            self.await_start(worker)
        self.running = started[1:]

    def launch(self, queues: str) -> Process:
        self.number += 1
        name = f"{queues.partition(',')[0]}{self.number}"
        command, env = [*Stack.worker_argv(queues, name), "-c", "64"], {}
        if self.tree is not None:  # Celery looks for its application where it is started
            command = ["sh", "-c", f'cd {self.tree} && exec "$@"', "sh", *command]
            env = {"PYTHONPATH": str(self.tree)}
        return self.stack.start(f"{name}@{NODE}", command, env)

    def await_start(self, worker: Process) -> None:
        harness.await_worker(self.stack, "run" if worker.name.startswith("run") else "init", worker)

    def kill(self) -> Process:
        """SIGKILL for the older worker of RUN; another one is on its way."""
        victim = self.running.pop(0)
        victim.kill()
        return victim

    def replace(self) -> None:
        self.running.append(self.launch("run"))
        self.await_start(self.running[-1])

    def submit(self, count: int, lines: int, pause_s: float) -> list[str]:
        task = {"lines": lines, "pause_s": pause_s}
        limits = {"max_turns": 1000, "max_repeated_actions": None}
        fields = {"handler": "diary", "task": task, "limits": limits}
        return harness.submit(self.stack, [RolloutRequest(id=new_id(), **fields) for _ in range(count)])

    def held(self, ids: list[str], worker: Process) -> list[str]:
        hget = self.stack.redis.client.hget
        return [i for i in ids if (hget(keys.record(i), "owner") or "").startswith(worker.name)]

    def entries(self, rollout_id: str) -> int:
        return self.stack.redis.client.llen(keys.turns(rollout_id, 1))

    def live(self, ids: list[str]) -> list[str]:
        return [i for i in ids if not self.stack.redis.client.hexists(keys.record(i), "finished")]

    def await_ends(self, ids: list[str]) -> None:
        wait_until(lambda: not self.live(ids), PATIENCE_S, "their ends")


@contextmanager
def fleet(engine: LLMServer, lease_s: float, tree: Path | None = None) -> Iterator[Fleet]:
    """A service with the handler of the diary, of which two workers do RUN."""
    env = {"ROLLOUT_HANDLERS": "tests.helpers.diary:Diary", "ROLLOUT_LEASE_S": str(lease_s)}
    with harness.service(**env) as stack:
        stack.client.add_backend(engine.url, id="fake")
        try:
            yield Fleet(stack, tree)
        finally:
            stop_host(stack.sandbox_dir)


def takeovers(workers: Fleet, form: Form) -> list[float]:
    """Seconds beyond the lease, of each kill."""
    seconds = []
    ids = workers.submit(form.at_once, 400, 0.3)
    wait_until(lambda: all(workers.entries(i) > 3 for i in ids), PATIENCE_S, "turns of all")
    for _ in range(form.kills):
        held = workers.held(ids, workers.running[0])
        workers.kill()
        began = time.monotonic()
        before = {i: workers.entries(i) for i in held}
        moved = partial(all_beyond, workers, before)
        wait_until(moved, PATIENCE_S, "new turns")
        seconds.append(time.monotonic() - began - form.lease_s)
        workers.replace()
    workers.stack.client.cancel_many(ids=ids)
    workers.await_ends(ids)
    return seconds


def all_beyond(workers: Fleet, before: dict[str, int]) -> bool:
    """Whether each of these logs has become longer."""
    return bool(before) and all(workers.entries(i) > length for i, length in before.items())


def wasted(workers: Fleet, engine: LLMServer, form: Form) -> dict[str, float]:
    """How many tokens were sampled, in how many rollouts, and the share of them that was for nothing."""
    before = sampled(engine)
    ids = workers.submit(form.at_once, form.lines, 0.0)
    wait_until(lambda: workers.held(ids, workers.running[0]), PATIENCE_S, "the first RUN")
    for _ in range(form.kills):
        due = time.monotonic() + form.every_s
        while time.monotonic() < due:
            if missing := form.at_once - len(workers.live(ids)):
                ids += workers.submit(missing, form.lines, 0.0)
            time.sleep(0.2)
        workers.kill()
        workers.replace()
    workers.await_ends(ids)
    items = [workers.stack.client.get(i) for i in ids]
    kept = sum(item.trajectory.sampled_tokens for item in items if item.trajectory is not None)
    total = sampled(engine) - before
    states = [item.state.value for item in items]
    counts = {state: states.count(state) for state in sorted(set(states))}
    resumed = sum(getattr(item, "resumed", 0) or 0 for item in items)
    return {"share": 1 - kept / total, "sampled": total, "resumed": resumed} | counts


def sampled(engine: LLMServer) -> int:
    """Tokens that the engine has sampled so far."""
    return sum(call["sampled"] for call in httpx.get(f"{engine.url}/calls", timeout=60).json())


def extract_release(directory: Path) -> bool:
    """Whether this copy has release 0.2.0, which is then in the directory, with the diary's handler."""
    made = subprocess.run(["git", "archive", RELEASE], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        return False
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(directory, filter="data")
    diary = (ROOT / "tests" / "helpers" / "diary.py").read_text()
    diary = diary.replace("    repeatable = EVERY_STAGE\n", "").replace("EVERY_STAGE, ", "")
    (directory / "tests" / "helpers" / "diary.py").write_text(diary)
    return True


def main(options: harness.Options) -> harness.Report:
    short = options.rounds == 1
    form = Form(1, 2.0, 2.0, at_once=4, lines=15) if short else Form(options.kills, options.lease_s)
    with (
        harness.private_directory() as state,
        harness.private_redis() as server,
        harness.private_host(state, 0) as host,
    ):
        results, more = asyncio.run(turn_cost(server.url, host, options))
    harness.say(f"turns: {results} {more}")
    waste: dict[str, dict[str, float] | None] = {"ours": None, "0.2.0": None}
    with fake_engine(script="tests.helpers.diary:script", step_ms=STEP_MS) as engine:
        with fleet(engine, form.lease_s) as workers:
            seconds = takeovers(workers, form)
            harness.say(f"takeovers, seconds beyond the lease: {seconds}")
            waste["ours"] = wasted(workers, engine, form)
            harness.say(f"waste: {waste['ours']}")
        with harness.private_directory() as tree:
            if not short and extract_release(tree):
                with fleet(engine, form.lease_s, tree) as workers:
                    waste["0.2.0"] = wasted(workers, engine, form)
    harness.say(f"waste of 0.2.0: {waste['0.2.0']}")
    results["takeover_s_over_lease"] = max(seconds)
    results["wasted_tokens_share"] = waste["ours"]["share"]
    results["wasted_tokens_share_0_2_0"] = waste["0.2.0"] and waste["0.2.0"]["share"]
    return {"results": results, **more, "takeovers_s": seconds, "waste": waste, "form": form._asdict()}


if __name__ == "__main__":
    harness.run(
        main,
        count=30,
        rounds=10,
        kills={"type": int, "default": 4, "help": "of RUN workers (default: %(default)s; short form: 1)"},
        lease_s={"type": float, "default": 5.0, "help": "default: %(default)s; short form: 2"},
    )
