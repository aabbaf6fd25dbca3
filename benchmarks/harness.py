"""What benchmarks share: options, turns, spreads, the machine's floor, a service, peers, the result."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rollout.schema import RolloutRequest
from sandbox import paths
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.images import ImageStore
from sandbox.runtimes.apptainer import Apptainer
from sandbox.spec import SandboxInfo, SandboxSpec
from services.state import keys
from tests.helpers.stack import NODE, Process, RedisServer, Stack, stop_all, wait_until

Options = argparse.Namespace
Report = dict[str, Any]
"""The figures under `results`, and what explains them beside it."""


def run(main: Callable[[Options], Report], *, count: int, rounds: int, **more: dict[str, Any]) -> None:
    """Run a benchmark with the options of the command line, and print the last line.

    SIGTERM ends the process like Ctrl-C.

    Args:
        main: What measures.
        count: The default of `--count`.
        rounds: The default of `--rounds`; 1 is the short form that the tests run.
        more: Further options, as `add_argument` has them.
    """
    end_in_order_on_sigterm()
    module = sys.modules["__main__"]
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=form)
    parser.add_argument("--count", type=int, default=count, help="repetitions a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s; 1: the short form")
    for name, fields in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **fields)
    options = parser.parse_args()
    figures = main(options)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    name = module.__spec__.name.removeprefix("benchmarks.")
    line = {"benchmark": name, **figures, "machine": machine | {"floor": floor()}, "options": vars(options)}
    text = json.dumps(line, default=str)
    print(json.dumps(json.loads(text, parse_float=lambda number: round(float(number), 4))))


def family(pids: Iterable[int]) -> set[psutil.Process]:
    """These processes and all that they have started, less those that have ended."""
    members = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            members |= {process, *process.children(recursive=True)}
    return members


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds that these processes and their children have used so far, also those of
    children that have ended and were waited for, such as those in which Redis writes its file anew.
    """
    total = 0.0
    for process in family(pids):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_mb(pids: Iterable[int], kind: str) -> float:
    """`pss` or `rss` of these processes and their children, in 10⁶ bytes.

    PSS divides a shared page among its users; where it is closed to us RSS counts, which is more.
    """
    total = 0
    for process in family(pids):
        with suppress(psutil.NoSuchProcess):
            try:
                total += getattr(process.memory_full_info(), kind)
            except psutil.AccessDenied:
                total += process.memory_info().rss
    return total / 1e6


def summary(values: Iterable[float]) -> dict[str, float]:
    """Median, least and largest of repeated measurements."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summaries(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The same of each figure of all rounds."""
    return {name: summary(each[name] for each in rounds) for name in rounds[0]}


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Ours over theirs, round by round."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values do not exceed; no interpolation."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def spread_ms(seconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and number of repetitions, in milliseconds, of times in seconds."""
    p50_ms, p95_ms = statistics.median(seconds) * 1e3, percentile(seconds, 0.95) * 1e3
    return {"p50_ms": p50_ms, "p95_ms": p95_ms, "n": len(seconds)}


def timed(action: Callable[[], object]) -> float:
    """Seconds that the action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def in_turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Number of the round and name, each name once a round, and each round begins with another one.

    So a noisy moment of the machine meets all.
    """
    names = list(names)
    for number in range(rounds):
        first = number % len(names)
        yield from ((number, name) for name in names[first:] + names[:first])


def take_turns(
    methods: Mapping[str, Callable[[], float]], repetitions: Mapping[str, int], turn: int = 1
) -> dict[str, list[float]]:
    """Call each method `repetitions[name]` times, in turns, and collect what it returns.

    At most `turn` times in a row where all repetitions are equal, and fewer of a method that has fewer.
    """
    rounds = -(-max(repetitions.values()) // turn)
    values: dict[str, list[float]] = {name: [] for name in methods}
    for number, name in in_turns(methods, rounds):
        count = (number + 1) * repetitions[name] // rounds - number * repetitions[name] // rounds
        values[name] += [methods[name]() for _ in range(count)]
    return values


def median_ms(action: Callable[[], object], times: int) -> float:
    """Median milliseconds of an action that is done so many times."""
    return statistics.median(timed(action) for _ in range(times)) * 1e3


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


async def first_output(host: HostClient, spec: SandboxSpec) -> SandboxInfo:
    """A sandbox that has run its first command."""
    info = await host.start(spec)
    async with SandboxClient(info.socket) as client:
        output = (await client.bash("echo hi")).output
    if output != "hi\n":
        raise RuntimeError(f"the first command in sandbox {info.id} printed {output!r} instead of 'hi'")
    return info


async def pool_is_full(host: HostClient, warm: int, used: int = 0) -> None:
    """Wait until so many sandboxes are ready, and none starts or ends: nothing measured is to pay for it.

    Args:
        used: How many are in use.
    """
    async with asyncio.timeout(PATIENCE_S):
        while not warm <= (stats := await host.stats()).get("warm", 0) == stats.get("known") - used:
            await asyncio.sleep(0.01)


# -- a service to measure ------------------------------------------------------------------------------


STAGES = ("init", "run", "eval")
LIVE_STATES = ("queued", "initializing", "ready", "running", "evaluating")
"""The states of a rollout that has not ended."""
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
POLL_S = 0.005
PER_CALL = 1000
"""Rollouts of one call of submission."""
_numbers = itertools.count()
"""Of workers: a name that one had is on the list of workers for a while."""


@contextmanager
def private_redis(directory: Path | None = None) -> Iterator[RedisServer]:
    """A Redis for one measurement, with its files in the directory or in a private one."""
    with tempfile.TemporaryDirectory(prefix="bench-") as private:
        server = RedisServer(directory or Path(private))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def service(**env: str) -> Iterator[Stack]:
    """Redis and a gateway in private directories; what is started on it ends with it."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        private_directory() as sandboxes,
        Stack(Path(directory), sandboxes, {**ENV, **env}) as stack,
    ):
        yield stack


