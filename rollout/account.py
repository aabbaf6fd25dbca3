"""The services that this account runs: where each listens, its key, and which of them is meant.

`rollout up` writes a file for its service, and client and command line of the same account find address and
key in it, together: the key is of no use elsewhere and is sent nowhere else. A service on Slurm is found by
its run directory. A file is believed only if it is ours and nobody else could have read or written it. A key
is sent only while what listens at its address on this machine runs as ourselves: after a service has died
somebody else may take its port. Who listens on another machine, such as a Slurm head's, cannot be seen.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit

from rollout.errors import AddressError, ApiKeyError

Origin = tuple[str, str, int]
"""Scheme, host and port."""
Address = IPv4Address | IPv6Address
_PORTS = {"http": 80, "https": 443}
RUN_VARIABLE = "ROLLOUT_SLURM_RUN"
"""The run directory of `rollout slurm`."""
CHECKOUT = Path(__file__).resolve().parents[1]
"""Where this package lies."""
_LISTENING = "0A"
"""State of a socket in /proc/net/tcp (proc_pid_net(5), tcp_states.h)."""
_MOST_BYTES = 1 << 16
_SILENCE_S = 180.0
"""Since the last sign of life of a Slurm head, which gives one each second: file systems show them late."""


@dataclass(frozen=True)
class Service:
    """A running service, as its file has it."""

    url: str
    api_key: str
    boot: str
    """Names the machine and its life: after a reboot nothing of it runs."""
    started: float
    """Seconds since the epoch."""
    private: bool = False
    """Found by its address alone: a demo is nobody's service."""
    home: str = ""
    """ROLLOUT_HOME of what started it: `.local` of its checkout, as a rule."""
    redis: str = ""
    """Address of its own Redis, password included; empty where it uses another."""

    @property
    def ended(self) -> bool:
        """Whether nothing of ours listens at its address. False where the system does not say who listens."""
        return owners(origin(self.url)) not in ({os.geteuid()}, None)


def directory() -> Path:
    """Where the files are: below `$XDG_STATE_HOME`, else `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "rollout" / "services"


def boot() -> str:
    """The machine's life so far, by name; empty where the system gives it none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------- private files


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, as a whole."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)
    except BaseException:  # a full disk, say
        draft.unlink(missing_ok=True)
        raise


def read_private(path: Path) -> str | None:
    """What a file holds that only we can have written and read; None when there is no such file.

    Raises:
        ApiKeyError: It is no plain file, belongs to somebody else, or others may read it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ApiKeyError(f"{path} is not read for a key: {error.strerror}; delete it") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        plain = stat.S_ISREG(status.st_mode)
        if not plain or status.st_uid != os.geteuid():
            fault = f"belongs to user {status.st_uid}" if plain else "is no plain file"
            raise ApiKeyError(f"{path} {fault}, so it is not read for a key: delete it")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ApiKeyError(
                f"{path} has mode {mode:04o}, so others may know the key in it: make a new one (`rollout "
                "down`, delete it and the api.key of the run directory, `rollout up`)"
            )
        return file.read(_MOST_BYTES).decode(errors="replace")


# ---------------------------------------------------------------------------------- services


def announce(name: str, service: Service) -> Path:
    """Write the file of a service; `name` is unique to what runs it."""
    place = directory()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.chmod(0o700)
    path = place / f"{name}.json"
    write_private(path, json.dumps(asdict(service), indent=1) + "\n")
    return path


def withdraw(name: str) -> None:
    """Forget a service that ended."""
    (directory() / f"{name}.json").unlink(missing_ok=True)


def services() -> list[Service]:
    """Those of this account that were announced since the machine started, the latest first.

    Raises:
        ApiKeyError: A file, or the directory, is not ours alone.
    """
    try:
        place, now = directory(), boot()
        status = place.stat()
    except (OSError, RuntimeError):  # none was announced, or the account has no home
        return []
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ApiKeyError(
            f"{place} belongs to, or can be written by, somebody else, so nothing there is believed: delete "
            "it, or give the key as api_key or ROLLOUT_API_KEY"
        )
    announced, names = [], {field.name for field in fields(Service)}
    for path in place.glob("*.json"):
        text = read_private(path)
        with suppress(ValueError, TypeError, AttributeError):  # half a file, or another version's
            told = json.loads(text or "").items()
            announced.append(Service(**{name: value for name, value in told if name in names}))
    running = [service for service in announced if service.boot == now]
    return sorted(running, key=lambda service: service.started, reverse=True)


def find() -> tuple[str, str] | None:
    """Address of the service that is meant where none is named, and which one that is; None = there is none.

    It is the Slurm service of ROLLOUT_SLURM_RUN; else the one of the checkout around the current directory,
    or of the checkout that this package lies in, even while it is away; else what this account started last
    and that runs.

    Raises:
        AddressError: ROLLOUT_SLURM_RUN is set, and its head is not up.
        ApiKeyError: As of `services`.
    """
    if run_dir := os.environ.get(RUN_VARIABLE):
        if url := _slurm_url(run_dir):
            return url, f"the Slurm service of {run_dir} ({RUN_VARIABLE})"
        raise AddressError(
            f"{RUN_VARIABLE}={run_dir}: its service has no head that is up, as `rollout slurm status` shows; "
            "--url or ROLLOUT_URL names another service"
        )
    announced = [service for service in services() if not service.private]
    # Of several the latest, and one that runs before one that ended.
    running = [service for service in announced if not service.ended]
    for home in _homes():
        here = [service for service in announced if service.home == str(home)]
        if live := next((service for service in here if service in running), None):
            return live.url, f"the service of {_short(home)}"
        if url := _slurm_url(home / "slurm-run"):
            return url, f"the Slurm service of {home / 'slurm-run'}"
        if here:
            return here[0].url, f"the service of {_short(home)}; it does not run now: `rollout up` starts it"
    if running:
        home = running[0].home  # "" in the file of a release before
        of = f", of {_short(Path(home))}" if home else ""
        return running[0].url, f"the latest service of this account{of}"
    return None


def _homes() -> Iterator[Path]:
    """ROLLOUT_HOME, if it is set, else `.local` of the directories around us and of our checkout."""
    if home := os.environ.get("ROLLOUT_HOME"):
        yield Path(home).absolute()
        return
    with suppress(OSError):  # the current directory was deleted
        here = Path.cwd()
        yield from (directory / ".local" for directory in (here, *here.parents))
    yield CHECKOUT / ".local"


def _short(home: Path) -> Path:
    """The checkout, where the home is in one."""
    return home.parent if home.name == ".local" else home


def _slurm_url(run_dir: str | Path) -> str | None:
    """Address of the service of a Slurm run directory, as its head last said; None where that is no service.

    Only what nobody else can write is believed. Whoever may read it is not told the key.
    """
    path = Path(run_dir)
    try:
        for place in (path, path / "head.json"):
            status = place.stat()
            if not run_dir or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
        if now_at(path) - status.st_mtime > _SILENCE_S:
            return None  # its head was killed, and anybody may have the address now
        head = json.loads((path / "head.json").read_text())
        return head["url"] if head["state"] == "up" and all(origin(head["url"])) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # absent, or half a file
        return None


def now_at(directory: Path) -> float:
    """Seconds since the epoch by the clock that dates a directory's files, which may be that of a server."""
    try:
        with TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # we cannot write there
        return time.time()


