"""A real master, a real replica and three real Sentinels that fail over from one to the other."""

from __future__ import annotations

from pathlib import Path

import redis

from services.state.redis import connect
from tests.helpers.stack import Process, free_port, redis_binary, wait_until

MASTER_NAME = "rollouts"
PASSWORD = "sentinels-keep-this-one"
DOWN_AFTER_MS = 2000
"""Longer than a busy machine makes a healthy server wait, and still a short test."""


class RedisGroup:
    """Two append-only servers behind three Sentinels, with a password; a context manager that ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers: dict[int, Process] = {}
        first = self._server("one")
        self._server("two", "--replicaof", "127.0.0.1", str(first))
        self.sentinels = [self._sentinel(number, first) for number in range(3)]
        ports = ",".join(f"127.0.0.1:{port}" for port, _ in self.sentinels)
        self.url = f"sentinel://{ports}/{MASTER_NAME}/0?password={PASSWORD}"
        wait_until(self._settled, 120, "the Sentinels to know each other and the replica")
        self.client = connect(self.url)

    def _server(self, name: str, *more: str) -> int:
        port = free_port()
        home = self.directory / name
        home.mkdir()
        argv = [redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
        argv += ["--appendonly", "yes", "--save", "", "--requirepass", PASSWORD, "--masterauth", PASSWORD]
        argv += ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", *more]
        self.servers[port] = Process(f"redis-{name}", argv, self.directory)
        wait_until(lambda: _answers(port, PASSWORD), 20, f"Redis {name}", self.servers[port])
        return port

    def _sentinel(self, number: int, master: int) -> tuple[int, Process]:
        port = free_port()
        home = self.directory / f"sentinel-{number}"
        home.mkdir()
        config = home / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {home}\n"
            f"sentinel monitor {MASTER_NAME} 127.0.0.1 {master} 2\n"
            f"sentinel auth-pass {MASTER_NAME} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {MASTER_NAME} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {MASTER_NAME} 6000\n"
        )
        argv = [redis_binary(), str(config), "--sentinel"]
        process = Process(f"sentinel-{number}", argv, self.directory)
        wait_until(lambda: _answers(port), 20, f"Sentinel {number}", process)
        return port, process

    def _settled(self) -> bool:
        states = [
            redis.Redis(port=port, decode_responses=True).sentinel_master(MASTER_NAME)
            for port, _ in self.sentinels
        ]
        return all(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1 for state in states)

    def master(self) -> int:
        """Port of the master, as the first Sentinel sees it."""
        sentinel = redis.Redis(port=self.sentinels[0][0], decode_responses=True)
        return sentinel.sentinel_get_master_addr_by_name(MASTER_NAME)[1]

    def kill_master(self) -> int:
        """SIGKILL; the port it had. The replica has everything that was written before."""
        port = self.master()
        replicated = redis.Redis(port=port, password=PASSWORD).execute_command("WAIT", 1, 20_000)
        assert replicated == 1, "the replica does not follow"
        self.servers[port].kill()
        return port

    def stop(self) -> None:
        for _, process in self.sentinels:
            process.kill()
        for process in self.servers.values():
            process.kill()

    def __enter__(self) -> RedisGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _answers(port: int, password: str | None = None) -> bool:
    try:
        return redis.Redis(port=port, password=password).ping()
    except redis.RedisError:
        return False
