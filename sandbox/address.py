"""Where a sandbox's server is reached: a Unix socket, and a key that its host alone knows.

The key is what keeps an agent out of other sandboxes, to whom such a socket was shown: unlike the host, a
server cannot look at who has connected, for from inside its namespaces all others are nobody.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from sandbox import paths
from sandbox.server import wire

KEY = re.compile(r"(.*)#([0-9a-f]{32})")


def new_key() -> str:
    """128 random bits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Address:
    """Shown as the path alone, for it comes into logs and error messages."""

    path: str
    key: str | None = None

    @classmethod
    def parse(cls, text: str | Address) -> Address:
        """Of `PATH#KEY` or `PATH`. Raises SandboxError for a path that no socket can have."""
        if isinstance(text, Address):
            return text
        match = KEY.fullmatch(text)
        path, key = (match[1], match[2]) if match else (text, None)
        return cls(paths.check_socket_path(path), key)

    def greeting(self) -> bytes:
        """What goes first on a connection."""
        return wire.encode({"key": self.key}) if self.key else b""

    def text(self) -> str:
        """As `parse` reads it."""
        return f"{self.path}#{self.key}" if self.key else self.path

    def __str__(self) -> str:
        return self.path
