"""Overhead of one shell command in our sandbox, and in what others do instead, in the same run.

Milliseconds from the call to the returned output, medians; the methods take turns of ten commands:

ours            SyncSandboxClient.bash in an Apptainer sandbox without network
tmux_polled     what OpenHands did: tmux, screen read every 0.5 s, 0.1 s to clear it (`_tmux_shell.py`)
tmux_wait_for   tmux without poll and pause: the prompt reports to `tmux wait-for`
swe_rex         BashSession of SWE-ReX's LocalRuntime on this machine, in this process
pexpect         pexpect.replwrap.bash() on this machine, with pexpect's defaults
apptainer_exec  a new container of our unpacked image for each command
host_pty        the floor: bash on a pseudo terminal of this machine, no container

A processor that has idled wakes up slowly. What a command takes that comes after a pause of 50 ms is under
`actions.echo_after_pause`.

Then 60 commands of the kind `sleep D; echo done`, D from an exponential distribution with a mean of 0.385 s,
through ours and tmux_polled.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import _shells as shells
from benchmarks._harness import report
from benchmarks._latency import (
    end_in_order_on_sigterm,
    private_directory,
    private_host,
    say,
    spread_ms,
    take_turns,
    timed,
)
from benchmarks._tmux_shell import AwaitedTmux, PolledTmux
from sandbox import paths
from sandbox.images import ImageStore

WORKLOAD_MEAN_S = 0.385
WORKLOAD_SEED = 20251121
LINES = 2000
TURN = 10
PAUSE_S = 0.05
WORKLOAD_COMMANDS = 60
DETAILS = 10
"""Repetitions of each action but `echo hi`."""
SHORT = 5
"""In the short form polled tmux and the details are repeated this many times less often."""


@dataclass(frozen=True)
class Action:
    """A command, and whether an output of it is right."""

    command: str
    is_right: Callable[[str, str], bool]
    """Of the method's name and the output."""


def actions() -> dict[str, Action]:
    """The details measured besides `echo hi`; that of `cd` is judged by the `pwd` that follows."""
    outside = {path.name for path in Path("/usr/bin").iterdir()}
    rootfs = ImageStore().rootfs("base", paths.sandbox_user())
    inside = {path.name for path in (rootfs / "usr/bin").iterdir()}

    def lists_all(method: str, output: str) -> bool:
        names = {word.strip("'") for word in output.split()}
        return names == (inside if method in ("ours", "apptainer_exec") else outside)

    return {
        "ls": Action("ls /usr/bin", lists_all),
        "2000_lines": Action(
            f"seq {LINES}", lambda _, output: output.split() == list(map(str, range(1, LINES + 1)))
        ),
        "cd": Action("cd /usr", lambda _, output: output.strip() == ""),
    }


class Bench:
    """All methods, and how many wrong outputs each has given."""

    def __init__(self, stack: ExitStack):
        """Everything is started here and ends with `stack`."""
        directory = stack.enter_context(private_directory())
        directory.chmod(0o711)  # the container's user passes through
        state = directory / "host"
        for name in ("polled", "awaited", "exec"):
            (directory / name).mkdir()
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "HOME": str(directory),
        }
        stack.enter_context(private_host(state, warm=0))
        self.polled = PolledTmux(directory / "polled", env)
        self.methods = {
            "ours": shells.Ours(state),
            "tmux_polled": self.polled,
            "tmux_wait_for": AwaitedTmux(directory / "awaited", env),
            "swe_rex": shells.SweRex(),
            "pexpect": shells.Pexpect(),
            "apptainer_exec": shells.ApptainerExec(directory / "exec"),
            "host_pty": shells.HostPty(env),
        }
        for name, method in self.methods.items():
            stack.callback(method.close)
            method.start()
            say(f"started {name}")
        self.wrong = dict.fromkeys(self.methods, 0)

    def time(self, name: str, action: Action) -> float:
        """Seconds that one action takes; a wrong output is counted."""
        said = []
        seconds = timed(lambda: said.append(self.methods[name].run(action.command)))
        self.wrong[name] += not action.is_right(name, said[0])
        return seconds

    def time_all(self, action: Action, count: int, count_polled: int) -> dict[str, list[float]]:
        """Seconds of each method, in turns."""
        calls = {name: partial(self.time, name, action) for name in self.methods}
        repetitions = dict.fromkeys(calls, count) | {"tmux_polled": count_polled}
        return take_turns(calls, repetitions, TURN)

    def time_after_pause(self, action: Action, count: int) -> dict[str, list[float]]:
        """The same of those that wait for nothing but the shell, each time after a pause."""

        def call(name: str) -> float:
            time.sleep(PAUSE_S)
            return self.time(name, action)

        names = ("ours", "host_pty")
        return take_turns({name: partial(call, name) for name in names}, dict.fromkeys(names, count))

    def check_directory(self) -> None:
        """Whether `cd /usr` has lasted; the answer is a part of being right."""
        action = Action("pwd", lambda _, output: output.strip() == "/usr")
        for name in self.methods:
            self.time(name, action)


