"""What benchmarks share: options, turns, spreads, the machine's floor, a service, peers, the result."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rollout.trajectory import Chain, Message, Segment
from sandbox import paths
from sandbox.host_client import HostClient
from sandbox.images import ImageStore
from sandbox.runtimes.apptainer import Apptainer
from services.state import keys
from tests.helpers.stack import Process, Stack, wait_until


def make_parser(text: str | None, *, count: int, rounds: int) -> argparse.ArgumentParser:
    """A parser with `--count` and `--rounds`, the options that every benchmark has.

    SIGTERM ends the process like Ctrl-C from now on.

    Args:
        text: What is measured: the module's docstring.
        count: The default of `--count`.
        rounds: The default of `--rounds`; 1 is the short form that the tests run.
    """
    end_in_order_on_sigterm()
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help="repetitions a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s; 1: the short form")
    return parser


def with_children(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """These processes and all that they have started, less those that have ended."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            yield from (process, *process.children(recursive=True))


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds that these processes and their children have used so far."""
    total = 0.0
    for process in with_children(pids):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory_mb(pids: Iterable[int], kind: str) -> float:
    """`pss` or `rss` of these processes and their children, in 10⁶ bytes."""
    total = 0
    for process in with_children(pids):
        with suppress(psutil.NoSuchProcess):
            total += getattr(process.memory_full_info(), kind)
    return total / 1e6


def summary(values: list[float]) -> dict[str, float]:
    """Median, least and largest of repeated measurements."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values do not exceed; no interpolation."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def spread_ms(seconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and number of repetitions, in milliseconds, of times in seconds."""
    return {
        "p50_ms": round(statistics.median(seconds) * 1e3, 3),
        "p95_ms": round(percentile(seconds, 0.95) * 1e3, 3),
        "n": len(seconds),
    }


def timed(action: Callable[[], object]) -> float:
    """Seconds that the action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def take_turns(
    methods: Mapping[str, Callable[[], float]], repetitions: Mapping[str, int], turn: int = 1
) -> dict[str, list[float]]:
    """Call each method `repetitions[name]` times and collect what it returns.

    Round-robin, so that a noisy moment of the machine meets all: at most `turn` times in a row where all
    repetitions are equal, and fewer of a method that has fewer. Each round begins with another method.
    """
    rounds = -(-max(repetitions.values()) // turn)
    names = list(methods)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            count = (number + 1) * repetitions[name] // rounds - number * repetitions[name] // rounds
            values[name] += [methods[name]() for _ in range(count)]
    return values


def median_ms(action: Callable[[], object], times: int) -> float:
    """Median milliseconds of an action that is done so many times."""
    return round(statistics.median(timed(action) for _ in range(times)) * 1e3, 4)


def floor() -> dict[str, float]:
    """What this machine takes for things that nobody can do without: medians, to read other times by.

    `fork_exec_ms`: start and end of /bin/true. `round_trip_ms`: a byte to another process and back.
    `sha256_16mb_ms`: SHA-256 of 16 MiB.
    """
    block = bytes(16 << 20)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as echo:
        round_trip_ms = median_ms(lambda: (echo.stdin.write(b"."), echo.stdout.read(1)), 200)
        echo.stdin.close()
    return {
        "fork_exec_ms": median_ms(lambda: subprocess.run(["/bin/true"], check=True), 20),
        "round_trip_ms": round_trip_ms,
        "sha256_16mb_ms": median_ms(lambda: hashlib.sha256(block), 5),
    }


def report(name: str, results: dict[str, Any], **details: Any) -> None:
    """Print the last line: figures under `results`, the machine and everything else beside them."""
    load = os.getloadavg()[0]
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": load, "floor": floor()}
    print(json.dumps({"benchmark": name, "results": results, "machine": machine, **details}))


def say(text: str) -> None:
    """Print progress to standard error; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def end_in_order_on_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C: what was started is ended by the `with` blocks it was started in."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory with a short path, for Unix sockets, that is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="sbxb-", dir="/tmp"))
    path.chmod(0o711)  # for the user whom root starts sandboxes as
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def private_host(state: Path, warm: int) -> Iterator[HostClient]:
    """A sandbox host of our own in `state` that keeps `warm` sandboxes ready; its end is the end of all its
    sandboxes. It is started by the first request, which has to come before the next such block is entered.
    """
    os.environ["ROLLOUT_SANDBOX_WARM"] = str(warm)
    state.mkdir(exist_ok=True)
    try:
        yield HostClient(state)
    finally:
        asyncio.run(HostClient(state).stop())


# -- a service to measure ------------------------------------------------------------------------------


STAGES = ("init", "run", "eval")
ENV = {
    "ROLLOUT_HANDLERS": "",
    "ROLLOUT_LOG_LEVEL": "WARNING",
    # As in production: those of the tests are quicker.
    "ROLLOUT_LEASE_S": "30",
    "ROLLOUT_REAPER_INTERVAL_S": "1",
    "ROLLOUT_REQUEUE_S": "30",
    "ROLLOUT_RETRY_DELAY_S": "1",
}
PATIENCE_S = 300.0
"""How long anything may take on a machine that is busy with other things."""


@contextmanager
def service(**env: str) -> Iterator[Stack]:
    """Redis and a gateway in private directories; what is started on it ends with it."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        private_directory() as sandboxes,
        Stack(Path(directory), sandboxes, {**ENV, **env}) as stack,
    ):
        yield stack


def launch(stack: Stack, queue: str, name: str, slots: int, app: str = "workers.app", **env: str) -> Process:
    """Start a worker by the command that an operator uses; `name` is that of Celery."""
    argv = [sys.executable, "-m", "celery", "-A", app, "worker", "-Q", queue, "-n", name]
    return stack.start(name, [*argv, "--without-gossip", "--without-mingle", "-E", "-c", str(slots)], env)


def await_worker(stack: Stack, stage: str, worker: Process, since: float = 0.0) -> None:
    """Wait until the worker has announced itself later than `since`, in seconds of Unix time."""

    def announced() -> bool:
        return (stack.redis.client.zscore(keys.workers(stage), worker.name) or 0.0) > since

    wait_until(announced, PATIENCE_S, f"worker {worker.name}", worker)


def start_fleet(stack: Stack, slots: int) -> dict[str, Process]:
    """One worker for each stage."""
    fleet = {stage: launch(stack, stage, f"{stage}@{stack.env['ROLLOUT_NODE']}", slots) for stage in STAGES}
    for stage, worker in fleet.items():
        await_worker(stack, stage, worker)
    wait_until(lambda: stack.redis.client.exists(keys.HANDLERS), PATIENCE_S, "the handlers to be announced")
    return fleet


def discard(stack: Stack, *workers: Process) -> None:
    """End workers and forget them."""
    for worker in workers:
        worker.popen.terminate()
    for worker in workers:
        worker.stop()
        stack.processes.remove(worker)


# -- the peer of sandboxes -----------------------------------------------------------------------------


FLAGS = (
    *("-q", "exec", "--userns", "--containall", "--no-init", "--no-home", "--cleanenv", "--no-privs"),
    *("--no-mount", "sys,bind-paths,tmp", "--writable-tmpfs", "--net", "--network", "none", "--pwd", "/"),
)
"""Those of our sandboxes (`sandbox.runtimes.apptainer`); the writable layer is Apptainer's own."""


class PlainApptainer:
    """Containers with our sandboxes' user, image, flags and `GOGC=off`, but no server, filter or limits."""

    def __init__(self, home: Path, rootfs: Path | None = None):
        """`home`: becomes Apptainer's home, made here; `rootfs`: instead of the base image.

        Raises RuntimeUnavailable where Apptainer is missing.
        """
        runtime, user = Apptainer(), paths.sandbox_user()
        runtime.check_installed()
        home.mkdir()
        self._as_user = {}
        if user is not None:
            os.chown(home, user, user)
            self._as_user = {"user": user, "group": user, "extra_groups": []}
        self._argv = [str(runtime.program()), *FLAGS, str(rootfs or ImageStore().rootfs("base", user))]
        self._env = {"PATH": paths.tool_path(), "HOME": str(home), "LANG": "C.UTF-8", "GOGC": "off"}

    def start(self, script: str) -> subprocess.Popen[str]:
        """A container in which bash runs the script, with pipes."""
        return subprocess.Popen(
            [*self._argv, "bash", "-c", script],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd="/",
            **self._as_user,
        )

    def run(self, script: str, stdin: str = "") -> str:
        """Output of the script. Raises RuntimeError with it when the exit code is not 0."""
        with self.start(script) as process:
            output = process.communicate(stdin)[0]
        if process.returncode != 0:
            raise RuntimeError(f"apptainer exec ended with {process.returncode}: {output[-1000:]}")
        return output


# -- made-up trajectories ------------------------------------------------------------------------------

VOCABULARY = 150_000
PROMPT = 512
"""Tokens of the prompt."""
CHARACTERS = 4
"""Of a message, for each token: about what English has."""
WORD = 5
"""Characters of a word on average, with its space."""
WORDS = ("the", "file", "returns", "a", "list", "of", "values", "because", "test", "fails", "on", "line")


def make_chain(seed: str, turns: list[int], observation: int) -> Chain:
    """A chain as irregular as real ones; log-probs are float32, as engines compute them.

    Args:
        turns: Sampled tokens of each turn.
        observation: Tokens of a tool's answer between two turns.
    """
    chance, chain = random.Random(seed), Chain()
    chain.append(_segment(chance, "user", PROMPT))
    for turn, sampled in enumerate(turns):
        if turn:
            chain.append(_segment(chance, "tool", observation))
        logprobs = array("f", [-chance.expovariate(2.0) for _ in range(sampled)]).tolist()
        fields = {"logprobs": logprobs, "call_id": f"call-{turn}", "policy_version": "step-1"}
        chain.append(_segment(chance, "assistant", sampled, sampled=True, **fields))
    return chain


def _segment(chance: random.Random, role: str, tokens: int, **more: object) -> Segment:
    words = chance.choices(WORDS, k=tokens * CHARACTERS // WORD)
    ids = [chance.randrange(VOCABULARY) for _ in range(tokens)]
    return Segment(role=role, token_ids=ids, messages=[Message(role=role, content=" ".join(words))], **more)
