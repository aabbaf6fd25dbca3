"""The run directory: all that the jobs of one service and its user share, on a file system that every node
sees.

```
environment      shell: modules and variables of every job      (0600)
options.json     what `up` was asked; `scale` submits the same
jobs.json        what was submitted
head.json        where the head listens now
capture.json     where its capture does; apart, for jobs of an older release read the other one, too
members/         NODE-jobID.json: what runs there
control/         NODE-jobID.json, head.json: what they are asked to do; NODE-jobID.drained: what became of the
                 rollouts there; of a job that carries everything JOB.ends: its time limit is near,
                 ROLE-JOB….step: exit status of a step, empty while it runs
redis/           configuration with the password, append-only file; job.N: whose head was the Nth to take that
                 file, "" once it has left it
api.key          key of the scope admin                        (0600)
engine-keys/     token of its LLM servers, for them and for whoever calls them
snapshots/       files of sandboxes between two nodes           (0700)
flower.auth      user:password of Flower                       (0600)
logs/            JOB's own output, and NODE-jobID/PART.log
```

Files are replaced as a whole, so a reader never sees half of one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.launch import SlurmError
from services.launch.redis import url_of
from services.state.api_keys import new_text

STARTING, UP, DRAINING, DOWN = "starting", "up", "draining", "down"
"""States of a head or member. A head that starts has its Redis already, which is all that nodes need. A job
that was killed leaves `up` behind: Slurm knows better."""
NO_SANDBOX = "NO SANDBOX WORKS"
"""How `Member.sandbox` begins where none does."""
ENGINE_KEY = "slurm-engines"
"""By which LLM servers of engine jobs are registered; the file's name."""
_STALE_READS = 3


@dataclass(frozen=True)
class Head:
    """Where the head of the service listens."""

    job: str
    node: str
    address: str
    state: str
    url: str
    """Of the gateway."""
    flower_url: str
    redis_port: int | None
    """None: the Redis is not ours, its address is in ROLLOUT_REDIS_URL."""
    redis_tls: bool = False
    """It speaks TLS, with the certificate of the run directory."""


@dataclass
class Member:
    """A node job, or an engine job, as it describes itself."""

    name: str
    """Unique: node and job."""
    role: str
    job: str
    node: str
    state: str
    stages: list[str] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)
    """Id → URL of the LLM servers of an engine job that rollouts use."""
    sandbox: str = ""
    """Which runtime the sandboxes get, or why none works."""
    failing: dict[str, str] = field(default_factory=dict)
    """Part → how it ends again and again."""


@dataclass
class Submitted:
    """A job, or a job array, that was submitted."""

    id: str
    role: str
    count: int = 1
    stages: list[str] = field(default_factory=list)
    attached: bool = False
    """It is an allocation of the user's own."""


@dataclass(frozen=True)
class Step:
    """A step of a job that carries the whole service."""

    name: str
    """`node-12-n1`, as its log is called."""
    role: str
    node: str
    """Empty for the head's, which is on the first."""
    status: int | None
    """Exit status; None while it runs."""
    log: Path


