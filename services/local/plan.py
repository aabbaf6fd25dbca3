"""What the stack consists of: options, and the command of each part."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from services import flower as monitor
from services.local import paths
from services.settings import Settings

STAGES = ("init", "run", "eval")
FLOWER_PORT = monitor.PORT
BACKEND_PORT = 8000
INIT_SLOTS = 16
"""Starting a sandbox is work for the machine, so more at once would only make each slower."""
EVAL_SLOTS = 16


@dataclass(frozen=True)
class Options:
    """What a caller of `Stack.up` may choose."""

    state_dir: Path
    slots: dict[str, int | None] = field(default_factory=dict)
    """Rollouts at once by stage; a stage without a number gets the default."""
    backend_url: str | None = None
    """An LLM server of one's own, registered instead of the embedded one."""
    embedded_backend: bool = True
    flower: bool = True
    port: int | None = None
    """Port of the gateway, insisted on; None = that of the settings, or a free one if it is taken."""
    sandbox_runtime: str | None = None
    require_sandbox: bool = False
    """True: a machine on which no sandbox works is an error and not only a warning."""
    compat_port: int | None = None
    """Port for clients that send no key; None = that of the settings, as a rule none."""
    compat_tenant: str | None = None
    compat_host: str | None = None
    compat_servers: bool | None = None
    private_ports: bool = False
    """True: only free ports, so that the stack runs beside any other."""

    def slots_of(self, stage: str, settings: Settings) -> int:
        default = {"init": INIT_SLOTS, "run": settings.worker_slots, "eval": EVAL_SLOTS}[stage]
        return self.slots.get(stage) or default


@dataclass(frozen=True)
class Part:
    """One child process to start."""

    name: str
    command: list[str]


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
