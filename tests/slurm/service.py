"""The service on the virtual cluster, by the commands that a user has."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rollout.client import Client, RolloutError
from rollout.schema import Rollout, RolloutRequest, State, new_id
from services.launch.slurm.rundir import RunDir
from tests.helpers.stack import ROOT
from tests.slurm.cluster import PATIENCE_S, SlurmCluster

SITE = """
[sbatch.head]
time = "30:00"
[sbatch.node]
time = "30:00"
[sbatch.engine]
time = "30:00"
partition = "gpu"
gres = "gpu:1"
cpus-per-task = 2
"""
ENGINE = f"{sys.executable} -m tests.helpers.fake_engine --host {{host}} --port {{port}} --answer-tokens 5 20"
EMBEDDED = "{python} -m services.inference --model {model} --host {host} --port {port} --threads 1"
VARIABLES = {
    "ROLLOUT_HANDLERS": "tests.slurm.handlers:all_handlers",
    # A node that is lost shall be missed soon, but a loaded one not be taken for lost.
    "ROLLOUT_LEASE_S": "10",
    "ROLLOUT_PRELOAD_TOKENIZERS": "0",
    "ROLLOUT_REQUEUE_S": "5",
    "ROLLOUT_RETRY_DELAY_S": "0.5",
    "ROLLOUT_SHUTDOWN_GRACE_S": "2",
    # For the rollouts of a node whose time limit is near.
    "ROLLOUT_SLURM_DRAIN_S": "5",
}


class SlurmService:
    """What `rollout slurm` started from one run directory on one cluster."""

    def __init__(self, cluster: SlurmCluster, name: str = "run") -> None:
        self.cluster = cluster
        self.run_dir = cluster.directory / name
        site = cluster.directory / "site.toml"
        site.write_text(SITE)
        self.env = {
            **cluster.env,
            **VARIABLES,
            "ROLLOUT_SLURM_RUN": str(self.run_dir),
            "ROLLOUT_SLURM_SITE": str(site),
        }
        self._gates = 0
        self.submitted: list[str] = []
        """Every rollout so far."""

    # Commands

    def slurm(self, *arguments: str, timeout: float = 4 * PATIENCE_S) -> str:
        """Output of `rollout slurm …`."""
        done = self.try_slurm(*arguments, timeout=timeout)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def try_slurm(self, *arguments: str, timeout: float = 4 * PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """The same, however it ends."""
        return self.rollout("slurm", *arguments, timeout=timeout)

    def rollout(self, *arguments: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Any command, which knows of the service by ROLLOUT_SLURM_RUN alone."""
        command = [str(Path(sys.executable).with_name("rollout")), *arguments]
        env = {name: self.env[name] for name in self.env if name not in ("ROLLOUT_URL", "ROLLOUT_API_KEY")}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)

    def up(self, nodes: int, *options: str, command: str = ENGINE) -> None:
        """Head, nodes and one engine; returns when rollouts can be worked on."""
        engine = ("--engine-nodes", "1", "--engine-command", command, "--no-flower")
        self.slurm("up", "--nodes", str(nodes), *engine, *options, "--timeout", str(3 * PATIENCE_S))

    def logs(self, lines: int = 30) -> str:
        """The end of every log below the run directory, for a test that fails."""
        shown = []
        for path in sorted((self.run_dir / "logs").rglob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            shown.append("\n".join([f"--- {path.relative_to(self.run_dir)}", *text]))
        return "\n".join(shown)

    # Members

    def workers(self) -> set[str]:
        """Names of all workers that the gateway knows, e.g. run@n1-job7; none when it does not answer."""
        try:
            with self._client(retry_for=0.0) as client:
                by_stage = client.status()["workers"]
        except RolloutError:
            return set()
        return {name for names in by_stage.values() for name in names}

    def members(self) -> dict[str, str]:
        """Node → member, e.g. n1 → n1-job7, of the node jobs that work: all their workers are known."""
        workers = self.workers()
        running = {job.number for job in self.cluster.squeue() if job.state == "RUNNING"}
        return {
            member.node: member.name
            for member in RunDir(self.run_dir).members()
            if (member.role, member.state) == ("node", "up")
            and member.job in running
            and {f"{stage}@{member.name}" for stage in member.stages} <= workers
        }

    def wait_for_nodes(self, count: int) -> dict[str, str]:
        """Until so many nodes work; node → member."""
        self.cluster.wait(lambda: len(self.members()) == count, f"{count} nodes work", timeout=2 * PATIENCE_S)
        return self.members()

    # Rollouts

    @property
    def client(self) -> Client:
        """Of the gateway, wherever the head is now."""
        return self._client()

    def _client(self, **options: float) -> Client:
        run = RunDir(self.run_dir)
        head = run.head()
        assert head is not None
        return Client(head.url, api_key=run.api_key(), **options)

    def gates(self) -> Path:
        """A directory of its own for rollouts whose gate is shut."""
        self._gates += 1
        directory = self.cluster.directory / f"{self.run_dir.name}-gates{self._gates}"
        directory.mkdir()
        return directory

    def open(self, gates: Path) -> None:
        """Let pass whoever stands there or comes."""
        (gates / "open").touch()

    def open_gates(self) -> Path:
        """The same for rollouts that need not wait."""
        gates = self.gates()
        self.open(gates)
        return gates

    def do(self, count: int) -> None:
        """Rollouts that wait for nothing, to their ends."""
        self.require_exactly_once(self.submit(count, self.open_gates()))

    def submit(self, count: int, gates: Path, handler: str = "boxed", **task: str) -> list[str]:
        """Rollouts that stand at a gate."""
        task = {"gates": str(gates), **task}
        requests = [
            RolloutRequest(handler=handler, id=new_id(), task=task, limits={"max_attempts": 20})
            for _ in range(count)
        ]
        with self.client as client:
            client.submit(requests)
        ids = [request.id for request in requests]
        self.submitted += ids
        return ids

    def wait_arrived(self, gates: Path, count: int) -> None:
        """Until so many attempts stand at the gate, each with a sandbox."""
        self.cluster.wait(
            lambda: len(list(gates.glob("*.*"))) >= count, f"{count} rollouts at the gate", 2 * PATIENCE_S
        )

    def get(self, ids: Iterable[str]) -> list[Rollout]:
        """Their records."""
        with self.client as client:
            return [client.get(rollout_id, include="summary") for rollout_id in ids]

    def wait_ended(self, ids: Sequence[str]) -> list[Rollout]:
        """Until all have ended; their records."""
        end = time.monotonic() + 4 * PATIENCE_S
        with self.client as client:
            return [
                client.wait(rollout_id, timeout=end - time.monotonic(), include="summary")
                for rollout_id in ids
            ]

    def require_exactly_once(self, ids: Sequence[str]) -> list[Rollout]:
        """All complete with their reward, and each is in the stream of results once; their records."""
        records = self.wait_ended(ids)
        bad = [
            item for item in records if item.state is not State.COMPLETED or item.drop or item.reward != 1.0
        ]
        assert not bad, f"{bad[:3]}\n{self.logs()}"
        with self.client as client:
            counts = Counter(result.id for result in _results(client))
        assert {rollout_id: counts[rollout_id] for rollout_id in ids} == dict.fromkeys(ids, 1)
        return records


def _results(client: Client) -> Iterator[Rollout]:
    cursor = "0"
    while True:
        page = client.results(cursor, limit=500, include="summary")
        if not page.rollouts:
            return
        yield from page.rollouts
        cursor = page.cursor


def places(rollout: Rollout, state: State) -> list[str]:
    """Members whose workers took the rollout into that state, in that order, e.g. n1-job7."""
    owners = [event.owner for event in rollout.timeline if event.state is state and event.owner]
    return [owner.partition("@")[2].partition("/")[0] for owner in owners]