class RunDir:
    """The run directory at `path`; nothing is made before `make`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"
        self.redis = self.path / "redis"
        self.environment = self.path / "environment"
        self.key_file = self.path / "api.key"
        self.engine_keys = self.path / "engine-keys"
        self.snapshots = self.path / "snapshots"
        self.flower_auth = self.path / "flower.auth"
        self.flower_db = self.path / "flower.db"

    @property
    def service(self) -> str:
        """Six characters that tell this service from the user's others, in names of jobs and directories."""
        return hashlib.sha256(str(self.path).encode()).hexdigest()[:6]

    def make(self) -> None:
        """Make it, open to its owner alone.

        Raises:
            SlurmError: It belongs to somebody else, or cannot be made.
        """
        try:
            if set(str(self.path)) & set("%\\\n"):
                raise SlurmError(
                    f"run directory {str(self.path)!r}: Slurm reads %, \\ and line ends in the name of a log "
                    "otherwise; choose one with --run-dir"
                )
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.geteuid():
                raise SlurmError(
                    f"run directory {self.path} belongs to another user; choose one with --run-dir"
                )
            self.path.chmod(0o700)
            for name in ("logs", "members", "control"):
                (self.path / name).mkdir(exist_ok=True)
            self.snapshots.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SlurmError(
                f"run directory {self.path} cannot be made: {error}; choose one with --run-dir"
            ) from None

    # -- head --------------------------------------------------------------------------------

    def head(self) -> Head | None:
        """Where the head listens, as it last said; None = there has been none."""
        data = self._read("head.json")
        return Head(**data) if data else None

    def write_head(self, head: Head) -> None:
        self._write("head.json", asdict(head))

    def capture_url(self) -> str:
        """Address of the head's capture; empty = it has none."""
        return self._read("capture.json") or ""

    def write_capture_url(self, url: str) -> None:
        self._write("capture.json", url)

    def redis_url(self, head: Head) -> str:
        """Address of Redis with its password.

        Raises:
            SlurmError: It is not the head's own, and ROLLOUT_REDIS_URL is not set here.
        """
        if head.redis_port is None:
            if url := os.environ.get("ROLLOUT_REDIS_URL"):
                return url
            raise SlurmError(f"the service of {self.path} uses a Redis of yours: set ROLLOUT_REDIS_URL")
        certificate = self.redis / "tls.crt" if head.redis_tls else None
        return url_of(head.address, head.redis_port, self.redis_password(), certificate)

    def data_holder(self) -> tuple[int, str]:
        """How often Redis' data was taken, and the job that has it; "" once that job's head has left it.

        The job may have been killed since.
        """
        suffixes = (path.suffix[1:] for path in self.redis.glob("job.*"))
        turn = max((int(suffix) for suffix in suffixes if suffix.isdecimal()), default=0)
        if not turn and (before := self.redis / "job").exists():  # a head of release 0.1.0 may still have it
            return 0, before.read_text().strip()
        return turn, self._read(f"redis/job.{turn}") or ""

    def take_data(self, turn: int, job: str) -> bool:
        """Take Redis' data at this turn, which one job alone can; whether it was this one.

        No turn comes twice, so its file stays: a listing of the directory that is out of date does no harm.
        """
        self.redis.mkdir(mode=0o700, exist_ok=True)
        return self._create(self.redis / f"job.{turn}", json.dumps(job))

    def leave_data(self, turn: int) -> None:
        self._write(f"redis/job.{turn}", "")

    def redis_password(self) -> str:
        """The password of Redis, made at the first call: a head that comes back keeps it."""
        return self._secret(self.redis / "password", lambda: secrets.token_hex(32))

    def api_key(self) -> str:
        """The key of the operator, made at the first call."""
        return self._secret(self.key_file, new_text)

    def renew_engine_key(self) -> None:
        """A token for the LLM servers of a service that begins."""
        self.engine_keys.mkdir(mode=0o700, exist_ok=True)
        self.write_private(self.engine_keys / ENGINE_KEY, secrets.token_urlsafe(32) + "\n")

    def _secret(self, path: Path, make: Callable[[], str]) -> str:
        if not path.exists():
            self._create(path, make() + "\n")
        return path.read_text().strip()

    # -- members -----------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """What node and engine jobs last said of themselves; also those that were killed since."""
        paths = sorted((self.path / "members").glob("*.json"))
        return [Member(**data) for path in paths if (data := self._read(f"members/{path.name}"))]

    def write_member(self, member: Member) -> None:
        self._write(f"members/{member.name}.json", asdict(member))

    def forget_member(self, name: str) -> None:
        for place in ("members", "control"):
            (self.path / place / f"{name}.json").unlink(missing_ok=True)

    def forget_earlier_life(self, job: str) -> None:
        """A job that was requeued begins: what it said on the node where it was killed holds no more."""
        for member in self.members():
            if member.job == job:
                # What it was asked to do still holds, if it is the same node.
                (self.path / "members" / f"{member.name}.json").unlink(missing_ok=True)

    def ask_to_drain(self, name: str, grace_s: float) -> None:
        """Ask a member to end after its rollouts have, or after `grace_s` seconds, whichever is first."""
        self._write(f"control/{name}.json", {"drain_s": grace_s})

    def asked_to_drain(self, name: str) -> float | None:
        """Seconds of grace that a member was given; None = it was not asked to end."""
        data = self._read(f"control/{name}.json")
        return float(data["drain_s"]) if data else None

    def drained(self) -> dict[str, str]:
        """What members said when they had drained, the latest last."""
        paths = sorted((self.path / "control").glob("*.drained"), key=lambda path: path.stat().st_mtime)
        return {path.stem: path.read_text() for path in paths}

    def job_ends(self, job: str) -> bool:
        """Whether the script of a job that carries the whole service was told that its time limit is near."""
        return (self.path / "control" / f"{job}.ends").exists()

    def steps(self, job: str) -> list[Step]:
        """Steps of a job that carries the whole service, as its script notes them."""
        pattern = re.compile(rf"(\w+)-{re.escape(job)}(?:-(.+))?")
        steps = []
        for path in sorted((self.path / "control").glob("*.step")):
            if name := pattern.fullmatch(path.stem):
                text = path.read_text().strip()
                log = self.logs / f"{path.stem}.log"
                steps.append(Step(path.stem, name[1], name[2] or "", int(text) if text else None, log))
        return steps

    def forget_life(self) -> None:
        """What was submitted has ended: nothing holds any more of what it said or was asked."""
        for directory in ("members", "control"):
            for path in (self.path / directory).glob("[!.]*"):  # not what somebody is writing
                path.unlink(missing_ok=True)
        self.write_submitted([])

    # -- what was submitted ------------------------------------------------------------------

    def submitted(self) -> list[Submitted]:
        return [Submitted(**data) for data in self._read("jobs.json") or []]

    def write_submitted(self, jobs: list[Submitted]) -> None:
        self._write("jobs.json", [asdict(job) for job in jobs])

    def options(self) -> dict[str, Any] | None:
        return self._read("options.json")

    def write_options(self, options: dict[str, Any]) -> None:
        self._write("options.json", options)

    # -- files -------------------------------------------------------------------------------

    def write_private(self, path: Path, text: str) -> None:
        """Write a file that only its owner can read, as a whole."""
        self._draft(path, text).replace(path)

    def _create(self, path: Path, text: str) -> bool:
        """Write such a file where there is none. Of several who try one alone does; whether it was us."""
        draft = self._draft(path, text)
        with suppress(FileExistsError):
            os.link(draft, path)
        # NFS may say "it exists" where it did the same call twice, but it counts the links (open(2), O_EXCL).
        first = draft.stat().st_nlink == 2
        draft.unlink()
        return first

    def _draft(self, path: Path, text: str) -> Path:
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # other nodes read it
        return draft

    def _write(self, name: str, value: Any) -> None:
        self.write_private(self.path / name, json.dumps(value, indent=1) + "\n")

    def _read(self, name: str) -> Any:
        for tries_left in reversed(range(_STALE_READS)):
            try:
                return json.loads((self.path / name).read_text())
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (OSError, ValueError) as error:
                # On NFS a file that another node replaces while it is read.
                if not (tries_left and isinstance(error, OSError) and error.errno == errno.ESTALE):
                    raise SlurmError(f"{self.path / name} cannot be read: {error}; delete it") from None
        return None
