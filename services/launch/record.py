"""What a running stack of one machine wrote down of itself."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rollout import account
from services.launch import StackError
from services.launch.supervisor import Part


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
    upgrades: int = 0
    """How many have begun."""
    due: list[str] = field(default_factory=list)
    """Parts that the upgrade under way has yet to renew, in this order."""
    told: list[str] = field(default_factory=list)
    """What it has done so far, for people."""
    trouble: str = ""
    """Why the last upgrade has stopped before its end."""

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
