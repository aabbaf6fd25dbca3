"""A Slurm cluster on one machine: munged, slurmctld and a slurmd for each node, as the current user.

Every node has namespaces of its own: process ids, host name, /tmp, /dev/shm, and an address on loopback. So a
power cut is one SIGKILL that leaves nothing of a node but its /tmp, and whoever takes what is on one node to
be on another finds out. Network, memory and the rest of the file system are the machine's. All ends with the
process that made the cluster, also when that is killed.

By hand: ``python -m tests.slurm.cluster --nodes 4`` prints what to export, and stays until Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from services.launch import paths
from tests.slurm import configuration
from tests.slurm.configuration import ClusterError, Programs

PATIENCE_S = 120.0
"""Seconds that the cluster gets to do a thing; an idle machine starts a whole one in 1.5."""
POLL_S = 0.25
"""Each look is a program of Slurm's, or several."""
LONGEST_DIRECTORY = 60
"""A socket's path has at most 107 bytes."""
NODE_SCRIPT = Path(__file__).with_name("node.sh")


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    id: str
    """As squeue shows it: `12`, of an array `12_1`, of a heterogeneous job `12+0`."""
    number: str
    """Its own, also where `id` is that of an array."""
    name: str
    state: str
    """RUNNING, PENDING …"""
    nodes: str
    """Names as Slurm writes them: `n[1-2]`."""
    reason: str


