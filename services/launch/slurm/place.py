"""Where a job runs: its node, the address others reach it by, its node-local directory, and a clean
environment."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import IO

import psutil
import structlog

from sandbox.errors import SandboxError
from sandbox.host_client import HostClient, ensure_host
from sandbox.paths import SOCKET_PATH_MAX
from services.launch import SlurmError
from services.launch.slurm import scheduler

log = structlog.get_logger("slurm")

LEAKS = ("SLURM", "SBATCH", "SRUN_", "SALLOC", "PMI", "OMPI_", "ORTE_", "PRTE_", "PRRTE_", "MPI_", "I_MPI_")
"""How variables begin that belong to the job and not to what runs in it. A program in a sandbox that finds
them takes itself for a task of the job: MPI programs hang, srun starts in the wrong allocation."""
SOCKET_ROOM = 24
"""Bytes that a sandbox's socket adds to the path of its host's directory."""
LOCK_NAME = "job.lock"


@dataclass(frozen=True)
class Place:
    """The node and job of this process."""

    node: str
    job: str
    """Of a heterogeneous job, the id of its first component."""
    step: bool = False
    """One of many in a job that carries the whole service."""

    @property
    def name(self) -> str:
        """Of the node in queue names. With the job in it: two jobs on a node must not share queues, and what
        waits for a node of an earlier job waits in vain. `rollout.cli.common.node_shown` takes it off."""
        plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in self.node)
        return f"{plain}-job{self.job}"

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Place:
        """From the job's environment. The node's name is Slurm's: several may share a host name.

        Raises:
            SlurmError: This is no job.
        """
        node = environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
        job = environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID", "")
        if not job:
            raise SlurmError("SLURM_JOB_ID is not set: this runs inside a job; submit deploy/slurm/*.sbatch")
        return cls(node, job, environ.get("ROLLOUT_SLURM_STEP") == "1")

    def requeue_if_wanted(self) -> None:
        """At the time limit: back into the queue, if the service is to go on. A step leaves that to its
        job."""
        if os.environ.get("ROLLOUT_SLURM_RENEW") == "1" and not self.step:
            log.info("the time limit is near: back to the queue")
            try:
                scheduler.call(["scontrol", "requeue", self.job])
            except SlurmError as error:
                # When it works it ends this job at once, and the command with it.
                log.warning("whether the job is queued again shows in squeue", error=str(error))


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to the job."""
    return {name: value for name, value in environ.items() if not name.startswith(LEAKS)}


def address(node: str, environ: Mapping[str, str] = os.environ) -> str:
    """The address that others reach this node by: ROLLOUT_SLURM_ADDRESS, that of ROLLOUT_SLURM_INTERFACE, or
    the one that Slurm has.

    Raises:
        SlurmError: There is no such interface, or the name of the node has no address.
    """
    if given := environ.get("ROLLOUT_SLURM_ADDRESS"):
        return given
    if interface := environ.get("ROLLOUT_SLURM_INTERFACE"):
        interfaces = psutil.net_if_addrs()
        for entry in sorted(interfaces.get(interface, []), key=lambda entry: entry.family):
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                return entry.address.partition("%")[0]
        raise SlurmError(
            f"ROLLOUT_SLURM_INTERFACE={interface}: node {node} has no such interface with an address; it has "
            f"{', '.join(sorted(interfaces))}"
        )
    name = scheduler.node_address(node) or node
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        # Many a node's /etc/hosts says 127.0.1.1 of its own name.
        outside = (text for text in addresses if not ip_address(text.partition("%")[0]).is_loopback)
        return next(outside, addresses[0])
    except OSError as error:
        raise SlurmError(
            f"node {node}: its address {name!r} cannot be resolved ({error}); set ROLLOUT_SLURM_INTERFACE or "
            "ROLLOUT_SLURM_ADDRESS"
        ) from None


class Scratch:
    """The node-local directory of this job's sandboxes, held while the job lives."""

    def __init__(self, root: Path, service: str, job: str) -> None:
        """
        Raises:
            SlurmError: It would be too long for sockets, or cannot be made.
        """
        self._prefix = f"sbx-{os.getuid()}-{service}-"
        self.root = root
        self.path = root / f"{self._prefix}{job}"
        if len(os.fsencode(self.path)) + SOCKET_ROOM > SOCKET_PATH_MAX:
            raise SlurmError(
                f"scratch {root} is too long: a socket's path has at most {SOCKET_PATH_MAX} bytes; give a "
                "shorter one in the site file"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            status = self.path.lstat()
        except OSError as error:
            raise SlurmError(f"scratch {self.path} cannot be made: {error}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            # Everybody can write to /tmp, and foresee the name.
            raise SlurmError(f"scratch {self.path} was there already, and others may write to it")
        self._lock = _hold(self.path)
        if self._lock is None:
            raise SlurmError(f"scratch {self.path} is in use by another process of this job")

    def sweep(self) -> list[str]:
        """End and remove what jobs of this service left here that were killed, this one's earlier life
        included.

        Returns:
            The names of the directories that were cleared.
        """
        cleared = []
        if _end_host(self.path):
            cleared.append(self.path.name)
        for path in self.root.glob(f"{self._prefix}*"):
            if path == self.path or path.is_symlink() or path.lstat().st_uid != os.geteuid():
                continue
            lock = _hold(path)
            if lock is None:  # that job lives
                continue
            with lock:
                _end_host(path)
                _remove(path)
            cleared.append(path.name)
        return cleared

    def remove(self) -> None:
        """End the sandbox host with all its sandboxes, and leave nothing."""
        _end_host(self.path)
        _remove(self.path)
        if self._lock is not None:
            self._lock.close()


def _hold(directory: Path) -> IO[str] | None:
    """The lock of a job's directory; None while somebody else has it. It goes with its process, however that
    ends."""
    lock = (directory / LOCK_NAME).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _end_host(directory: Path) -> bool:
    """End a sandbox host and its sandboxes; one that was killed is started once more, for it knows what to
    end. Whether there was one."""
    if not any((directory / name).exists() for name in ("host.sock", "records")):
        return False
    try:
        ensure_host(directory)
        asyncio.run(HostClient(directory).stop())
    except SandboxError as error:
        log.warning("a sandbox host did not stop in order", directory=str(directory), error=str(error))
    return True


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        log.warning("not removed entirely; root's sandboxes may own files there", directory=str(directory))
