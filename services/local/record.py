"""What a running stack wrote down of itself, so that `rollout down` can end exactly that."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.local.errors import StackError
from services.local.processes import Process


@dataclass
class Restarts:
    """How a part has fared since `rollout up`."""

    count: int = 0
    """How often it was started anew."""
    away: bool = False
    """True: it has ended and waits for that."""
    last_at: float | None = None
    """When it ended last; seconds since the epoch."""
    exit: int | None = None
    """How: status, below 0 the signal; None = nobody saw."""


@dataclass
class Record:
    """The file `stack.json`; written anew after each process that was started."""

    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    """In the environment of every process of the stack."""
    url: str = ""
    flower_url: str | None = None
    flower_auth_file: str | None = None
    """Holds `user:password` for it; only its owner can read it."""
    backend_url: str | None = None
    sandbox_dir: str | None = None
    """Set if the stack has a sandbox host of its own to end."""
    grace_s: float = 10.0
    """Seconds that the fleets get to hand their rollouts back."""
    node: str = ""
    """Name under which its workers hold sandboxes."""
    processes: list[Process] = field(default_factory=list)
    supervisor: Process | None = None
    """Starts the others anew; it is no part of what is counted."""
    restarts: dict[str, Restarts] = field(default_factory=dict)
    """By part; one that has never ended is not named."""

    @property
    def live(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def save(self, path: Path) -> None:
        data = asdict(self)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(data, indent=1))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """None when there is no such file.

        Raises:
            StackError: It cannot be read.
        """
        try:
            data = json.loads(path.read_text())
            nested = {
                "processes": [Process(**item) for item in data["processes"]],
                "supervisor": Process(**data["supervisor"]) if data.get("supervisor") else None,
                "restarts": {name: Restarts(**item) for name, item in data.get("restarts", {}).items()},
            }
            return cls(**{**data, **nested})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StackError(
                f"{path} cannot be read ({error}); end its processes by hand and delete it"
            ) from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory for `up` or `down`.

    Raises:
        StackError: Another `up` or `down` holds it.
    """
    handle = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StackError(
                f"another `rollout up` or `rollout down` is at work on {directory}; wait for it"
            ) from None
        yield
    finally:
        os.close(handle)
