"""What the service consists of: the command of each part, and ports for them."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import requests

from rollout import account
from rollout.schema import Stage
from services import flower as monitor
from services.engines import credentials
from services.engines.address import ask, text_of
from services.launch import paths
from services.launch.supervisor import Part
from services.settings import Settings

STAGES = tuple(stage.value for stage in Stage)
CAPTURE = "capture"
"""Name of its first process; further ones have a number."""
CAPTURE_PORT = 8090
SLOTS = {"init": 16, "eval": 16}
"""Rollouts at once unless somebody says otherwise; of RUN as the settings have it. Starting a sandbox is work
for the machine, so more at once would only make each slower."""


def slots_of(stage: str, chosen: Mapping[str, int | None]) -> int:
    """Rollouts at once in a stage: as chosen, else the default."""
    return chosen.get(stage) or SLOTS.get(stage) or Settings.from_env().worker_slots


def closed_to_sandboxes(env: Mapping[str, str], directory: Path) -> str:
    """`ROLLOUT_SANDBOX_CLOSED` with what holds keys, data or tasks: ours, and the account's services."""
    bundles = env.get("ROLLOUT_BUNDLE_CACHE") or str(paths.home() / "bundles")
    places = [env.get("ROLLOUT_SANDBOX_CLOSED"), env.get("ROLLOUT_SNAPSHOT_DIR"), str(directory), bundles]
    places += credentials.directories(env.get("ROLLOUT_ENGINE_KEYS", ""))
    with suppress(RuntimeError):  # an account without a home announces nothing
        places.append(str(account.directory().absolute()))
    return ":".join(filter(None, places))


def gateway() -> Part:
    config = str(paths.deploy_file("gunicorn.conf.py"))
    command = [sys.executable, "-m", "gunicorn", "-c", config, "services.gateway.app:create_app()"]
    return Part("gateway", command)


def capture(host: str, port: int, processes: int) -> list[Part]:
    """Its processes, which share a port."""
    command = [sys.executable, "-m", "services.capture", "--host", host, "--port", str(port)]
    names = (CAPTURE if number == 1 else f"{CAPTURE}-{number}" for number in range(1, processes + 1))
    return [Part(name, command) for name in names]


def fleet(stage: str, slots: int, node: str, number: str = "") -> Part:
    """A Celery worker of one stage, as anybody would start it by hand; of two at a time one has a number."""
    command = [sys.executable, "-m", "celery", "-A", "workers.app", "worker"]
    command += ["-Q", stage, "-n", f"{stage}{number}@{node}", "-c", str(slots)]
    # Gossip and mingle make workers talk to each other, which nothing here needs. -E is for Flower.
    return Part(f"{stage} fleet", [*command, "--without-gossip", "--without-mingle", "-E"])


def flower(port: int) -> Part:
    return Part("flower", monitor.command(port))


def embedded_backend(port: int) -> Part:
    command = [sys.executable, "-m", "services.inference", "--model", str(paths.DEMO_CHECKPOINT)]
    return Part("backend", [*command, "--port", str(port)])


class SandboxCheck:
    """Starts a sandbox and ends it: tells what works here, and unpacks the image for the first rollout."""

    def __init__(self, env: Mapping[str, str]) -> None:
        settings = Settings.from_env(env)
        command = [sys.executable, "-m", "sandbox.check", "--image", settings.sandbox_image]
        self._process = subprocess.Popen(
            [*command, "--runtime", settings.sandbox_runtime],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(env),
            cwd=paths.REPO,
        )

    def verdict(self, patience_s: float) -> tuple[bool, str]:
        """Whether a sandbox works, and which runtime it has, or why none does."""
        try:
            text = self._process.communicate(timeout=patience_s)[0].strip()
        except subprocess.TimeoutExpired:
            self.end()
            return False, f"none has started within {patience_s:.0f} s"
        return self._process.returncode == 0, text

    def end(self) -> None:
        """Kill it: it would start the sandbox host anew after its end."""
        self._process.kill()
        self._process.wait()


def answers(url: str | None) -> str | None:
    """None when the URL answers with a success, or by sending one elsewhere; else why not."""
    try:
        status = ask("GET", str(url), 5.0).status
    except requests.RequestException as error:
        return text_of(error)
    return None if status < 400 else f"it answers {status}"


def unheard(part: Part, url: str) -> str | None:
    """None when a part listens at the URL itself, and it answers; else why not. Others may share the port."""
    port = urlsplit(url).port
    try:
        connections = part.process.net_connections("tcp") if part.process else []
    except psutil.Error as error:
        return str(error)
    if not any(it.status == psutil.CONN_LISTEN and it.laddr.port == port for it in connections):
        return f"it does not listen on port {port}"
    return answers(f"{url}/health")


def port_is_free(host: str, port: int) -> bool:
    """Whether one can listen there. REUSEADDR, as servers do: a port in TIME_WAIT is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def await_freed(host: str, port: int) -> None:
    """Wait for a port that was ours, for its last owner may still end.

    A process shows no environment any more, and so no mark, some time before its sockets are closed.
    """
    deadline = time.monotonic() + FREED_S
    while not port_is_free(host, port) and time.monotonic() < deadline:
        time.sleep(0.05)


FREED_S = 5.0
PORTS = range(20_000, 32_000)
"""Linux by default gives higher ones to clients, and what we start listens only seconds after the choice."""
_CLAIMS: dict[tuple[str, int], socket.socket] = {}


def _claim(host: str, port: int) -> bool:
    """Whether no other stack that starts now may take the port: who chose it listens there seconds later.

    An abstract socket is the claim, for it ends with this process and is of one network, as ports are.
    """
    if (host, port) not in _CLAIMS:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0rollout-port-{host}-{port}")
        except OSError:
            claim.close()
            return False
        _CLAIMS[host, port] = claim
    return True


def pick_port(preferred: list[int], taken: set[int], host: str = "127.0.0.1") -> int:
    """The first of `preferred` that is free and not in `taken`, else any free one. Adds it to `taken`."""
    ports = [*(port for port in preferred if _claim(host, port)), *random.sample(PORTS, 100)]
    port = next((port for port in ports if port not in taken and port_is_free(host, port)), 0)
    while not port or port in taken:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    taken.add(port)
    return port
