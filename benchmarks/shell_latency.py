"""Overhead of one shell command in our sandbox, and in what others do instead, in the same run.

From the call to the returned output of `echo hi`; seven methods take turns of ten commands, four of them
after pauses of 50 ms and 1 s, too: keys that end so, and `ratio_to_floor_after_pause` is the worse of two.
Ratios are of medians, but those to polled tmux of means. Then 60 commands `sleep D; echo done`, D from an
exponential distribution with a mean of 0.385 s, through ours and polled tmux. The short form does a tenth of
it. More in docs/benchmarks.md#shell_latency.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import secrets
import statistics
import subprocess
import termios
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pexpect.replwrap
import ptyprocess
from swerex.exceptions import CommandTimeoutError
from swerex.runtime.abstract import BashAction, CloseBashSessionRequest, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

from benchmarks import harness
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec

# -- the ways to a shell -------------------------------------------------------------------------------
# Each returns `run(command) -> output`, or a TimedRun; what it starts ends with `stack`. All but ours and
# `apptainer_exec` run on the machine itself, without a container.


Run = Callable[[str], str]
TimedRun = Callable[[str, float], tuple[str, float]]
"""A command and a pause before it, in seconds → its output, and the seconds from the call to that."""

LIMIT_S, MOST_LOOKS = 60.0, 1000
BASH = ["bash", "--noprofile", "--norc", "--noediting"]
POLL_S, CLEAR_S = 0.5, 0.1
"""OpenHands' own."""
FACTS = ("$?", "$!", r"\u", r"\h", "$(pwd)", "$(which python 2>/dev/null || echo)")
"""What OpenHands' prompt tells, found anew for each prompt; here one a line."""
PS1 = "\n" + "\n".join(("<<<prompt", *FACTS, "prompt>>>")) + "\n"
PROMPT = re.compile(r"<<<prompt\s+-?\d+.*?prompt>>>", re.DOTALL)


def timed(run: Run) -> TimedRun:
    """As it is."""

    def timed_run(command: str, pause_s: float) -> tuple[str, float]:
        time.sleep(pause_s)
        began = time.perf_counter()
        output = run(command)
        return output, time.perf_counter() - began

    return timed_run


def awaited(runner: asyncio.Runner, ask: Callable[[str], Awaitable[str]]) -> TimedRun:
    """In a loop that runs, as a worker's does: to begin and end that for each command, with a handler of ^C,
    takes about as long as the client's own work.
    """

    async def timed_ask(command: str, pause_s: float) -> tuple[str, float]:
        time.sleep(pause_s)
        began = time.perf_counter()
        output = await ask(command)
        return output, time.perf_counter() - began

    return lambda command, pause_s: runner.run(timed_ask(command, pause_s))


def ours(stack: ExitStack, host: HostClient) -> TimedRun:
    """The persistent shell of an Apptainer sandbox without network, from outside, as a worker calls it."""
    runner = stack.enter_context(asyncio.Runner())
    info = runner.run(host.start(SandboxSpec(runtime="apptainer")))
    client = SandboxClient(info.socket)
    stack.callback(lambda: runner.run(client.close()))

    async def ask(command: str) -> str:
        return (await client.bash(command, LIMIT_S)).output

    return awaited(runner, ask)


def host_pty(stack: ExitStack, env: dict[str, str]) -> Run:
    """The floor: bash on a pseudo terminal; a second line prints a marker. Right for single lines only."""
    process = ptyprocess.PtyProcess.spawn(BASH, env=env, echo=False, dimensions=(50, 200))
    stack.callback(process.close, force=True)
    attributes = termios.tcgetattr(process.fd)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(process.fd, termios.TCSANOW, attributes)
    half = secrets.token_hex(8)  # typed in two halves, so that nothing but the end of a command matches
    end = f"\x1e{half}{half}\x1e".encode()

    def run(command: str) -> str:
        os.write(process.fd, f"{command}\nprintf '\\036%s%s\\036' {half} {half}\n".encode())
        output = bytearray()
        while not output.endswith(end):
            output += os.read(process.fd, 65536)
        return output[: -len(end)].decode(errors="replace")

    run("PS1= PS2=; unset PROMPT_COMMAND; set +o history")
    return run


