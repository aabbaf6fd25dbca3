"""What calls to an LLM server carry, from private files: no record, log or answer shows what is in one."""

from __future__ import annotations

import re
from pathlib import Path

import requests

from services import logs
from services.guard import engine_token
from services.launch import paths
from services.settings import settings

SHORTEST = 8
"""Characters of a token. A shorter one would be taken out of texts that have it for other reasons."""
REFUSED = frozenset({401, 403})
"""What a server answers who wants another key, or one."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SCHEME = re.compile(r"^[A-Za-z]+ (?=\S+$)")
_OURS = re.compile(
    r"(?i)host|connection|content-.*|transfer-encoding|te|upgrade|expect|accept-.*|x-request-id"
)
"""Headers that calls have for other reasons."""
_read: dict[Path, tuple[tuple[int, ...], dict[str, str]]] = {}
"""What files held, and how they looked then."""


class EngineKeyProblem(requests.RequestException):
    """A key cannot be used, so a call cannot be made. The text names the file and not what is in it."""


def directories(chosen: str) -> list[str]:
    """Where files of keys may be, as the setting says."""
    return list(filter(None, (chosen or str(paths.home() / "engine-keys")).split(":")))


def headers(key: str | None) -> dict[str, str]:
    """The headers of calls to a server that is registered with this key; none without one.

    Raises:
        EngineKeyProblem: There is no such file, others may read it, or it holds no token.
    """
    if key is None:
        return {}
    if not _NAME.fullmatch(key):
        raise EngineKeyProblem(f"engine key {key!r:.140} is no plain name of a file")
    for path in (Path(directory) / key for directory in directories(settings().engine_keys)):
        try:
            status = path.lstat()
            look = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if path not in _read or _read[path][0] != look:
                _read[path] = look, _header(path)
            return _read[path][1]
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise EngineKeyProblem(
                f"engine key {key!r} {getattr(error, 'strerror', None) or error}"
            ) from None
    raise EngineKeyProblem(
        f"there is no engine key {key!r} here: write its token into a file of that name, mode 600, in the "
        "directory ROLLOUT_ENGINE_KEYS of the gateway and of each worker"
    )


def _header(path: Path) -> dict[str, str]:
    found = engine_token.read(str(path))
    if len(found) != 1:
        raise ValueError("holds no line, or several")
    ((name, value),) = found
    token = _SCHEME.sub("", value)
    if len(token) < SHORTEST or _OURS.fullmatch(name):
        raise ValueError(f"holds less than {SHORTEST} characters, or a header that calls have already")
    logs.hide(token)
    return {name: value}


def refusal(status: int, key: str | None) -> str:
    """What is to be added to the text of an answer with this status."""
    if status not in REFUSED:
        return ""
    return f" (engine key {key!r} was sent)" if key else " (no key was sent: register it with `key`)"
