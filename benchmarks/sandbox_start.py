"""Starting, holding and ending sandboxes on Apptainer, and the usual ways to a container, in the same run.

warm      a sandbox from the pool of a host that keeps 4 ready, until the output of its first command is back;
          the pool is full again before anything else is measured
cold      the same from a host that keeps none ready
exec      `apptainer exec --writable-tmpfs` on the SIF with `python3 -c`, from start to end
unpacked  the same on the unpacked image that our sandboxes run from, with their first command; how many times
          longer a cold start takes, with its server, filter and limits, is `cold_ratio_to_exec` (of the exec
          until its output is there: `ratios.cold_to_output_of_exec`)
instance  `apptainer instance start` and the first `exec` in it; `instance_stop` ends it

They take turns; medians. Then: 40 cold starts at once until the last one's first output, and 100 sandboxes
held at once: PSS of all their processes, plus their files where these lie in memory. At the end everything is
stopped and what is left of it is counted: processes, mounts, sockets, files.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

from benchmarks._containers import Census, PlainApptainer, memory_bytes, scratch_bytes
from benchmarks._harness import report, summary
from benchmarks._latency import (
    end_in_order_on_sigterm,
    private_directory,
    private_host,
    say,
    spread_ms,
    take_turns,
    timed,
)
from sandbox import processes
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxInfo, SandboxSpec

SPEC = SandboxSpec(runtime="apptainer")
WARM = 4
AT_ONCE = 40
HELD = 100
INSTANCE_SHARE = 5
"""`instance stop` waits for seconds on some machines; instances are started this many times less often."""
SHORT = 5
"""Of everything, the short form does this part only."""
POOL_S = 300.0


class WrongOutput(RuntimeError):
    """A sandbox's first command did not print what it should."""


class Bench:
    """Two hosts, one with a warm pool, and plain Apptainer."""

    def __init__(self, stack: ExitStack):
        """Everything is started here and ends with `stack`, the hosts before what is counted at the end."""
        self.directory = stack.enter_context(private_directory())
        self.directory.chmod(0o711)  # the containers' user passes through
        self.states = [self.directory / "warm", self.directory / "cold"]
        self.census = Census(self.directory, self.states)
        self.before = self.census.count()
        self.loop = stack.enter_context(asyncio.Runner()).get_loop()
        self.hosts = stack.enter_context(ExitStack())
        home = self.directory / "apptainer"
        home.mkdir()
        self.apptainer = PlainApptainer(home)
        self.hosts.callback(self.apptainer.close)
        self.warm = self.hosts.enter_context(private_host(self.states[0], WARM))
        self.wait(self.warm.keep_warm(SPEC, WARM))
        self.wait(self._pool_is_full())
        self.cold = self.hosts.enter_context(private_host(self.states[1], 0))
        self.wait(self._release(self.cold, self.wait(self._first_output(self.cold))))
        self.ends: list[float] = []
        self.unpacked_outputs: list[float] = []
        self.instance_stops: list[float] = []

    def wait(self, coroutine: Coroutine) -> Any:
        """Run it to its end."""
        return self.loop.run_until_complete(coroutine)

    def time_warm(self) -> float:
        """Seconds from a claim to the first output."""
        seconds = self._time_and_end(self.warm, warm=True)
        self.wait(self._pool_is_full())
        return seconds

    def time_cold(self) -> float:
        """Seconds from nothing to the first output."""
        return self._time_and_end(self.cold, warm=False)

    def time_unpacked(self) -> float:
        """Seconds of an exec from start to end; when its output came is noted."""
        outputs: list[float] = []
        seconds = timed(lambda: outputs.append(self.apptainer.exec_unpacked()))
        self.unpacked_outputs += outputs
        return seconds

    def time_instance(self) -> float:
        """Seconds to the first output of an instance."""
        names = []
        seconds = timed(lambda: names.append(self.apptainer.start_instance()))
        self.instance_stops.append(timed(lambda: self.apptainer.stop_instance(names[0])))
        return seconds

    def starts_per_s(self, count: int) -> float:
        """Cold starts a second, `count` of them at once."""
        infos: list[SandboxInfo] = []
        seconds = timed(lambda: infos.extend(self.wait(self._many(count))))
        for info in infos:
            self.census.note(info.pid)
        self.wait(self._release(self.cold, *infos))
        return count / seconds

    def held(self, count: int) -> dict[str, Any]:
        """What `count` sandboxes hold together."""
        infos = self.wait(self._many(count))
        for info in infos:
            self.census.note(info.pid)
        of_processes, by_rss = memory_bytes([info.pid for info in infos])
        of_files, file_system = scratch_bytes(self.states[1])
        daemon = self.wait(self.cold.stats())["pid"]
        found = {
            "sandboxes": count,
            "processes_mb": round(of_processes / 1e6, 1),
            "processes_by_rss": by_rss,
            "files_in_memory_mb": round(of_files / 1e6, 1),
            "file_system": file_system,
            "host_daemon_mb": round(processes.proportional_bytes(daemon) / 1e6, 1),
            # Shows that what is not found at the end would have been.
            "counted": self.census.count(),
        }
        found["end_all_s"] = round(timed(lambda: self.wait(self._release(self.cold, *infos))), 3)
        return found

    def leftovers(self) -> dict[str, int]:
        """Stop everything; what is there now and was not before."""
        self.hosts.close()
        return {kind: number - self.before[kind] for kind, number in self.census.count_at_rest().items()}

    def _time_and_end(self, host: HostClient, warm: bool) -> float:
        infos: list[SandboxInfo] = []
        seconds = timed(lambda: infos.append(self.wait(self._first_output(host))))
        if infos[0].warm != warm:
            raise WrongOutput(f"a sandbox was {'cold' if warm else 'warm'}, and should not have been")
        self.census.note(infos[0].pid)
        self.ends.append(timed(lambda: self.wait(host.release(infos[0].id))))
        return seconds

    async def _first_output(self, host: HostClient) -> SandboxInfo:
        info = await host.start(SPEC)
        async with SandboxClient(info.socket) as client:
            output = (await client.bash("echo hi")).output
        if output != "hi\n":
            raise WrongOutput(f"the first command in sandbox {info.id} printed {output!r} instead of 'hi'")
        return info

    async def _many(self, count: int) -> list[SandboxInfo]:
        return await asyncio.gather(*(self._first_output(self.cold) for _ in range(count)))

    async def _release(self, host: HostClient, *infos: SandboxInfo) -> None:
        await asyncio.gather(*(host.release(info.id) for info in infos))

    async def _pool_is_full(self) -> None:
        deadline = time.monotonic() + POOL_S
        while (stats := await self.warm.stats())["warm"] < WARM or stats["known"] > WARM:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the warm pool was not full after {POOL_S:g} s: {stats}")
            await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="warm and cold starts, one by one (default 50)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="how often 40 are started at once (default 3); 1 is the short form, in which everything is a "
        "fifth as much: starts, those at once, and those held, whose memory is scaled to 100",
    )
    options = parser.parse_args()
    end_in_order_on_sigterm()
    with ExitStack() as stack:
        run(Bench(stack), options.count, options.rounds)


