"""The head of the service: Redis, gateway, capture, Flower on one node. It comes back with its data, perhaps
elsewhere.

Its Redis has a certificate, by which clients tell it from whoever took its port while it was away. That signs
itself, is made anew at each start, and lies in the run directory, which every client reads and nobody else: a
stranger has no key for it, so nobody tells a stranger the password.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from services import flower
from services.launch import SlurmError, parts, redis
from services.launch.parts import answers
from services.launch.slurm import place as places
from services.launch.slurm import scheduler
from services.launch.slurm.job import ServiceJob
from services.launch.slurm.place import Place
from services.launch.slurm.plan import HEAD
from services.launch.slurm.rundir import DOWN, STARTING, UP, Head, RunDir
from services.launch.supervisor import LOOK_S, Interrupted, Part
from services.settings import settings
from services.state.api_keys import KeyProblem, KeyStore, Scope
from services.state.redis import connect
from services.state.tenants import DEFAULT_TENANT

log = structlog.get_logger("slurm")

LAST_S = 95.0
"""For nodes to hand back before their time limit: of the 120 s that `#SBATCH --signal` gives."""
STOP_S = 8.0
"""For gateway, capture and Flower to end; what waits at the first two is answered first."""
CAPTURE_ENDS_S = 2.0
"""Of these, for capture to end once its calls have."""
TLS_VARIABLE = "ROLLOUT_SLURM_TLS"
"""`0`: Redis without TLS, as where its traffic must cost nothing and all users of the cluster are trusted."""
OPENSSL_S = 60.0
REDIS_STOP_S = 15.0
"""For Redis to write its last second to disk. Together they stay below Slurm's KillWait (30 s)."""


