"""Overhead of one shell command in our sandbox, and in what others do instead, in the same run.

From the call to the returned output of `echo hi`; the methods take turns of ten commands:

ours            SandboxClient.bash in an Apptainer sandbox without network
tmux_polled     what OpenHands did: tmux, screen read every 0.5 s, 0.1 s to clear it
tmux_wait_for   tmux without poll and pause: the prompt reports to `tmux wait-for`
swe_rex         BashSession of SWE-ReX's LocalRuntime on this machine, in this process
pexpect         pexpect.replwrap.bash() on this machine, with pexpect's defaults
apptainer_exec  a new container of our unpacked image for each command
host_pty        the floor: bash on a pseudo terminal of this machine, no container

Ratios are of medians, but those to polled tmux of means: its first look races the prompt, so that a command
takes 0.12 s or 0.62 s. A processor that has idled wakes up slowly, so four of them are measured after pauses
of 50 ms and 1 s, too: keys that end so. Then 60 commands `sleep D; echo done`, D from an exponential
distribution with a mean of 0.385 s, through ours and polled tmux. The short form does a tenth of it.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from functools import partial

from benchmarks import _harness as harness
from benchmarks import _shells as shells

WORKLOAD_MEAN_S = 0.385
WORKLOAD_SEED = 20251121
WORKLOAD_COMMANDS = 60
TURN = 10
PAUSES_S = {"_after_50ms": 0.05, "_after_1s": 1.0}
PAUSED = ("ours", "host_pty", "tmux_polled", "swe_rex")
AFTER_PAUSE = 10
"""Repetitions after each pause."""
SHORT = 10
"""In the short form what is slow is repeated this many times less often."""

Times = dict[str, list[float]]


class Bench:
    """All methods, and how many wrong outputs each has given."""

    def __init__(self, stack: ExitStack):
        """Everything is started here and ends with `stack`."""
        directory = stack.enter_context(harness.private_directory())
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb", "LANG": "C.UTF-8"}
        env["HOME"] = str(directory)
        host = stack.enter_context(harness.private_host(directory / "host", warm=0))
        self.looks: list[int] = []
        methods = {
            "ours": shells.ours(host),
            "tmux_polled": shells.tmux_polled(directory / "polled", env, self.looks),
            "tmux_wait_for": shells.tmux_wait_for(directory / "awaited", env),
            "swe_rex": shells.swe_rex(),
            "pexpect": shells.pexpect_repl(),
            "apptainer_exec": shells.apptainer_exec(directory / "exec"),
            "host_pty": shells.host_pty(env),
        }
        self.methods = {name: stack.enter_context(method) for name, method in methods.items()}
        self.wrong = dict.fromkeys(self.methods, 0)
        for name in self.methods:
            self.time(name)

    def time(self, name: str, pause_s: float = 0.0, command: str = "echo hi", output: str = "hi") -> float:
        """Seconds that a command takes, after a pause; a wrong output is counted."""
        outputs: list[str] = []
        time.sleep(pause_s)
        seconds = harness.timed(lambda: outputs.append(self.methods[name](command)))
        self.wrong[name] += outputs[0].strip() != output
        return seconds

    def time_workload(self, count: int) -> dict[str, float]:
        """Mean seconds a command of the workload, whose mean sleep is always exactly the one aimed at."""
        draw = random.Random(WORKLOAD_SEED)
        raw = [draw.expovariate(1.0) for _ in range(count)]
        seconds: Times = {"ours": [], "tmux_polled": []}
        for value in raw:
            command = f"sleep {value * WORKLOAD_MEAN_S / statistics.mean(raw):.4f}; echo done"
            for name, values in seconds.items():
                values.append(self.time(name, command=command, output="done"))
        return {name: round(statistics.mean(values), 4) for name, values in seconds.items()}


def results_of(times: Times, suffix: str) -> dict[str, float]:
    """Keys of ours against each of the others."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    means = {name: statistics.mean(values) for name, values in times.items()}
    peers = times.keys() - {"ours", "host_pty", "tmux_polled"}
    return {
        f"ratio_to_floor{suffix}": round(middle["ours"] / middle["host_pty"], 2),
        f"mean_speedup_vs_tmux_polled{suffix}": round(means["tmux_polled"] / means["ours"], 1),
        **{f"speedup_vs_{name}{suffix}": round(middle[name] / middle["ours"], 1) for name in sorted(peers)},
        f"p50_ms{suffix}": round(middle["ours"] * 1e3, 3),
        f"floor_p50_ms{suffix}": round(middle["host_pty"] * 1e3, 3),
    }


def main() -> None:
    options = harness.make_parser(__doc__, count=50, rounds=2).parse_args()
    share = SHORT if options.rounds == 1 else 1
    count = options.count * options.rounds
    with ExitStack() as stack:
        bench = Bench(stack)
        calls = {name: partial(bench.time, name) for name in bench.methods}
        repetitions = dict.fromkeys(calls, count) | {"tmux_polled": max(2, count // share)}
        times = {"": harness.take_turns(calls, repetitions, TURN)}
        for suffix, pause_s in PAUSES_S.items():
            calls = {name: partial(bench.time, name, pause_s) for name in PAUSED}
            times[suffix] = harness.take_turns(calls, dict.fromkeys(calls, max(2, AFTER_PAUSE // share)))
        spreads = {
            f"echo{suffix}": {k: harness.spread_ms(v) for k, v in of.items()} for suffix, of in times.items()
        }
        harness.say(f"{spreads}")
        commands = WORKLOAD_COMMANDS // share
        means = bench.time_workload(commands)
    results: dict[str, float] = {}
    for suffix, by_method in times.items():
        results |= results_of(by_method, suffix)
    harness.report(
        "shell_latency",
        results
        | {
            "p95_ms": spreads["echo"]["ours"]["p95_ms"],
            "workload_mean_sleep_s": WORKLOAD_MEAN_S,
            "workload_mean_s": means["ours"],
            "workload_mean_tmux_polled_s": means["tmux_polled"],
        },
        actions=spreads,
        wrong=bench.wrong,
        tmux_polled_looks={"first": bench.looks.count(1), "all": len(bench.looks)},
        workload_commands=commands,
        count=options.count,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
