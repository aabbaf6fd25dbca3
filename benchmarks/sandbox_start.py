"""Sandboxes on Apptainer against `apptainer exec` of the same unpacked image, user, flags and command.

cold         from the request to the output of the first command, of a host that keeps no sandbox ready
warm         the same of a host that keeps 4 ready; they are ready again before anything else is measured
exec         `apptainer exec … bash -c 'echo hi'`, from its start to its end
exec_output  the same to its output: the stricter, for now both have done the same, and have an end to come

They take turns; ratios are of medians. Then 40 cold starts at once until the last output, against 40 execs
that wait after their output as our shells do: `starts_ratio_to_exec`, execs begun as many at a time as is
fastest for them (one a core, two a core, all). Then 100 sandboxes held at once: PSS of their processes (RSS,
which is more, where PSS is closed to us), plus their files where these lie in memory. At the end all is
stopped, and what is left is counted. The short form does a fifth of everything.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness
from benchmarks.harness import PlainApptainer
from sandbox import trees
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxInfo, SandboxSpec

SPEC = SandboxSpec(runtime="apptainer")
WARM = 4
AT_ONCE = 40
HELD = 100
SHORT = 5
"""Of everything, the short form does this part only."""
POOL_S = 300.0
SETTLE_LOOKS = 100
HOST_FILES = {"host.lock", "host.log", "start.lock"}
"""What a sandbox host that was stopped leaves in its directory on purpose."""


class Census:
    """What belongs to the sandboxes below one directory: processes, mounts, sockets, files."""

    def __init__(self, directory: Path):
        """`directory`: of the hosts' directories, and new."""
        self._directory = directory
        self._known: set[psutil.Process] = set()

    def note(self, pid: int) -> None:
        """Remember the processes of a sandbox, to look for them when it is gone."""
        self._known |= set(family(pid))

    def count(self) -> dict[str, int]:
        """How many of each kind there are now."""
        name = str(self._directory)
        named = {p for p in psutil.process_iter(["cmdline", "environ"]) if name in str(p.info)}
        return {
            "processes": sum(process.is_running() for process in named | self._known),
            "mounts": Path("/proc/mounts").read_text().count(name),
            "sockets": Path("/proc/net/unix").read_text().count(name),
            "files": sum(path.name not in HOST_FILES for path in self._directory.glob("host-*/*")),
        }

    def count_at_rest(self) -> dict[str, int]:
        """The same when nothing is left, or after some seconds."""
        for _ in range(SETTLE_LOOKS):
            if not any((counts := self.count()).values()):
                break
            time.sleep(0.1)
        return counts


class Bench:
    """Two hosts, one with a warm pool, and plain Apptainer."""

    def __init__(self, stack: ExitStack):
        """Everything is started here and ends with `stack`, the hosts before what is counted at the end."""
        self.directory = stack.enter_context(harness.private_directory())
        self.census = Census(self.directory)
        self.loop = stack.enter_context(asyncio.Runner()).get_loop()
        self.hosts = stack.enter_context(ExitStack())
        self.apptainer = PlainApptainer(self.directory / "apptainer")
        self.warm = self.hosts.enter_context(harness.private_host(self.directory / "host-warm", WARM))
        self.wait(self.warm.keep_warm(SPEC, WARM))
        self.wait(self._pool_is_full())
        self.cold = self.hosts.enter_context(harness.private_host(self.directory / "host-cold", 0))
        self.wait(self._release(self.wait(self._many(1))))
        self.ends: list[float] = []
        self.exec_outputs: list[float] = []

    def wait(self, coroutine: Coroutine) -> Any:
        """Run it to its end."""
        return self.loop.run_until_complete(coroutine)

    def time_start(self, host: HostClient) -> float:
        """Seconds from the request to the first output; the sandbox is ended, and the pool full after it."""
        began = time.perf_counter()
        info = self.wait(self._first_output(host))
        seconds = time.perf_counter() - began
        if info.warm != (host is self.warm):
            raise RuntimeError(f"sandbox {info.id} was {'warm' if info.warm else 'cold'}, and should not be")
        self.census.note(info.pid)
        self.ends.append(harness.timed(lambda: self.wait(host.release(info.id))))
        self.wait(self._pool_is_full())
        return seconds

    def time_exec(self) -> float:
        """Seconds of an exec from start to end; those to its output are noted."""
        began = time.perf_counter()
        with self._exec("echo hi"):
            self.exec_outputs.append(time.perf_counter() - began)
        return time.perf_counter() - began

    def starts_per_s(self, count: int) -> float:
        """Cold starts a second, `count` of them at once."""
        began = time.perf_counter()
        infos = self.wait(self._many(count))
        seconds = time.perf_counter() - began
        self.wait(self._release(infos))
        return count / seconds

    def execs_per_s(self, count: int, width: int) -> float:
        """Execs a second until `count` have printed; `width` are begun at a time, none ends meanwhile."""
        began = time.perf_counter()
        with ThreadPoolExecutor(width) as pool:
            containers = list(pool.map(self._exec, ["echo hi; read"] * count))
        seconds = time.perf_counter() - began
        for container in containers:
            container.communicate("\n")
        return count / seconds

    def held(self, count: int) -> dict[str, Any]:
        """What `count` sandboxes hold together."""
        infos = self.wait(self._many(count))
        for info in infos:
            self.census.note(info.pid)
        files = self.cold.state
        file_system = subprocess.check_output(["stat", "-f", "-c", "%T", files], text=True).strip()
        in_memory = trees.usage(files, 1 << 62, 1 << 62)[0] if file_system == "tmpfs" else 0
        totals = {
            "sandboxes": count,
            "processes_mb": sum(memory_bytes(p) for info in infos for p in family(info.pid)) / 1e6,
            "files_in_memory_mb": in_memory / 1e6,
            "counted": self.census.count(),  # shows that what is not found at the end would have been
        }
        self.wait(self._release(infos))
        return totals

    def _exec(self, script: str) -> subprocess.Popen[str]:
        container = self.apptainer.start(script)
        if (line := container.stdout.readline()) != "hi\n":
            raise RuntimeError(f"apptainer exec printed {line!r} instead of 'hi'")
        return container

    async def _first_output(self, host: HostClient) -> SandboxInfo:
        info = await host.start(SPEC)
        async with SandboxClient(info.socket) as client:
            output = (await client.bash("echo hi")).output
        if output != "hi\n":
            raise RuntimeError(f"the first command in sandbox {info.id} printed {output!r} instead of 'hi'")
        return info

    async def _many(self, count: int) -> list[SandboxInfo]:
        return await asyncio.gather(*(self._first_output(self.cold) for _ in range(count)))

    async def _release(self, infos: list[SandboxInfo]) -> None:
        for info in infos:
            self.census.note(info.pid)
        await asyncio.gather(*(self.cold.release(info.id) for info in infos))

    async def _pool_is_full(self) -> None:
        async with asyncio.timeout(POOL_S):
            while (stats := await self.warm.stats())["warm"] < WARM or stats["known"] > WARM:
                await asyncio.sleep(0.01)


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def memory_bytes(process: psutil.Process) -> int:
    """PSS, which divides a shared page among its users; RSS, which is more, where PSS is closed to us."""
    try:
        return process.memory_full_info().pss
    except psutil.AccessDenied:
        return process.memory_info().rss