class HeadJob(ServiceJob):
    """The head job's life, from start to end."""

    def __init__(self, run: RunDir, place: Place) -> None:
        super().__init__(run, place, HEAD, run.logs / f"{HEAD}-{place.job}")
        self._taken: set[int] = set()
        self._turn = 0
        """At which this life of the job took Redis' data; 0 = it has not."""

    def _prepare(self) -> None:
        """Take Redis' data, once the job that has it has ended: two servers would lose what both write."""
        waits_for = ""
        while self.supervisor.signal is None and self._asked() is None:
            turn, other = self.run_dir.data_holder()
            jobs = scheduler.jobs({other} - {"", self.place.job})
            states = {job.state for job in jobs if job.raw_id == other and not job.ended}
            if "RUNNING" in states:  # this one was submitted by hand
                raise SlurmError(
                    f"job {other} is the head of {self.run_dir.path} already; `rollout slurm down` ends it"
                )
            # One that is pending begins again, so its earlier life has ended.
            if states <= {"PENDING"} and self.run_dir.take_data(turn + 1, self.place.job):
                self._turn = turn + 1
                return
            if states and waits_for != other:
                log.info("an earlier head still ends", job=other)
                waits_for = other
            self.supervisor.pause(LOOK_S)

    def _start(self) -> None:
        if not self._turn:
            raise Interrupted
        before = self.run_dir.head()
        address = places.address(self.place.node)
        base = self._environment()
        redis_port, redis_tls = self._start_redis(address, before, base)
        port = self._port(address, before and urlsplit(before.url).port, settings().gateway_port)
        base_url = f"http://{f'[{address}]' if ':' in address else address}"
        url, capture_url = f"{base_url}:{port}", ""
        if capture_port := self._capture_port(address):
            capture_url = base["ROLLOUT_CAPTURE_URL"] = f"{base_url}:{capture_port}"
        head = Head(self.place.job, self.place.node, address, STARTING, url, "", redis_port, redis_tls)
        env = base | {"ROLLOUT_REDIS_URL": self.run_dir.redis_url(head)}
        self._make_key(env["ROLLOUT_REDIS_URL"])
        self.run_dir.write_capture_url(capture_url)
        self.run_dir.write_head(head)
        flower_env = self._start_flower(env)
        listen = {"ROLLOUT_GATEWAY_HOST": address, "ROLLOUT_GATEWAY_PORT": str(port)}
        gateway = self._spawn(parts.gateway(), env | flower_env | listen)
        capture = self._start_capture(address, capture_port, env)
        self.supervisor.wait_for(gateway, lambda: answers(f"{head.url}/health"))
        for part in capture:
            self.supervisor.wait_for(part, lambda part=part: parts.unheard(part, capture_url))
        head = replace(head, state=UP, flower_url=flower_env.get(flower.URL_VARIABLE, ""))
        self.run_dir.write_head(head)
        log.info("the head is up", url=head.url, flower=head.flower_url, node=head.node)

    def _start_redis(self, address: str, before: Head | None, env: dict[str, str]) -> tuple[int | None, bool]:
        """Its port, None where it is not ours, and whether it speaks TLS."""
        choice = redis.choose()
        if choice.url:
            redis.require(choice.url, "start it where the head's node reaches it")
            return None, False
        assert choice.binary is not None
        port = self._port(address, before.redis_port if before else None, 6379)
        # Below a directory of the user's, which is not ours to close to others.
        chosen = os.environ.get("ROLLOUT_SLURM_DATA")
        data = Path(chosen) / f"rollout-redis-{self.run_dir.service}" if chosen else self.run_dir.redis
        certificate = make_certificate(self.run_dir.redis, address, choice.binary)
        server = redis.prepare(choice, data, port, address, self.run_dir.redis_password(), certificate)
        process = self._spawn(Part("redis", server.command), env)
        begun = time.monotonic()
        self.supervisor.wait_for(process, lambda: redis.ping(server.url), patience_s=1800.0)
        log.info("Redis is up", data=str(data), seconds=round(time.monotonic() - begun, 1))
        return port, certificate is not None

    def _port(self, address: str, before: int | None, usual: int) -> int:
        """That of the head's earlier life if it is free, for then nobody notices; else the usual one, else
        any."""
        if before:
            parts.await_freed(address, before)
        return parts.pick_port([port for port in (before, usual) if port], self._taken, address)

    def _capture_port(self, address: str) -> int | None:
        """Where capture is to listen; None: there is another one, or there is to be none."""
        if settings().capture_url or not settings().capture_processes:
            return None
        return self._port(address, urlsplit(self.run_dir.capture_url()).port, parts.CAPTURE_PORT)

    def _start_capture(self, address: str, port: int | None, env: dict[str, str]) -> list[Part]:
        """Its processes, which end as soon as the head's job must."""
        if port is None:
            return []
        grace_s = min(settings().shutdown_grace_s, STOP_S - CAPTURE_ENDS_S)
        env = env | {"ROLLOUT_SHUTDOWN_GRACE_S": str(grace_s)}
        started = parts.capture(address, port, settings().capture_processes)
        return [self._spawn(part, env) for part in started]

    def _make_key(self, url: str) -> None:
        with connect(url, max_connections=2) as client:
            try:
                KeyStore(client).create(DEFAULT_TENANT, [Scope.ADMIN], text=self.run_dir.api_key())
            except KeyProblem as error:
                # Rotated or revoked by an operator, who then has another one.
                log.warning("the key of the run directory is not accepted any more", reason=str(error))

    def _start_flower(self, env: dict[str, str]) -> dict[str, str]:
        """Start Flower on the node's loopback, for some of its pages need no password; what links need to
        know."""
        if os.environ.get("ROLLOUT_SLURM_FLOWER") == "0":
            return {}
        port = self._port("127.0.0.1", None, flower.PORT)
        auth = flower.ensure_auth_file(self.run_dir.flower_auth)
        variables = flower.environment(auth, self.run_dir.flower_db)
        self._spawn(parts.flower(port), env | variables)
        return {flower.URL_VARIABLE: f"http://127.0.0.1:{port}"}

    def _tend(self) -> None:
        # A sign of life: clients take an address without it for that of a head that was killed.
        os.utime(self.run_dir.path / "head.json")

    def _drain(self, asked: float | None) -> None:
        """The nodes hand back first. Their limits are as near as ours, as a rule."""
        if asked is not None or self.supervisor.ends_now:
            return
        log.info("the end is near: the nodes hand back first")
        deadline = time.monotonic() + LAST_S
        while not self.supervisor.ends_now and time.monotonic() < deadline:
            with self._going_on():
                if not self.run_dir.members():
                    return
                self.supervisor.look()
            time.sleep(LOOK_S)

    def _end(self) -> None:
        """Redis last: whoever still writes shall be able to."""
        capture = [name for name in self.supervisor.parts if name.startswith(parts.CAPTURE)]
        self.supervisor.stop(["gateway", *capture, "flower"], STOP_S)
        if any(part.alive for part in self.supervisor.stop(["redis"], REDIS_STOP_S)) or not self._turn:
            return  # nothing ends it, and it may still write: the next head waits for the end of the job
        head = self.run_dir.head()
        if head is not None and head.job == self.place.job:
            self.run_dir.write_head(replace(head, state=DOWN))
        self.run_dir.leave_data(self._turn)
        log.info("the head has ended in order")


def make_certificate(directory: Path, address: str, server: Path) -> tuple[Path, Path] | None:
    """Certificate and key for a Redis at this address; None (said in the log) where there can be none.

    Args:
        server: The binary, which may have been built without TLS.
    """
    openssl = shutil.which("openssl")
    if os.environ.get(TLS_VARIABLE) == "0":
        reason = f"{TLS_VARIABLE} is 0"
    elif openssl is None:
        reason = "openssl is not installed"
    elif not _has_tls(server):
        reason = f"{server} was built without TLS"
    else:
        key, certificate = directory / "tls.key", directory / "tls.crt"
        draft = directory / "tls.new"
        command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650"
        names = ["-subj", "/CN=rollout", "-addext", f"subjectAltName=IP:{address}"]
        files = ["-keyout", str(key), "-out", str(draft)]
        subprocess.run([*command.split(), *names, *files], check=True, capture_output=True, timeout=OPENSSL_S)
        draft.replace(certificate)  # nodes read it; the key is its Redis' alone
        return certificate, key
    log.warning(
        "Redis is without TLS: who takes its port while it is away is told its password", reason=reason
    )
    return None


def _has_tls(server: Path) -> bool:
    """Whether the server knows its settings: without a port it says no more and ends."""
    answer = subprocess.run(
        [str(server), "-"],
        input="port 0\ntls-port 0\nsave ''\n",
        capture_output=True,
        text=True,
        timeout=OPENSSL_S,
        cwd="/",
    )
    return "not listen anywhere" in answer.stdout + answer.stderr