def service_at(url: str) -> Service | Path | None:
    """This account's service at an address, of a Slurm one its run directory. Raises as `services`."""
    place = _numeric(url)
    for service in services():
        if _numeric(service.url) == place:
            return service
    for run_dir in (os.environ.get(RUN_VARIABLE, ""), *(home / "slurm-run" for home in _homes())):
        if (head := _slurm_url(run_dir)) and _numeric(head) == place:
            return Path(run_dir)
    return None


def key_for(url: str) -> str | None:
    """The key of this account's service at an address, if there is one. Raises as `services`."""
    service = service_at(url)
    if isinstance(service, Path):
        return (read_private(service / "api.key") or "").strip() or None
    return service and service.api_key


# ---------------------------------------------------------------------------------- addresses


def origin(url: str) -> Origin:
    """Raises ValueError for what is no address."""
    parts = urlsplit(url)
    port = _PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    return parts.scheme, (parts.hostname or "").rstrip("."), port


def _numeric(url: str) -> Origin:
    """`localhost` is what we call 127.0.0.1; who listens at either is looked at before anything is sent."""
    scheme, host, port = origin(url)
    return scheme, "127.0.0.1" if host == "localhost" else host, port


def owners(place: Origin) -> set[int] | None:
    """Users whose programs listen at an address of this machine; None where the system does not say.

    Empty for an address of another machine.
    """
    _, host, port = place
    addresses = set()
    for name in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        with suppress(ValueError):  # a name: of another machine
            addresses.add(_plain(ip_address(name)))
    try:
        return {
            uid
            for uid, address, open_port in _listening()
            if open_port == port and (address.is_unspecified or address in addresses)
        }
    except (OSError, ValueError, IndexError):
        return None


def other_owners(place: Origin) -> set[int]:
    """Users other than ourselves whose programs are known to listen at an address of this machine."""
    return (owners(place) or set()) - {os.geteuid()}


def _plain(address: Address) -> Address:
    return getattr(address, "ipv4_mapped", None) or address


def _listening() -> Iterator[tuple[int, Address, int]]:
    """User, address and port of each TCP socket that listens in our network namespace."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except FileNotFoundError:
            if name == "tcp":
                raise
            continue
        for columns in map(str.split, lines):
            if columns[3] != _LISTENING:
                continue
            digits, _, port = columns[1].partition(":")
            # The kernel prints words of four bytes in the order of the machine.
            words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
            packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
            yield int(columns[7]), _plain(ip_address(packed)), int(port, 16)


class Owned:
    """Watches that what listens at an address, where it or its key was found and not given, is ours."""

    def __init__(self, url: str) -> None:
        self._origin = origin(url)
        self._looked = -math.inf

    def require(self) -> None:
        """Raise ApiKeyError when another user listens there; looked up once in a second."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        if users := other_owners(self._origin):
            _, host, port = self._origin
            raise ApiKeyError(
                f"user {min(users)} listens at {host}:{port}, where a service of this account is meant: no "
                "key is sent there. `rollout up` starts yours anew; --url or ROLLOUT_URL names another one"
            )
        self._looked = now