def swe_rex(stack: ExitStack) -> TimedRun:
    """SWE-ReX's LocalRuntime in this process, with its defaults: its HTTP server would add to it."""
    for name in ("rex-session", "rex-runtime", "quiet"):  # it reports each action on standard output
        logging.getLogger(name).setLevel(logging.CRITICAL)
    runtime = LocalRuntime(logger=logging.getLogger("quiet"))
    runner = stack.enter_context(asyncio.Runner())

    async def start() -> None:
        # Its own limit for that is 1 s, too little for a loaded machine.
        await runtime.create_session(CreateBashSessionRequest(startup_timeout=LIMIT_S))

    async def ask(command: str) -> str:
        # It waits 0.1 s for its last prompt, whatever limit is set; a loaded machine may miss that, and the
        # session is lost then: a new one takes the command again, which medians do not see.
        while True:
            with suppress(CommandTimeoutError):
                action = BashAction(command=command, timeout=LIMIT_S)
                return (await runtime.run_in_session(action)).output
            await runtime.close_session(CloseBashSessionRequest())
            await start()

    stack.callback(lambda: runner.run(runtime.close()))
    runner.run(start())
    return awaited(runner, ask)


def pexpect_repl(stack: ExitStack) -> Run:
    """pexpect's own wrapper of bash, with its defaults."""
    repl = pexpect.replwrap.bash()
    stack.callback(repl.child.close, force=True)
    return partial(repl.run_command, timeout=LIMIT_S)


class Tmux:
    """One bash in a private tmux server, typed to with `send-keys` and read with `capture-pane`."""

    def __init__(self, stack: ExitStack, directory: Path, env: dict[str, str]):
        """`directory`: for the socket, made here; short. `env`: all that bash gets."""
        directory.mkdir()
        self.socket = directory / "tmux"
        self._env = env
        shell = "bash --noprofile --norc"
        # Long lines and long outputs must not be wrapped or scrolled away.
        self("-f", "/dev/null", "new-session", "-d", "-s", "s", "-x", "1000", "-y", "1000", shell)
        stack.callback(self, "kill-server")
        self("set-option", "-g", "history-limit", "10000")
        self("new-window", "-t", "s:", shell)  # the limit counts for windows made after it was set
        self("kill-window", "-t", "s:0")

    def __call__(self, *arguments: str) -> str:
        """What this command of tmux prints."""
        argv = ["tmux", "-S", str(self.socket), *arguments]
        return subprocess.check_output(argv, text=True, env=self._env, timeout=LIMIT_S)

    def screen_with(self, prompts: int, pause_s: float) -> tuple[str, int]:
        """(screen once it has so many prompts, how many looks that took), with a pause after each look."""
        for look in range(1, MOST_LOOKS):
            screen = self("capture-pane", "-t", "s:", "-J", "-p", "-S", "-")
            if len(PROMPT.findall(screen)) >= prompts:
                return screen, look
            time.sleep(pause_s)
        raise RuntimeError(f"no prompt after {look} looks; the screen of tmux ends with {screen[-300:]!r}")


def tmux_polled(tmux: Tmux, looks: list[int]) -> Run:
    """As OpenHands' BashSession of November 2025, written anew from its behaviour, poll and pause its own.

    After each command the screen is cleared, with a pause of 0.1 s. `looks` gets how many each command took.
    """

    def run(command: str, prompts: int = 2, pause_s: float = POLL_S) -> str:
        # A line and Enter, each by a process of its own, as libtmux does it.
        tmux("send-keys", "-t", "s:", "-l", command)
        tmux("send-keys", "-t", "s:", "Enter")
        screen, count = tmux.screen_with(prompts, pause_s)
        looks.append(count)
        tmux("send-keys", "-t", "s:", "C-l")
        time.sleep(CLEAR_S)
        tmux("clear-history", "-t", "s:")
        return PROMPT.split(screen)[prompts - 1].strip("\n").partition("\n")[2].strip("\n")

    run(f"PS2= PS1='{PS1}'", prompts=1, pause_s=0.05)
    looks.clear()
    return run


def tmux_wait_for(tmux: Tmux) -> Run:
    """The best that one can do with tmux: nothing sleeps, the prompt itself reports to `tmux wait-for`."""

    def run(command: str) -> str:
        enter = ("send-keys", "-t", "s:", "Enter")
        tmux("send-keys", "-t", "s:", "-l", command, ";", *enter, ";", "wait-for", "over")
        screen, _ = tmux.screen_with(prompts=1, pause_s=0)  # printed just after the signal
        # Not Ctrl-L, which bash would carry out some time later; this is done when it returns.
        tmux("send-keys", "-t", "s:", "-R", ";", "clear-history", "-t", "s:")
        return PROMPT.split(screen)[0].partition("\n")[2].strip("\n")

    run(f"PROMPT_COMMAND='tmux -S {tmux.socket} wait-for -S over' PS2= PS1='{PS1}'")
    return run


