"""Keeps an LLM server for those who bring its token: an ASGI middleware that a stock vLLM loads.

    export PYTHONPATH=…/services/guard ROLLOUT_ENGINE_TOKEN_FILE=FILE
    vllm serve … --middleware engine_token.RequireToken

vLLM's own `--api-key` guards /v1, /v2 and /inference, and neither /pause nor /collective_rpc. Nothing but the
standard library is imported here, for vLLM's environment has nothing of ours.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

VARIABLE = "ROLLOUT_ENGINE_TOKEN_FILE"
OPEN = "/health"
"""Who waits for a server to come up knows no token, and learns nothing there."""
LOOK_S = 1.0
"""Seconds between two looks whether the file has changed."""
REFUSAL = "this server asks for its token, in a header"


class TokenFile:
    """The tokens of a server: one a line, or `Header-Name: value`. Any of them is enough, so one can be
    exchanged while both are accepted."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ValueError: It cannot be read, others may read it, or there is nothing in it.
        """
        self._path = path
        self._looked = float("-inf")
        self._seen: tuple[int, ...] = ()
        self._wanted: list[tuple[bytes, bytes]] = []
        try:
            self._read()
        except OSError as error:
            raise ValueError(f"token file {path} cannot be read: {error.strerror}") from None
        if not self._wanted:
            raise ValueError(f"token file {path} is empty")

    def permits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a token is among the headers of a request."""
        if time.monotonic() - self._looked > LOOK_S:
            with suppress(OSError, ValueError):  # while it is exchanged, or its file system is away
                self._read()
        brought = [(name.lower(), value) for name, value in headers]
        matches = [
            hmac.compare_digest(value, wanted)
            for header, wanted in self._wanted
            for name, value in brought
            if name == header
        ]
        return any(matches)

    def _read(self) -> None:
        self._looked = time.monotonic()
        with Path(self._path).open(encoding="ascii") as file:
            status = os.fstat(file.fileno())
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen:
                return
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise ValueError(f"token file {self._path} must be a file that only its owner can read (600)")
            lines = [line.strip() for line in file.read().splitlines() if line.strip()]
        self._wanted = [_header(line) for line in lines]
        self._seen = seen


def _header(line: str) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(": ")
    pair = (name.lower(), value.strip()) if colon else ("authorization", f"Bearer {line}")
    return pair[0].encode(), pair[1].encode()


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
            error = {"message": REFUSAL, "type": "AuthenticationError", "param": None, "code": 401}
            body = json.dumps({"error": error}).encode()
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