class SlurmCluster:
    """A context manager; inside it the cluster runs.

    Args:
        directory: Where all of it is kept: configuration, logs, each node's /tmp. Short; made if missing. All
            nodes see it, like a shared file system.
        nodes: Nodes n1, n2 … of the partitions `cpu`, the default one, and `urgent`, which preempts it.
        gpu_nodes: Nodes g1, g2 … of the partition `gpu`, each with one `gpu` that is not there.
        cpus: Processors that each node claims to have.
        settings: Further lines of slurm.conf, or other values for those of configuration.py.

    Raises:
        ClusterError: A program is missing, a daemon did not start, a node did not register.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int = 4,
        gpu_nodes: int = 1,
        cpus: int = 16,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        if len(str(self.directory)) > LONGEST_DIRECTORY:
            raise ClusterError(
                f"{self.directory} has more than {LONGEST_DIRECTORY} characters, too many for sockets in it: "
                "take a directory right below /tmp"
            )
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self.gpu_nodes = [f"g{number + 1}" for number in range(gpu_nodes)]
        # Two clusters at once have different addresses.
        network = f"127.{secrets.randbelow(250) + 2}.0"
        self.addresses = {
            name: f"{network}.{index + 11}" for index, name in enumerate(self.nodes + self.gpu_nodes)
        }
        self._cpus = cpus
        self._settings = dict(settings or {})
        self._daemons: dict[str, subprocess.Popen] = {}
        self._started: dict[str, int] = {}

    # Life

    def __enter__(self) -> SlurmCluster:
        self._programs = Programs()
        self._conf = configuration.write(
            self.directory,
            self.addresses,
            self.gpu_nodes,
            self._cpus,
            {**self._programs.settings, **self._settings},
        )
        try:
            self._start_munged()
            self._start("slurmctld", [self._programs.daemon("slurmctld"), "-D", "-c", "-f", str(self._conf)])
            for name in self.addresses:
                self.start_node(name)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the cluster; its directory stays."""
        for name in self._up():
            self.kill_node(name)
        killed: list[psutil.Process] = []
        for daemon in self._daemons.values():
            inside = psutil.Process(daemon.pid).children(recursive=True) if daemon.poll() is None else []
            for process in (daemon, *inside):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            daemon.wait()
            killed += inside
        self._daemons.clear()
        self.wait(lambda: not any(map(lives, killed)), "nothing of a daemon outlives SIGKILL")

    def kill_node(self, name: str) -> None:
        """End slurmd and everything under it at once, as a power cut would; returns when all is gone."""
        inside = self.processes(name)
        node = self._daemons.pop(name)
        # The node's first process dies with this one, and the kernel ends a namespace with its first.
        node.kill()
        node.wait()
        self.wait(lambda: not any(map(lives, inside)), f"nothing of node {name} outlives SIGKILL")

    def report_down(self, name: str) -> None:
        """Tell slurmctld what it finds out by itself SlurmdTimeout after a node's end: its jobs are lost."""
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")

    def hurry(self) -> None:
        """Have requeued jobs begin at once; Slurm lets them wait for `cred_expire` seconds."""
        for job in self.squeue():
            if job.state == "PENDING" and job.reason == "BeginTime":
                self.run("scontrol", "update", f"JobId={job.id}", "StartTime=now")

    def start_node(self, name: str) -> None:
        """Start a node, for the first time or again, its /tmp as it was. `wait_up` waits for Slurm."""
        if name in self._daemons:
            raise ClusterError(f"node {name} runs already")
        # Slurm tells two lives of a slurmd apart by the second in which they began.
        while int(time.time()) <= self._started.get(name, 0):
            time.sleep(POLL_S)
        self._started[name] = int(time.time())
        tmp = self.tmp(name)
        tmp.mkdir(parents=True, exist_ok=True)
        tmp.chmod(0o1777)
        (self.directory / "spool" / name).mkdir(exist_ok=True)
        namespaces = ["--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        plain_user = os.geteuid() != 0
        if plain_user:
            namespaces += ["--user", "--map-current-user", "--keep-caps"]
        slurmd = [self._programs.daemon("slurmd"), "-D", "-N", name, "-f", str(self._conf)]
        slurmd += ["-d", self._programs.daemon("slurmstepd")] if self._programs.prefix else []
        self._start(
            name,
            ["unshare", *namespaces, "bash", str(NODE_SCRIPT), *slurmd],
            NODE=name,
            NODE_TMP=str(tmp),
            NODE_HOSTS=str(self.directory / "hosts"),
            NODE_SHARED="\n".join(map(str, self._shared())),
            NODE_DROP="yes" if plain_user else "",
        )

    # What a caller looks at

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables that lead to the cluster."""
        return {"SLURM_CONF": str(self._conf), "PATH": self._programs.search_path}

    @property
    def env(self) -> dict[str, str]:
        """The environment of a shell on the login node: this process's with `settings`."""
        return {**os.environ, **self.settings}

    def tmp(self, name: str) -> Path:
        """What the node sees as /tmp."""
        return self.directory / "nodes" / name / "tmp"

    def left_in_tmp(self, name: str) -> list[Path]:
        """What jobs left in the node's /tmp: all but the places through which it sees shared directories."""
        shared = {path.relative_to("/tmp").parts[0] for path in self._shared()}
        return sorted(entry for entry in self.tmp(name).iterdir() if entry.name not in shared)

    def processes(self, name: str) -> list[psutil.Process]:
        """All live processes of a node, its first one and slurmd among them; none when it is down."""
        try:
            # What loses its parent goes to the first process of its namespace, so the tree is whole.
            children = psutil.Process(self._daemons[name].pid).children(recursive=True)
        except (KeyError, psutil.NoSuchProcess):
            return []
        return [process for process in children if lives(process)]

    def has(self, process: psutil.Process) -> bool:
        """Whether it runs on one of the nodes; far cheaper than a look at all that does."""
        return not {self._daemons[name].pid for name in self._up()}.isdisjoint(
            parent.pid for parent in process.parents()
        )

    def job_processes(self, name: str) -> list[psutil.Process]:
        """Those of jobs: neither the node's first process nor slurmd."""
        return [process for process in self.processes(name)[1:] if not _is_slurmd(process)]

    def wait_empty(self, name: str) -> None:
        """Wait until no process of a job is left on a node: its last one ends after Slurm has heard of it."""
        self.wait(lambda: not self.job_processes(name), f"no process of a job is left on {name}")

    def run(self, *command: str, timeout: float = PATIENCE_S) -> str:
        """Output of a command on the login node.

        Raises:
            ClusterError: It failed; with its error output.
        """
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def squeue(self) -> list[Job]:
        """Jobs that have not ended, in order of their numbers."""
        lines = self.run("squeue", "--noheader", "--sort=i", "--format=%i|%A|%j|%T|%N|%r").splitlines()
        return [Job(*line.split("|", 5)) for line in lines]

    def node_states(self) -> dict[str, str]:
        """State of each node as sinfo has it: `idle`, `mix`, `alloc`, `down*`, `drain` …"""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines)

    def wait_up(self, name: str) -> None:
        """Wait until slurmctld has spoken with the slurmd that was started last."""
        self.wait(lambda: self._registered(name), f"node {name} is registered")

    def wait_idle(self, timeout: float = PATIENCE_S) -> None:
        """Wait until every started node is registered and no job runs on one."""

        def idle() -> bool:
            states = self.node_states()
            return all(states.get(name) == "idle" and self._registered(name) for name in self._up())

        self.wait(idle, "every node is idle", timeout)

    def wait(self, condition: Callable[[], object], what: str, timeout: float = PATIENCE_S) -> None:
        """Wait until the condition holds.

        Raises:
            ClusterError: It does not within `timeout` seconds, or a daemon ended meanwhile.
        """
        end = time.monotonic() + timeout
        while True:
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    raise ClusterError(f"{name} ended with {daemon.returncode}:\n{self.log(name)}")
            trouble = ""
            try:
                if condition():
                    return
            except ClusterError as error:  # slurmctld does not answer yet
                trouble = f" ({error})"
            if time.monotonic() > end:
                raise ClusterError(f"not within {timeout:.0f} s: {what}{trouble}\n{self._picture()}")
            time.sleep(POLL_S)

    def log(self, name: str, lines: int = 15) -> str:
        """The last lines that a daemon wrote."""
        text = (self.directory / "log" / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    # Parts

    def _up(self) -> list[str]:
        return [name for name in self.addresses if name in self._daemons]

    def _registered(self, name: str) -> bool:
        shown = self.run("scontrol", "--oneliner", "show", "node", name)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        started = fields.get("SlurmdStartTime", "None")
        if started in ("None", "Unknown"):
            return False
        return datetime.fromisoformat(started).timestamp() >= self._started[name]

    def _picture(self) -> str:
        try:
            return f"{self.run('sinfo', '--Node', '--long')}{self.run('squeue')}{self.log('slurmctld')}"
        except ClusterError as error:
            return f"{error}\n{self.log('slurmctld')}"

    def _shared(self) -> list[Path]:
        """Directories below /tmp that every node must see although its /tmp is its own."""
        places = {self.directory, paths.REPO, paths.home(), Path(sys.prefix), Path(sys.base_prefix)}
        outermost: list[Path] = []
        for path in sorted(path for path in places if path.is_relative_to("/tmp") and path.exists()):
            if not any(path.is_relative_to(parent) for parent in outermost):
                outermost.append(path)
        return outermost

    def _start(self, name: str, command: list[str], **variables: str) -> None:
        with (self.directory / "log" / f"{name}.log").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                # However this process ends, so does the daemon.
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.env, **variables},
                cwd="/",
                start_new_session=True,
            )

    def _start_munged(self) -> None:
        key = self.directory / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [
            f"--{what}={key.with_name(what)}" for what in ("socket", "pid-file", "seed-file", "log-file")
        ]
        # By force: its socket is of no use to others, and it would insist that they reach it.
        command = [self._programs.daemon("munged"), "--foreground", "--force", f"--key-file={key}", *files]
        self._start("munged", command)
        self.wait(key.with_name("socket").exists, "munged listens")


def lives(process: psutil.Process) -> bool:
    """Whether that very process is there, and no zombie; it may end in the middle of the look."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_slurmd(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("slurmd")
    except psutil.NoSuchProcess:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.slurm.cluster", description="A Slurm cluster of one's own."
    )
    parser.add_argument("--nodes", type=int, default=4, help="of the partition cpu [default: 4]")
    parser.add_argument("--gpu-nodes", type=int, default=1, help="of the partition gpu [default: 1]")
    parser.add_argument("--cpus", type=int, default=16, help="processors each claims to have [default: 16]")
    parser.add_argument(
        "--directory", type=Path, help="to keep it in [default: one below /tmp, deleted at the end]"
    )
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        with SlurmCluster(directory, options.nodes, options.gpu_nodes, options.cpus) as cluster:
            for name, value in cluster.settings.items():
                print(f"export {name}={shlex.quote(value)}")
            print(
                f"# {', '.join(f'{name} {ip}' for name, ip in cluster.addresses.items())}; Ctrl-C ends it",
                flush=True,
            )
            while True:
                signal.pause()
    except ClusterError as error:
        sys.exit(f"{error}\nlogs are kept in {directory / 'log'}")
    except KeyboardInterrupt:
        if options.directory is None:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
