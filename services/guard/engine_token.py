"""Keeps an LLM server for those who bring its token: an ASGI middleware that a stock vLLM loads.

    export PYTHONPATH=…/services/guard ROLLOUT_ENGINE_TOKEN_FILE=FILE
    vllm serve … --middleware engine_token.RequireToken

vLLM's own `--api-key` guards /v1, /v2 and /inference, and neither /pause nor /collective_rpc. Nothing but the
standard library is imported here, for vLLM's environment has nothing of ours.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress

VARIABLE = "ROLLOUT_ENGINE_TOKEN_FILE"
OPEN = "/health"
"""Who waits for a server to come up knows no token, and learns nothing there."""
LOOK_S = 1.0
"""Seconds between two looks whether the file has changed."""
MOST_BYTES = 4096
REFUSAL = "this server asks for its token, in a header"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read(path: str) -> list[tuple[str, str]]:
    """The headers that a private file stands for: a token a line, or `Header-Name: value`.

    Raises:
        OSError: It cannot be read.
        ValueError: Others may have read or written it, or it holds something else. What, is not said.
    """
    with os.fdopen(os.open(path, _FLAGS), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no plain file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"belongs to user {status.st_uid}")
        if status.st_mode & 0o077:
            raise ValueError(f"is open to others (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES} bytes")
    lines = data.decode("ascii", "replace").replace("\r\n", "\n").split("\n")
    return [_header(line.strip(" ")) for line in lines if line.strip(" ")]


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(": ")
    name, value = (name, value.strip()) if colon else ("Authorization", f"Bearer {line}")
    if not (line.isascii() and line.isprintable() and _HEADER.fullmatch(name)) or (not colon and " " in line):
        raise ValueError("has a line that is neither a token nor `Header-Name: value`, in printable ASCII")
    return name, value


class TokenFile:
    """The tokens of a server. Any of them is enough, so one is exchanged while both are accepted."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ValueError: It cannot be used, or is empty.
        """
        self._path = path
        try:
            self._wanted = read(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"token file {path}: {error}") from None
        if not self._wanted:
            raise ValueError(f"token file {path} is empty")
        self._looked = time.monotonic()

    def permits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a token is among the headers of a request."""
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            with suppress(OSError, ValueError):  # while it is exchanged, or its file system is away
                self._wanted = read(self._path)
        brought = [(name.lower(), value) for name, value in headers]
        wanted = [(name.lower().encode(), value.encode()) for name, value in self._wanted]
        pairs = [(value, token) for name, value in brought for header, token in wanted if name == header]
        return any(hmac.compare_digest(value, token) for value, token in pairs)


class RequireToken:
    """The middleware. It guards every route but /health, web sockets as well, whatever the method."""

    def __init__(self, app) -> None:
        self._app = app
        self._tokens = TokenFile(os.environ.get(VARIABLE) or "")

    async def __call__(self, scope, receive, send) -> None:
        kind = scope["type"]
        guarded = kind == "websocket" or (kind == "http" and scope["path"] != OPEN)
        if not guarded or self._tokens.permits(scope["headers"]):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": {"message": "%s", "code": 401}}' % REFUSAL.encode()
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