def main() -> None:
    options = harness.make_parser(__doc__, count=50, rounds=3).parse_args()
    with ExitStack() as stack:
        run(Bench(stack), options.count, options.rounds)


def run(bench: Bench, count: int, rounds: int) -> None:
    """Measure and report; `bench` is stopped on the way."""
    share = SHORT if rounds == 1 else 1
    methods = {
        "warm": lambda: bench.time_start(bench.warm),
        "cold": lambda: bench.time_start(bench.cold),
        "exec": bench.time_exec,
    }
    seconds = harness.take_turns(methods, dict.fromkeys(methods, max(1, count // share)))
    seconds |= {"exec_output": bench.exec_outputs, "end": bench.ends}
    times = {name: harness.spread_ms(values) for name, values in seconds.items()}
    harness.say(f"one by one: {times}")
    cores, at_once = os.cpu_count() or 1, AT_ONCE // share
    widths = sorted({cores, 2 * cores, at_once})
    rates: dict[str, list[float]] = {name: [] for name in ("ours", *map(str, widths))}
    for _ in range(rounds):
        rates["ours"].append(bench.starts_per_s(at_once))
        for width in widths:
            rates[str(width)].append(bench.execs_per_s(at_once, width))
    harness.say(f"{at_once} at once, starts/s by the number begun at a time: {rates}")
    execs = max((rates[str(width)] for width in widths), key=statistics.median)
    held = bench.held(HELD // share)
    harness.say(f"held: {held}")
    bench.hosts.close()
    remains = bench.census.count_at_rest()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    held_mb = (held["processes_mb"] + held["files_in_memory_mb"]) / held["sandboxes"]
    harness.report(
        "sandbox_start",
        {
            "cold_ratio_to_exec": round(middle["cold"] / middle["exec"], 3),
            "cold_ratio_to_exec_output": round(middle["cold"] / middle["exec_output"], 3),
            "warm_ratio_to_exec": round(middle["warm"] / middle["exec"], 3),
            "warm_ratio_to_exec_output": round(middle["warm"] / middle["exec_output"], 3),
            "starts_ratio_to_exec": harness.summary(
                [a / b for a, b in zip(rates["ours"], execs, strict=True)]
            )["median"],
            "starts_per_s": harness.summary(rates["ours"])["median"],
            "execs_per_s": harness.summary(execs)["median"],
            **{f"{name}_p50_ms": spread["p50_ms"] for name, spread in times.items()},
            "held_mb_per_sandbox": round(held_mb, 2),
            "leftovers": sum(remains.values()),
        },
        times=times,
        at_once={"count": at_once, "starts_per_s": rates},
        held=held,
        left=remains,
        count=count,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