# -- the comparison ------------------------------------------------------------------------------------


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
        host = stack.enter_context(harness.private_host(directory / "host", warm=0))
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb", "LANG": "C.UTF-8"}
        env["HOME"] = str(directory)
        self.looks: list[int] = []
        self.methods: dict[str, TimedRun] = {
            "ours": ours(stack, host),
            "tmux_polled": timed(tmux_polled(Tmux(stack, directory / "polled", env), self.looks)),
            "tmux_wait_for": timed(tmux_wait_for(Tmux(stack, directory / "awaited", env))),
            "swe_rex": swe_rex(stack),
            "pexpect": timed(pexpect_repl(stack)),
            "apptainer_exec": timed(harness.PlainApptainer(directory / "exec").run),
            "host_pty": timed(host_pty(stack, env)),
        }
        self.wrong = dict.fromkeys(self.methods, 0)
        for name in self.methods:
            self.time(name)

    def take_turns(self, repetitions: dict[str, int], pause_s: float = 0.0) -> Times:
        """Seconds of `echo hi`, so many times by each method, after a pause."""
        methods = {name: partial(self.time, name, pause_s) for name in repetitions}
        return harness.take_turns(methods, repetitions, TURN)

    def time(self, name: str, pause_s: float = 0.0, command: str = "echo hi", output: str = "hi") -> float:
        """Seconds that a command takes, after a pause; a wrong output is counted."""
        answer, seconds = self.methods[name](command, pause_s)
        self.wrong[name] += answer.strip() != output
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
        return {name: statistics.mean(values) for name, values in seconds.items()}


def results_of(times: Times, suffix: str) -> dict[str, float]:
    """Keys of ours against each of the others."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    peers = times.keys() - {"ours", "host_pty", "tmux_polled"}
    tmux_mean_s, mean_s = (statistics.mean(times[name]) for name in ("tmux_polled", "ours"))
    return {
        f"ratio_to_floor{suffix}": middle["ours"] / middle["host_pty"],
        f"mean_speedup_vs_tmux_polled{suffix}": tmux_mean_s / mean_s,
        **{f"speedup_vs_{name}{suffix}": middle[name] / middle["ours"] for name in sorted(peers)},
        f"p50_ms{suffix}": middle["ours"] * 1e3,
        f"floor_p50_ms{suffix}": middle["host_pty"] * 1e3,
    }


def main(options: harness.Options) -> harness.Report:
    share = SHORT if options.rounds == 1 else 1
    count = options.count * options.rounds
    commands = WORKLOAD_COMMANDS // share
    with ExitStack() as stack:
        bench = Bench(stack)
        repetitions = dict.fromkeys(bench.methods, count) | {"tmux_polled": max(2, count // share)}
        times = {"": bench.take_turns(repetitions)}
        for suffix, pause_s in PAUSES_S.items():
            after_pause = dict.fromkeys(PAUSED, max(2, AFTER_PAUSE // share))
            times[suffix] = bench.take_turns(after_pause, pause_s)
        means = bench.time_workload(commands)
    spreads = {
        f"echo{suffix}": {name: harness.spread_ms(values) for name, values in by_method.items()}
        for suffix, by_method in times.items()
    }
    results = {
        "p95_ms": spreads["echo"]["ours"]["p95_ms"],
        "workload_mean_sleep_s": WORKLOAD_MEAN_S,
        "workload_mean_s": means["ours"],
        "workload_mean_tmux_polled_s": means["tmux_polled"],
    }
    for suffix, by_method in times.items():
        results |= results_of(by_method, suffix)
    results["ratio_to_floor_after_pause"] = max(results[f"ratio_to_floor{suffix}"] for suffix in PAUSES_S)
    return {
        "results": results,
        "actions": spreads,
        "wrong": bench.wrong,
        "tmux_polled_looks": {"first": bench.looks.count(1), "all": len(bench.looks)},
        "workload_commands": commands,
    }


if __name__ == "__main__":
    harness.run(main, count=50, rounds=2)