def launch(stack: Stack, queue: str, slots: int, app: str = "workers.app", **env: str) -> Process:
    """Start a worker by the command that an operator uses; its name is no other's on this stack."""
    name = f"{queue}{next(_numbers)}@{env.get('ROLLOUT_NODE', NODE)}"
    argv = [sys.executable, "-m", "celery", "-A", app, "worker", "-Q", queue, "-n", name]
    return stack.start(name, [*argv, "--without-gossip", "--without-mingle", "-E", "-c", str(slots)], env)


def await_worker(stack: Stack, stage: str, worker: Process) -> None:
    """Wait until the worker has announced itself."""
    announced = partial(stack.redis.client.zscore, keys.workers(stage), worker.name)
    wait_until(announced, PATIENCE_S, f"worker {worker.name}", worker)


def start_fleet(stack: Stack, slots: int, short: bool) -> dict[str, Process]:
    """Workers by their queues: one for each stage, in the short form one for all."""
    fleet = {queues: launch(stack, queues, slots) for queues in split(STAGES, short)}
    for queues, worker in fleet.items():
        await_worker(stack, queues.split(",")[0], worker)
    wait_until(lambda: stack.redis.client.exists(keys.HANDLERS), PATIENCE_S, "the handlers to be announced")
    return fleet


def split(queues: Sequence[str], short: bool) -> list[str]:
    """Queues of each worker: a start takes seconds of a processor, so the short form has one worker."""
    return [",".join(queues)] if short else list(queues)


def discard(stack: Stack, workers: Iterable[Process]) -> None:
    """End workers and forget them."""
    workers = list(workers)
    stop_all(workers)
    for worker in workers:
        stack.processes.remove(worker)


def in_state(stack: Stack, *states: str) -> int:
    """Rollouts that are in one of these states."""
    return sum(int(count or 0) for count in stack.redis.client.hmget("rollouts:counts", states))


def submit(stack: Stack, requests: list[RolloutRequest]) -> list[str]:
    """Submit rollouts, a thousand a call; their ids."""
    calls = [requests[first : first + PER_CALL] for first in range(0, len(requests), PER_CALL)]
    return [new.id for call in calls for new in stack.client.submit(call)]


def seconds_of(work: Callable[[], object], count: int, ended: Callable[[], int]) -> float:
    """Seconds from the submission of so many rollouts by `work` until so many more have ended."""
    goal, began = ended() + count, time.monotonic()
    work()
    while ended() < goal:
        if time.monotonic() - began > PATIENCE_S:
            raise TimeoutError(f"not all of {count} rollouts had ended after {PATIENCE_S:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


def waiting_paths(ids: list[str], cursors: int, streams: int) -> list[str]:
    """What clients ask for that wait: for each rollout, for results and on streams, the latter in vain."""
    paths = [f"/v1/rollouts/{rollout_id}?wait=60&include=summary" for rollout_id in ids]
    paths += ["/v1/results?cursor=$&wait=60&tag=nobody-s"] * cursors
    return paths + ["/v1/results/stream?cursor=$&tag=nobody-s"] * streams


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
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE) | {"stderr": subprocess.STDOUT}
        self._options = {**pipes, "text": True, "errors": "replace", "cwd": "/"}
        self._options["env"] = {
            "PATH": paths.tool_path(),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "GOGC": "off",
        }
        if user is not None:
            os.chown(home, user, user)
            self._options |= {"user": user, "group": user, "extra_groups": []}
        self._argv = [str(runtime.program()), *FLAGS, str(rootfs or ImageStore().rootfs("base", user))]

    def start(self, script: str) -> subprocess.Popen[str]:
        """A container in which bash runs the script, with pipes."""
        return subprocess.Popen([*self._argv, "bash", "-c", script], **self._options)

    def run(self, script: str, stdin: str = "") -> str:
        """Output of the script. Raises RuntimeError with it when the exit code is not 0."""
        with self.start(script) as process:
            output = process.communicate(stdin)[0]
        if process.returncode != 0:
            raise RuntimeError(f"apptainer exec ended with {process.returncode}: {output[-1000:]}")
        return output
