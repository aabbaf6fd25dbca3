"""What the service consists of: the command of each part, and ports for them."""

from __future__ import annotations

import socket
import sys

import httpx

from rollout.schema import Stage
from services import flower as monitor
from services.launch import paths
from services.launch.supervisor import Part
from services.settings import Settings

STAGES = tuple(stage.value for stage in Stage)
SLOTS = {"init": 16, "eval": 16}
"""Rollouts at once unless somebody says otherwise; of RUN as the settings have it. Starting a sandbox is work
for the machine, so more at once would only make each slower."""


def slots_of(stage: str, given: dict[str, int | None], settings: Settings) -> int:
    """Rollouts at once in a stage."""
    return given.get(stage) or SLOTS.get(stage, settings.worker_slots)


def gateway() -> Part:
    config = str(paths.deploy_file("gunicorn.conf.py"))
    return Part(
        "gateway", [sys.executable, "-m", "gunicorn", "-c", config, "services.gateway.app:create_app()"]
    )


def fleet(stage: str, slots: int, node: str) -> Part:
    """A Celery worker of one stage, as anybody would start it by hand."""
    return Part(
        f"{stage} fleet",
        [
            *(sys.executable, "-m", "celery", "-A", "workers.app", "worker"),
            *("-Q", stage, "-n", f"{stage}@{node}", "-c", str(slots)),
            # Gossip and mingle make workers talk to each other, which nothing here needs. -E is for Flower.
            *("--without-gossip", "--without-mingle", "-E"),
        ],
    )


def flower(port: int) -> Part:
    return Part("flower", monitor.command(port))


def sandbox_check(settings: Settings, runtime: str | None) -> Part:
    """Starts a sandbox and ends it: says what works here, and unpacks the image for the first rollout."""
    return Part(
        "sandbox",
        [
            *(sys.executable, "-m", "sandbox.check"),
            *("--image", settings.sandbox_image, "--runtime", runtime or settings.sandbox_runtime),
        ],
    )


def embedded_backend(port: int) -> Part:
    return Part(
        "backend",
        [
            *(sys.executable, "-m", "services.inference"),
            *("--model", str(paths.DEMO_CHECKPOINT), "--port", str(port)),
        ],
    )


def answers(url: str | None) -> str | None:
    """None when the URL answers with a success; else why not."""
    try:
        reply = httpx.get(str(url), timeout=5.0, trust_env=False, follow_redirects=True)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if reply.is_success else f"it answers {reply.status_code}"


def port_is_free(host: str, port: int) -> bool:
    """Whether one can listen there. REUSEADDR, as servers do: a port in TIME_WAIT is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def pick_port(preferred: list[int], taken: set[int], host: str = "127.0.0.1") -> int:
    """The first of `preferred` that is free and not in `taken`, else any free one. Adds it to `taken`."""
    port = next((port for port in preferred if port not in taken and port_is_free(host, port)), 0)
    while not port or port in taken:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    taken.add(port)
    return port
