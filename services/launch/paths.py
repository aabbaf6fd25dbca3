"""Where things are: the checkout, ROLLOUT_HOME, and what a stack keeps."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from services.launch import StackError

REPO = Path(__file__).resolve().parents[2]
DEMO_CHECKPOINT = REPO / "examples" / "demo_model" / "checkpoint"


def home() -> Path:
    """`ROLLOUT_HOME`, else `.local` in the checkout."""
    return Path(os.environ.get("ROLLOUT_HOME") or REPO / ".local").absolute()


def state_dir() -> Path:
    """Records, logs and Redis' data of the stack that `rollout up` starts by default."""
    return home() / "run"


def deploy_file(name: str) -> Path:
    """A file of `deploy/`.

    Raises:
        StackError: The package was installed without its source tree.
    """
    path = REPO / "deploy" / name
    if not path.is_file():
        raise StackError(f"{path} is missing: `rollout up` needs a checkout (pip install -e .)")
    return path


def sandbox_dir(state: Path) -> Path:
    """A stack's own sandbox directory: node-local, and short, for a socket's path has 107 bytes."""
    digest = hashlib.sha256(str(state).encode()).hexdigest()[:10]
    return Path(f"/tmp/sbx-{os.getuid()}-{digest}")
