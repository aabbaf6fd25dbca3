"""Sandboxes on Apptainer against `apptainer exec` of the same unpacked image, user, flags and command.

cloned       from the request to the output of the first command, of a host that keeps no sandbox ready
cold         the same where the template has to be started first, of which sandboxes are clones
warm         the same of a host that keeps 4 ready; they are ready again before anything else is measured
exec         `apptainer exec … bash -c 'echo hi'`, from its start to its end
exec_output  the same to its output: the stricter, for now both have done the same, and have an end to come

They take turns. Then 40 starts at once until the last output, against 40 execs; then 100 sandboxes held at
once: PSS of their processes and the template's, plus their files where these lie in memory. At the end all is
stopped, and what is left is counted. The short form does a tenth of everything. More in
docs/benchmarks.md#sandbox_start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks import harness
from sandbox import processes, trees
from sandbox.host_client import HostClient
from sandbox.spec import SandboxInfo, SandboxSpec

T = TypeVar("T")

SPEC = SandboxSpec(runtime="apptainer")
WARM = 4
AT_ONCE = 40
HELD = 100
SHORT = 10
"""Of everything, the short form does this part only."""
SETTLE_S = 10.0
HOST_FILES = {"host.lock", "host.log", "start.lock"}
"""What a sandbox host that was stopped leaves in its directory on purpose."""


class Bench:
    """Two hosts, one with a warm pool, and plain Apptainer."""

    def __init__(self, stack: ExitStack):
        """Everything is started here and ends with `stack`, the hosts before what is counted at the end."""
        self._directory = stack.enter_context(harness.private_directory())
        self._processes: set[psutil.Process] = set()
        """Those of all sandboxes, to look for them when they are gone."""
        self._wait = stack.enter_context(asyncio.Runner()).run
        self.hosts = stack.enter_context(ExitStack())
        self._apptainer = harness.PlainApptainer(self._directory / "apptainer")
        self.warm = self.hosts.enter_context(harness.private_host(self._directory / "host-warm", WARM))
        self._wait(self.warm.keep_warm(SPEC, WARM))
        self._wait(harness.pool_is_full(self.warm, WARM))
        self.cold = self.hosts.enter_context(harness.private_host(self._directory / "host-cold", 0))
        self._release(self._start(1))
        self._cold_pid = self._wait(self.cold.stats())["pid"]
        self.ends: list[float] = []
        self.exec_outputs: list[float] = []

    def time_start(self, host: HostClient) -> float:
        """Seconds from the request to the first output; the sandbox is ended, and the pool full after it."""
        began = time.perf_counter()
        info = self._wait(harness.first_output(host, SPEC))
        seconds = time.perf_counter() - began
        if info.warm != (host is self.warm):
            raise RuntimeError(f"sandbox {info.id} was {'warm' if info.warm else 'cold'}, and should not be")
        self._processes |= harness.family([info.pid])
        self.ends.append(harness.timed(lambda: self._wait(host.release(info.id))))
        self._wait(harness.pool_is_full(self.warm, WARM))
        return seconds

    def time_cold(self) -> float:
        """The same of a host whose template has ended."""
        for template in self._templates():
            os.killpg(os.getpgid(template.pid), signal.SIGKILL)
            while processes.start_time(template.pid) is not None:
                time.sleep(0.001)  # no longer, for after a pause all takes longer, and the others have none
        return self.time_start(self.cold)

    def _templates(self) -> list[psutil.Process]:
        """Those of the host without a pool, of which its sandboxes are clones."""
        templates = []
        for process in psutil.Process(self._cold_pid).children(recursive=True):
            with suppress(psutil.Error):
                of_template = any(part.endswith("/template.py") for part in process.cmdline())
                if of_template and not processes.is_init(process.pid):
                    templates.append(process)
        return templates

    def time_exec(self) -> float:
        """Seconds of an exec from start to end; those to its output are noted."""
        began = time.perf_counter()
        with self._exec("echo hi"):
            self.exec_outputs.append(time.perf_counter() - began)
        return time.perf_counter() - began

    def starts_per_s(self, count: int) -> float:
        """Starts a second, `count` of them at once."""
        began = time.perf_counter()
        infos = self._start(count)
        seconds = time.perf_counter() - began
        self._release(infos)
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
        infos = self._start(count)
        files = self.cold.state
        file_system = subprocess.check_output(["stat", "-f", "-c", "%T", files], text=True).strip()
        in_memory = trees.usage(files, 1 << 62, 1 << 62)[0] if file_system == "tmpfs" else 0
        pids = [info.pid for info in infos] + [template.pid for template in self._templates()]
        processes_mb = harness.memory_mb(pids, "pss")
        self._processes |= harness.family(info.pid for info in infos)
        counted = self.count()  # shows that what is not found at the end would have been
        self._release(infos)
        return {
            "sandboxes": count,
            "processes_mb": processes_mb,
            "files_in_memory_mb": in_memory / 1e6,
            "counted": counted,
        }

    def count(self) -> dict[str, int]:
        """What belongs to the sandboxes of both hosts, now."""
        name = str(self._directory)
        named = {p for p in psutil.process_iter(["cmdline", "environ"]) if name in str(p.info)}
        return {
            "processes": sum(process.is_running() for process in named | self._processes),
            "mounts": Path("/proc/mounts").read_text().count(name),
            "sockets": Path("/proc/net/unix").read_text().count(name),
            "files": sum(path.name not in HOST_FILES for path in self._directory.glob("host-*/*")),
        }

    def count_at_rest(self) -> dict[str, int]:
        """The same when nothing is left, or after some seconds."""
        with suppress(TimeoutError):
            harness.wait_until(lambda: not any(self.count().values()), SETTLE_S, "the end of everything")
        return self.count()

    def _exec(self, script: str) -> subprocess.Popen[str]:
        container = self._apptainer.start(script)
        if (line := container.stdout.readline()) != "hi\n":
            raise RuntimeError(f"apptainer exec printed {line!r} instead of 'hi'")
        return container

    def _start(self, count: int) -> list[SandboxInfo]:
        return self._wait(at_once(harness.first_output(self.cold, SPEC) for _ in range(count)))

    def _release(self, infos: list[SandboxInfo]) -> None:
        self._processes |= harness.family(info.pid for info in infos)
        self._wait(at_once(self.cold.release(info.id) for info in infos))


async def at_once(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of them all."""
    return await asyncio.gather(*coroutines)


