"""What a running stack of one machine wrote down of itself, and the process that looks after it by that.

`python -m services.launch.record DIRECTORY` is what `rollout up` leaves behind: it starts anew what ends of
the stack. The parts are nobody's children or its own; should it end, they go on, and the next `rollout up`
starts it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from rollout import account
from services import logs
from services.launch import StackError
from services.launch.supervisor import LOOK_S, Part, Supervisor
from services.settings import settings

log = structlog.get_logger("supervisor")


@dataclass
class Record:
    """The file `stack.json`, by which `down` ends exactly what runs; written anew at each change."""

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
    parts: list[Part] = field(default_factory=list)
    supervisor: Part | None = None
    """Starts the others anew; it is no part of what is counted."""

    @property
    def live(self) -> list[Part]:
        return [part for part in self.parts if part.alive]

    def save(self, path: Path) -> None:
        """Write it for us alone: environments of parts hold the password of Redis."""
        account.write_private(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """None when there is no such file.

        Raises:
            StackError: It cannot be read.
        """
        try:
            data = json.loads(path.read_text())
            data["parts"] = [Part(**part) for part in data["parts"]]
            data["supervisor"] = Part(**data["supervisor"]) if data["supervisor"] else None
            return cls(**data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StackError(
                f"{path} cannot be read ({error}); end its processes by hand and delete it"
            ) from error


def watch(state_dir: Path) -> None:
    """Start anew what ends of the stack that is recorded here, until told to end or the stack is another's.

    Raises:
        FileNotFoundError: Nothing is recorded here.
    """
    file = state_dir / "stack.json"
    record = Record.load(file)
    if record is None:
        raise FileNotFoundError(file)
    supervisor = Supervisor(state_dir / "logs")
    supervisor.parts = {part.name: part for part in record.parts}
    supervisor.listen()
    log.info("looks after the stack", parts=list(supervisor.parts))
    saved = asdict(record)["parts"]
    while supervisor.signal is None:
        supervisor.look()
        try:
            if not _is_current(record, file):
                log.info("the stack has ended")
                return
            if (now := asdict(record)["parts"]) != saved:
                record.save(file)
                saved = now
        except (StackError, OSError) as error:
            # A full disk is no reason to let go of the stack, and may take no line of log either.
            with contextlib.suppress(OSError):
                log.warning("the record cannot be written; the next look tries again", error=str(error))
        supervisor.pause(LOOK_S)


def _is_current(record: Record, file: Path) -> bool:
    """Whether the file is still that of this stack; `up` may have started its supervisor anew meanwhile."""
    current = Record.load(file)
    if current is None or current.mark != record.mark:
        return False
    record.supervisor = current.supervisor
    return True


def main() -> None:
    """Look after a stack until TERM."""
    os.umask(0o077)
    logs.configure(settings())
    watch(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
