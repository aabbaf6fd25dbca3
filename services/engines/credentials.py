"""What calls to an LLM server carry, from private files: no record, log or answer shows what is in one."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import requests

from services import logs
from services.launch import paths
from services.settings import settings

MOST_BYTES = 4096
SHORTEST = 8
"""Characters of a value. A shorter one would be taken out of texts that have it for other reasons."""
REFUSED = frozenset({401, 403})
"""What a server answers who wants another key, or one."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+): +(\S(?:.*\S)?)")
_OURS = frozenset(
    {"host", "connection", "content-type", "content-length", "transfer-encoding", "te", "upgrade", "expect"}
    | {"accept-encoding", "x-request-id"}
)
"""Headers that calls have for other reasons."""
_read: dict[Path, tuple[tuple[int, ...], dict[str, str]]] = {}
"""What files held, and how they looked then."""


class KeyProblem(requests.RequestException):
    """A key cannot be used, so a call cannot be made. The text names the file and not what is in it."""


def headers(key: str | None) -> dict[str, str]:
    """The headers of calls to a server that is registered with this key; none without one.

    Raises:
        KeyProblem: There is no such file, others may read it, or it holds no token.
    """
    if key is None:
        return {}
    if not _NAME.fullmatch(key):
        raise KeyProblem(f"engine key {key!r:.140} is no plain name of a file")
    for directory in directories(settings().engine_keys):
        path = Path(directory) / key
        try:
            look = _look(path.lstat())
            if path not in _read or _read[path][0] != look:
                _read[path] = _checked(path, key)
            return _read[path][1]
        except FileNotFoundError:
            continue
        except OSError as error:
            if isinstance(error, KeyProblem):
                raise
            raise KeyProblem(f"engine key {key!r} cannot be read: {error.strerror}") from None
    raise KeyProblem(
        f"there is no engine key {key!r} here: write its token into a file of that name, mode 600, in the "
        "directory ROLLOUT_ENGINE_KEYS of the gateway and of each worker"
    )


def directories(chosen: str) -> list[str]:
    """Where files of keys may be, as the setting says."""
    return list(filter(None, (chosen or str(paths.home() / "engine-keys")).split(":")))


def refusal(status: int, key: str | None) -> str:
    """What is to be added to the text of an answer with this status."""
    if status not in REFUSED:
        return ""
    return f" (engine key {key!r} was sent)" if key else " (no key was sent: register it with `key`)"


def _look(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _checked(path: Path, key: str) -> tuple[tuple[int, ...], dict[str, str]]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        fault = _fault(status)
        data = b"" if fault else file.read(MOST_BYTES + 1)
    text = data.decode("ascii", "replace").strip(" \r\n")
    if not fault and len(data) > MOST_BYTES:
        fault = f"has more than {MOST_BYTES} bytes"
    elif not fault and not (text.isascii() and text.isprintable()):
        fault = "holds more than one line of printable ASCII"
    match = _HEADER.fullmatch(text)
    name, value = match.groups() if match else ("Authorization", f"Bearer {text}")
    secret = value if match else text
    if not fault and (len(secret) < SHORTEST or name.lower() in _OURS or (not match and " " in text)):
        fault = f"holds neither a token of {SHORTEST} characters or more, nor one line `Header-Name: value`"
    if fault:
        raise KeyProblem(f"engine key {key!r} {fault}")
    logs.hide(secret)
    if len(last := secret.rpartition(" ")[2]) >= SHORTEST:
        logs.hide(last)
    return _look(status), {name: value}


def _fault(status: os.stat_result) -> str:
    """Why a file is no place for a key; empty = it is one."""
    if not stat.S_ISREG(status.st_mode):
        return "is no plain file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o077:
        return f"can be read by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600"
    return ""