def main(options: harness.Options) -> harness.Report:
    with ExitStack() as stack:
        return measure(Bench(stack), options)


def measure(bench: Bench, options: harness.Options) -> harness.Report:
    """Measure all; `bench` is stopped on the way."""
    share = SHORT if options.rounds == 1 else 1
    methods = {
        "warm": partial(bench.time_start, bench.warm),
        "cloned": partial(bench.time_start, bench.cold),
        "cold": bench.time_cold,
        "exec": bench.time_exec,
    }
    seconds = harness.take_turns(methods, dict.fromkeys(methods, max(1, options.count // share)))
    seconds |= {"exec_output": bench.exec_outputs, "end": bench.ends}
    times = {name: harness.spread_ms(values) for name, values in seconds.items()}
    harness.say(f"one by one: {times}")
    cores, at_once = os.cpu_count() or 1, AT_ONCE // share
    widths = sorted({cores, 2 * cores, at_once})
    rates: dict[str, list[float]] = {name: [] for name in ("ours", *map(str, widths))}
    for _ in range(options.rounds):
        rates["ours"].append(bench.starts_per_s(at_once))
        for width in widths:
            rates[str(width)].append(bench.execs_per_s(at_once, width))
    harness.say(f"{at_once} at once, starts/s by the number begun at a time: {rates}")
    execs = max((rates[str(width)] for width in widths), key=statistics.median)
    held = bench.held(HELD // share)
    harness.say(f"held: {held}")
    bench.hosts.close()
    leftovers = bench.count_at_rest()
    p50_ms = {name: spread["p50_ms"] for name, spread in times.items()}
    return {
        "results": {
            **{
                f"{start}_ratio_to_{peer}": p50_ms[start] / p50_ms[peer]
                for start in ("cold", "cloned", "warm")
                for peer in ("exec", "exec_output")
            },
            "starts_ratio_to_exec": statistics.median(harness.ratios(rates["ours"], execs)),
            "starts_per_s": statistics.median(rates["ours"]),
            "execs_per_s": statistics.median(execs),
            **{f"{name}_p50_ms": value for name, value in p50_ms.items()},
            "held_100_mb": (held["processes_mb"] + held["files_in_memory_mb"]) / held["sandboxes"] * 100,
            "leftovers": sum(leftovers.values()),
        },
        "times": times,
        "at_once": {"count": at_once, "starts_per_s": rates},
        "held": held,
        "left": leftovers,
    }


if __name__ == "__main__":
    harness.run(main, count=50, rounds=3)
