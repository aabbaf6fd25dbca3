"""Sandboxes by the hundred while workers and the host are killed: `python -m tests.soak.sandboxes`.

Worker processes start sandboxes, work in them and release them. Now and then one of them, or the node's
sandbox host, gets SIGKILL. What a killed worker held is released by its owner's name, as the reaper does.
Work in other sandboxes must go on and give right answers, and in the end nothing may be left: no process,
mount, socket or directory. Prints one JSON object; exits 1 when something is left or was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sandbox import processes
from sandbox.client import SandboxClient
from sandbox.errors import SandboxError, SandboxGone
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.helpers.sandboxes import leftovers

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 5
COMMANDS = 5
START_TRIES = 20
QUIET_S = 30.0
"""After the end, for the last processes to be gone."""


# -- a worker ----------------------------------------------


async def rollout(host: HostClient, runtime: str, owner: str, number: int) -> None:
    """One sandbox from start to release. Prints `done`, or what was wrong."""
    for _ in range(START_TRIES):
        try:
            info = await host.start(SandboxSpec(runtime=runtime, owner=owner))
            break
        except SandboxGone:  # the host was killed before it could answer; a stage would be tried again, too
            await asyncio.sleep(0.1)
    else:
        raise SandboxError(f"no sandbox in {START_TRIES} tries")
    async with SandboxClient(info.socket) as client:
        await client.bash(f"NUMBER={number}; setsid bash -c 'trap \"\" TERM INT HUP; sleep 1000' & total=0")
        for turn in range(COMMANDS):
            result = await client.bash("total=$((total + NUMBER)); sleep 0.05; echo $total >>x; tail -n 1 x")
            answer = result.output.splitlines()[-1:]  # bash may tell of the background job before it
            if answer != [str(number * (turn + 1))] or result.exit_code:
                print(f"wrong {number} {turn} {result}", flush=True)
    await host.release(info.id)
    print(f"done {'warm' if info.warm else 'cold'}", flush=True)


async def worker(state: Path, runtime: str, owner: str, first: int, count: int, at_once: int) -> None:
    """`count` rollouts, `at_once` of them at a time."""
    host = HostClient(state)
    slots = asyncio.Semaphore(at_once)

    async def life(number: int) -> None:
        async with slots:
            await rollout(host, runtime, owner, number)

    await asyncio.gather(*(life(first + number) for number in range(count)))


# -- who starts and kills them ----------------------------------------------


class Soak:
    """One run, and what came of it."""

    def __init__(self, total: int, at_once: int, kills: int, runtime: str, seed: int):
        self.total, self.at_once, self.runtime = total, at_once, runtime
        self.random = random.Random(seed)
        self.kills = {"worker": kills, "host": kills}
        self.killed = {"worker": 0, "host": 0}
        self.state = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
        self.host = HostClient(self.state)
        self.done = {"warm": 0, "cold": 0}
        self.wrong: list[str] = []
        self.issued = 0
        self.adopted = 0

    async def run(self) -> dict:
        """All of it; the result to print."""
        before = machine()
        began = time.monotonic()
        killer = asyncio.create_task(self._kill_hosts())
        try:
            await asyncio.gather(*(self._keep_working(number) for number in range(WORKERS)))
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
            self.adopted += (await self.host.stats()).get("adopted", 0)
            await self.host.stop()
        traces = await settled(self.state, before)
        shutil.rmtree(self.state, ignore_errors=True)
        return {
            "sandboxes": sum(self.done.values()),
            **self.done,
            "killed": self.killed,
            "adopted": self.adopted,
            "wrong": self.wrong,
            "left": traces,
            "seconds": round(time.monotonic() - began, 1),
        }

    async def _keep_working(self, number: int) -> None:
        """A worker after the other until enough sandboxes have been through."""
        share = self.at_once // WORKERS
        life = 0
        while self.issued < self.total:
            count = min(max(share * 2, 4), self.total - self.issued)
            first, self.issued = self.issued, self.issued + count
            life += 1
            owner = f"worker-{number}/{life}"
            argv = [sys.executable, "-m", "tests.soak.sandboxes", "--worker", owner]
            argv += ["--state", str(self.state), "--runtime", self.runtime]
            argv += ["--first", str(first), "--total", str(count), "--at-once", str(share)]
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            doomed = self.killed["worker"] < self.kills["worker"] and self.random.random() < 0.5
            finished = await self._listen(
                process, stop_after=self.random.randint(1, count) if doomed else None
            )
            if process.returncode == -signal.SIGKILL and doomed:
                self.killed["worker"] += 1
                await self.host.release_owner(owner)
                self.issued -= count - finished
            elif process.returncode:
                errors = (await process.stderr.read()).decode()[-2000:]
                self.wrong.append(f"worker {owner} ended with {process.returncode}: {errors}")
                return

    async def _listen(self, process: asyncio.subprocess.Process, stop_after: int | None) -> int:
        """Count what a worker finishes; kill it after so many."""
        finished = 0
        async for line in process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word != "done":
                self.wrong.append(line.decode().strip())
                continue
            finished += 1
            self.done[rest] += 1
            if finished == stop_after:
                process.kill()
        await process.wait()
        return finished

    async def _kill_hosts(self) -> None:
        """At even distances through the run."""
        for number in range(self.kills["host"]):
            while sum(self.done.values()) < (number + 1) * self.total / (self.kills["host"] + 1):
                await asyncio.sleep(0.05)
            while not await self.host.list():  # those that are only starting would not be adopted
                await asyncio.sleep(0.02)
            stats = await self.host.stats()
            if stats:
                self.adopted += stats["adopted"]
                os.kill(stats["pid"], signal.SIGKILL)
                self.killed["host"] += 1


def machine() -> dict[str, set[str]]:
    """What could be left behind: all processes, and mounts as every process of ours sees them."""
    return {
        "processes": {f"{pid}@{processes.start_time(pid)}" for pid in processes.all_pids()},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
    }


async def settled(state: Path, before: dict[str, set[str]]) -> list[str]:
    """What is left of the run once nothing changes any more; [] is what is wanted."""
    deadline = time.monotonic() + QUIET_S
    while True:
        after = machine()
        traces = leftovers(state)
        sockets = Path("/proc/net/unix").read_text().splitlines()
        traces += [f"socket {line.split()[-1]}" for line in sockets if f" {state}/" in line]
        traces += [f"mount {line}" for line in after["mounts"] - before["mounts"]]
        traces += [
            f"process {name}"
            for name in after["processes"] - before["processes"]
            if belongs_to(int(name.split("@")[0]), state)
        ]
        if not traces or time.monotonic() > deadline:
            return traces
        await asyncio.sleep(0.2)


def belongs_to(pid: int, state: Path) -> bool:
    """Whether a process was started for this run: others on the machine are not our business."""
    for what in ("mountinfo", "cmdline", "environ"):  # one inside a container shows in what it has mounted
        try:
            if str(state).encode() in Path(f"/proc/{pid}/{what}").read_bytes():
                return True
        except OSError:
            continue
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total", type=int, default=500, help="sandboxes to put through")
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--kills", type=int, default=5, help="of workers, and as many of the host")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work = worker(
            options.state, options.runtime, options.worker, options.first, options.total, options.at_once
        )
        asyncio.run(work)
        return 0
    soak = Soak(options.total, options.at_once, options.kills, options.runtime, options.seed)
    result = asyncio.run(soak.run())
    print(json.dumps(result))
    complete = result["sandboxes"] >= options.total
    return 0 if complete and not result["left"] and not result["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