def run(bench: Bench, count: int, rounds: int) -> None:
    share = SHORT if rounds == 1 else 1
    count_each = max(1, count // share)
    methods = {
        "warm": bench.time_warm,
        "cold": bench.time_cold,
        "exec": lambda: timed(bench.apptainer.exec),
        "unpacked": bench.time_unpacked,
        "instance": bench.time_instance,
    }
    repetitions = dict.fromkeys(methods, count_each) | {"instance": max(1, count_each // INSTANCE_SHARE)}
    times = {name: spread_ms(values) for name, values in take_turns(methods, repetitions).items()}
    times["unpacked_output"] = spread_ms(bench.unpacked_outputs)
    times["end"] = spread_ms(bench.ends)
    times["instance_stop"] = spread_ms(bench.instance_stops)
    say(f"one by one: {times}")
    starts = [bench.starts_per_s(AT_ONCE // share) for _ in range(rounds)]
    say(f"at once: {starts} starts/s")
    held = bench.held(HELD // share)
    say(f"held: {held}")
    left = bench.leftovers()
    middle = {name: value["p50_ms"] for name, value in times.items()}
    held_mb = (held["processes_mb"] + held["files_in_memory_mb"]) * HELD / held["sandboxes"]
    report(
        "sandbox_start",
        {
            "warm_p50_ms": middle["warm"],
            "cold_p50_ms": middle["cold"],
            "cold_ratio_to_exec": round(middle["cold"] / middle["unpacked"], 2),
            "starts_per_s": summary(starts)["median"],
            "end_p50_ms": middle["end"],
            "held_100_mb": round(held_mb, 1),
            "leftovers": sum(left.values()),
        },
        times=times,
        ratios={
            "cold_to_output_of_exec": round(middle["cold"] / middle["unpacked_output"], 2),
            "exec_to_cold": round(middle["exec"] / middle["cold"], 2),
            "exec_to_warm": round(middle["exec"] / middle["warm"], 1),
            "instance_to_cold": round(middle["instance"] / middle["cold"], 2),
            "instance_to_warm": round(middle["instance"] / middle["warm"], 1),
            "instance_stop_to_end": round(middle["instance_stop"] / middle["end"], 1),
        },
        starts_per_s=summary(starts) | {"at_once": AT_ONCE // share},
        held=held,
        left=left,
        count=count,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
