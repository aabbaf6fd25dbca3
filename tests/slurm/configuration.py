"""What the virtual cluster is made of: the programs, slurm.conf and its neighbours."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.launch import paths

PORTS = range(20000, 32000)
"""Below the ports that the kernel gives to outgoing connections, so that a free one stays free."""


class ClusterError(RuntimeError):
    """The cluster cannot be started, a part of it ended, or a command failed: the message says which."""


class Programs:
    """Slurm and munge: those on PATH, else those that deploy/setup/slurm.sh unpacked.

    Raises:
        ClusterError: There are neither.
    """

    _NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")

    def __init__(self) -> None:
        self._path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        self.prefix: Path | None = None
        """Directory above `bin` and `sbin` of the unpacked ones; None = they are installed."""
        if not all(shutil.which(name, path=self._path) for name in self._NEEDED):
            self.prefix = paths.home() / "slurm" / "usr"
            if not (self.prefix / "sbin" / "slurmd").exists():
                raise ClusterError(f"no slurmd on PATH and none in {self.prefix}: run deploy/setup/slurm.sh")

    def daemon(self, name: str) -> str:
        """Path of a daemon."""
        if self.prefix:
            return str(self.prefix / "sbin" / name)
        return str(shutil.which(name, path=self._path))

    @property
    def search_path(self) -> str:
        """PATH on which srun, sbatch … are found."""
        path = os.environ.get("PATH", os.defpath)
        return f"{self.prefix / 'bin'}:{path}" if self.prefix else path

    @property
    def settings(self) -> dict[str, str]:
        """Lines of slurm.conf that say where the plugins are."""
        if self.prefix is None:
            return {}
        return {"PluginDir": str(next((self.prefix / "lib").glob("*/slurm-wlm")))}


def write(
    directory: Path,
    addresses: Mapping[str, str],
    gpu_nodes: list[str],
    cpus: int,
    settings: Mapping[str, str],
) -> Path:
    """Write slurm.conf, gres.conf and the nodes' /etc/hosts; returns the path of the first."""
    for name in ("log", "munge", "state", "spool", "nodes"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    hosts = [Path("/etc/hosts").read_text()] if Path("/etc/hosts").is_file() else []
    hosts += [f"{address} {name}\n" for name, address in addresses.items()]
    (directory / "hosts").write_text("".join(hosts))
    (directory / "gres.conf").write_text(
        "".join(f"NodeName={name} Name=gpu File=/dev/null\n" for name in gpu_nodes)
    )
    conf = directory / "slurm.conf"
    conf.write_text("".join(f"{line}\n" for line in _lines(directory, addresses, gpu_nodes, cpus, settings)))
    return conf


def _lines(
    directory: Path,
    addresses: Mapping[str, str],
    gpu_nodes: list[str],
    cpus: int,
    settings: Mapping[str, str],
) -> Iterator[str]:
    ports = _free_ports(1 + len(addresses))
    for key, value in {**_general(directory, next(ports)), **settings}.items():
        yield f"{key}={value}"
    for name, address in addresses.items():
        gres = " Gres=gpu:1" if name in gpu_nodes else ""
        yield f"NodeName={name} NodeAddr={address} Port={next(ports)} CPUs={cpus} RealMemory=16000{gres}"
    cpu_nodes = ",".join(name for name in addresses if name not in gpu_nodes)
    # GraceTime: seconds between the signal of a preemption and the end.
    yield f"PartitionName=cpu Nodes={cpu_nodes} Default=YES PriorityTier=1 GraceTime=20"
    # A job here takes the place of one in `cpu`, which gets its signal and goes back to the queue.
    yield f"PartitionName=urgent Nodes={cpu_nodes} PriorityTier=10 PreemptMode=OFF"
    if gpu_nodes:
        yield f"PartitionName=gpu Nodes={','.join(gpu_nodes)} PriorityTier=1"


def _general(directory: Path, port: int) -> dict[str, str]:
    user = pwd.getpwuid(os.geteuid()).pw_name
    return {
        "ClusterName": "virtual",
        "SlurmctldHost": f"{socket.gethostname().split('.')[0]}(127.0.0.1)",
        "SlurmctldPort": str(port),
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        # Seconds that the launch of a job may take, and that a requeued one waits.
        "AuthInfo": f"socket={directory}/munge/socket,cred_expire=30",
        "StateSaveLocation": f"{directory}/state",
        "SlurmdSpoolDir": f"{directory}/spool/%n",
        "SlurmctldPidFile": f"{directory}/state/slurmctld.pid",
        "SlurmdPidFile": f"{directory}/spool/%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        # A node claims more processors than the machine has.
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        # Heterogeneous jobs are begun by the backfill scheduler alone.
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=2,batch_sched_delay=1",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        # A loaded machine answers late, and that is no dead node.
        "SlurmdTimeout": "60",
        "UnkillableStepTimeout": "120",
        "GresTypes": "gpu",
    }


def _free_ports(count: int) -> Iterator[int]:
    first = secrets.choice(PORTS)
    given = 0
    for port in (*range(first, PORTS.stop), *range(PORTS.start, first)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        given += 1
        yield port
        if given == count:
            return
    raise ClusterError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")