def workload(count: int) -> list[float]:
    """Seconds of `count` commands: always the same, with exactly the mean that is aimed at."""
    draw = random.Random(WORKLOAD_SEED)
    raw = [draw.expovariate(1.0) for _ in range(count)]
    return [value * WORKLOAD_MEAN_S / statistics.mean(raw) for value in raw]


def time_workload(bench: Bench, count: int) -> dict[str, float]:
    """Mean seconds a command of the workload, of ours and polled tmux, in turns."""
    names = ("ours", "tmux_polled")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number, duration in enumerate(workload(count)):
        action = Action(f"sleep {duration:.4f}; echo done", lambda _, output: output.strip() == "done")
        for name in names[:: 1 if number % 2 else -1]:
            seconds[name].append(bench.time(name, action))
    return {name: round(statistics.mean(values), 4) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="`echo hi` a round and method (default 50)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="how often that is done (default 2); 1 is the short form, in which the slow polled tmux, the "
        "other actions and the workload are done a fifth as often",
    )
    options = parser.parse_args()
    end_in_order_on_sigterm()
    with ExitStack() as stack:
        run(Bench(stack), options.count, options.rounds)


def run(bench: Bench, count: int, rounds: int) -> None:
    share = SHORT if rounds == 1 else 1
    echo = Action("echo hi", lambda _, output: output.strip() == "hi")
    for name in bench.methods:
        bench.time(name, echo)
    total, polled = count * rounds, max(1, count * rounds // share)
    times = {"echo": bench.time_all(echo, total, polled)}
    times["echo_after_pause"] = bench.time_after_pause(echo, max(1, count // share))
    say(f"echo: ours {spread_ms(times['echo']['ours'])}")
    few = max(1, DETAILS // share)
    for name, action in actions().items():
        times[name] = bench.time_all(action, few, few)
        if name == "cd":
            bench.check_directory()
        say(f"{name}: ours {spread_ms(times[name]['ours'])}")
    commands = max(1, WORKLOAD_COMMANDS // share)
    means = time_workload(bench, commands)
    median = {name: statistics.median(values) for name, values in times["echo"].items()}
    ours = spread_ms(times["echo"]["ours"])
    report(
        "shell_latency",
        {
            "p50_ms": ours["p50_ms"],
            "p95_ms": ours["p95_ms"],
            "speedup_vs_tmux": round(median["tmux_polled"] / median["ours"], 1),
            "speedup_vs_swe_rex": round(median["swe_rex"] / median["ours"], 1),
            "ratio_to_floor": round(median["ours"] / median["host_pty"], 2),
            "workload_mean_s": means["ours"],
            "workload_mean_tmux_s": means["tmux_polled"],
        },
        actions={
            action: {name: spread_ms(values) for name, values in by_method.items()}
            for action, by_method in times.items()
        },
        wrong=bench.wrong,
        tmux_polled_first_looks=bench.polled.first_looks,
        workload={"commands": commands, "mean_sleep_s": WORKLOAD_MEAN_S},
        count=count,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
