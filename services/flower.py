"""Flower, Celery's web monitor: its password, its command, and the links into it.

The password is in a file that only its owner can read; no command line shows it, for `ps` is for everybody.
"""

from __future__ import annotations

import secrets
import stat
import sys
from pathlib import Path
from urllib.parse import quote

from rollout import account
from services.launch import StackError

USER = "operator"
PASSWORD_BYTES = 24
PORT = 5555
CONFIG = Path(__file__).resolve().parents[1] / "deploy" / "flower" / "flowerconfig.py"
AUTH_VARIABLE = "ROLLOUT_FLOWER_AUTH_FILE"
DB_VARIABLE = "ROLLOUT_FLOWER_DB"
URL_VARIABLE = "ROLLOUT_FLOWER_URL"


class FlowerAuthError(StackError):
    """A password file that cannot be used; the message names it and says what to do."""


def ensure_auth_file(path: Path) -> Path:
    """Make a password file (mode 0600, `operator:<random>`) unless there is one: passwords outlive a restart.

    Raises:
        FlowerAuthError: The one that is there cannot be used.
    """
    if path.exists():
        credentials(path)
    else:
        account.write_private(path, f"{USER}:{secrets.token_urlsafe(PASSWORD_BYTES)}\n")
    return path


def credentials(path: Path) -> list[str]:
    """`user:password`, one for each line of a password file.

    Raises:
        FlowerAuthError: It is missing, others may read it, or a line of it is no `user:password`.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        lines = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise FlowerAuthError(
            f"{AUTH_VARIABLE}={path} cannot be read ({error.strerror}); write a line user:password into it, "
            "mode 0600"
        ) from None
    if mode & 0o077:
        raise FlowerAuthError(
            f"{AUTH_VARIABLE}={path} can be read by others (mode {mode:o}): chmod 600 {path}"
        )
    entries = [line for line in lines if line and not line.startswith("#")]
    # Flower compares whole lines, and would take one without a password as one of an empty user.
    if not entries or not all(all(line.partition(":")[::2]) for line in entries):
        raise FlowerAuthError(
            f"{AUTH_VARIABLE}={path}: each line must be user:password, and there must be one"
        )
    return entries


def command(port: int = PORT, address: str = "127.0.0.1") -> list[str]:
    """The command that starts Flower; its password and database come by the environment and deploy/flower."""
    return [
        *(sys.executable, "-m", "celery", "-A", "workers.app", "flower"),
        *(f"--conf={CONFIG}", f"--address={address}", f"--port={port}"),
    ]


def environment(auth_file: Path, database: Path) -> dict[str, str]:
    """Variables that `deploy/flower/flowerconfig.py` reads."""
    return {AUTH_VARIABLE: str(auth_file), DB_VARIABLE: str(database)}


def tasks_link(url: str, rollout_id: str = "{rollout_id}") -> str:
    """Flower's page with the tasks of one rollout, every attempt and stage; by default a pattern.

    Flower takes `name` from its address and searches for it as `name:VALUE`: a second word of the value is
    searched for in all that it knows of a task.
    """
    term = rollout_id if rollout_id == "{rollout_id}" else quote(rollout_id, safe="")
    return f"{url.rstrip('/')}/tasks?name=rollout%20{term}"
