"""Slurm's own commands: sbatch, squeue, scancel, scontrol. Nothing else here speaks to Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.launch import SlurmError

TIMEOUT_S = 60.0
"""For one command: a busy controller may take long to answer."""
SOON_S = 3.0
"""For a question that cannot wait."""
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_CLUSTERS")
"""All of the caller's environment that sbatch sees, with SBATCH_*: jobs inherit it, and it may hold secrets.
What else jobs need is in the run directory's `environment`."""
_FORMAT = "%i|%A|%F|%T|%N|%r|%L"
_ENDS = {"COMPLETING", "STAGE_OUT"}
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
GONE = ("Invalid job id", "already completing or completed", "Job/step already completing")


@dataclass(frozen=True)
class Job:
    """A job as squeue shows it; one that has ended, while Slurm remembers it (MinJobAge, 5 minutes)."""

    id: str
    """As Slurm shows it: `12`, `12_3` of an array, `12+1` of a heterogeneous job."""
    raw_id: str
    """What the job itself sees as SLURM_JOB_ID."""
    base_id: str
    """Of the array it belongs to, else its own."""
    state: str
    nodes: str
    reason: str
    left: str
    """Time left, as Slurm writes it."""

    @property
    def het_id(self) -> str:
        """Of the heterogeneous job it belongs to, else its own."""
        return self.id.partition("+")[0]

    @property
    def leads(self) -> bool:
        """Whether it is no further component of a heterogeneous job."""
        return self.id.partition("+")[2] in ("", "0")

    @property
    def pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def running(self) -> bool:
        return self.state == "RUNNING"

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def active(self) -> bool:
        """Whether it waits, runs, or its nodes are being set up."""
        return not self.ended and self.state not in _ENDS


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What Slurm's commands get of an environment."""
    return {name: value for name, value in environ.items() if name in PASSED_ON or name.startswith("SBATCH_")}


def call(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Output of a command of Slurm.

    Raises:
        SlurmError: It is missing, or failed; with what it said.
    """
    try:
        done = subprocess.run(
            command,
            env=environment() | {"SLURM_TIME_FORMAT": "%s"},  # no local time of whichever zone
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on PATH: run this on a machine of the cluster that has its commands, or "
            "load the site's module for them"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]} has not answered for {timeout_s:.0f} s; see `scontrol ping`"
        ) from None
    if done.returncode:
        raise SlurmError(explain(command, done.stderr.strip() or done.stdout.strip()))
    return done.stdout


_REMEDIES = {
    "invalid partition": "`sinfo -s` lists the partitions; give one with --partition or in the site file",
    "Invalid account": "`sacctmgr show assoc user=$USER` lists your accounts; give one with --account",
    "Invalid qos": "`sacctmgr show qos` lists them; give one with --qos",
    "time limit": "`sinfo -o '%P %l'` shows the partitions' limits; give less with --time",
    "node configuration is not available": "no node of the partition can give this: compare the options "
    "above with `sinfo -N -o '%N %c %m %G'`",
    "Unable to contact slurm controller": "the controller is down or the network to it: try `scontrol ping`",
}


def explain(command: Sequence[str], answer: str) -> str:
    """An error of Slurm's with the command that met it, and what to do where we know."""
    lower = answer.lower()
    remedy = next((text for sign, text in _REMEDIES.items() if sign.lower() in lower), None)
    return f"`{shlex.join(command)}` failed: {answer}" + (f"\n{remedy}" if remedy else "")


def submit(command: Sequence[str]) -> str:
    """Run sbatch with `--parsable`; the id of the job, of an array that of the whole."""
    return call(command).strip().splitlines()[-1].split(";")[0]


def jobs(base_ids: Iterable[str]) -> list[Job]:
    """Those of our jobs that Slurm knows, tasks of arrays one by one."""
    ids = set(base_ids)
    if not ids:
        return []
    # Asked for by id, Slurm fails when one has long ended.
    lines = call(
        ["squeue", "--noheader", "--array", "--states=all", f"--user={os.geteuid()}", f"--format={_FORMAT}"]
    ).splitlines()
    known = (Job(*line.split("|")) for line in lines if line.count("|") == _FORMAT.count("|"))
    return [job for job in known if job.base_id in ids or job.het_id in ids]


def cancel(ids: Iterable[str], *options: str) -> None:
    """End jobs; TERM, then KILL after the site's KillWait. One that has ended is fine.

    Args:
        options: Of scancel, such as one that sends a signal instead.
    """
    if jobs := list(ids):
        try:
            call(["scancel", *options, *jobs])
        except SlurmError as error:
            if not any(sign in str(error) for sign in GONE):
                raise


def node_address(node: str) -> str | None:
    """The address by which Slurm reaches a node; None if it does not say."""
    return _show("node", node).get("NodeAddr")


def exit_status(job: str) -> int | None:
    """How a job ended: its exit status, below 0 the signal that ended it; None if Slurm has forgotten it."""
    status, _, number = _show("job", job).get("ExitCode", "").partition(":")
    if not (status.isdecimal() and number.isdecimal()):
        return None
    return -int(number) or int(status)


def ends(job: str) -> tuple[float | None, bool]:
    """Seconds until Slurm ends a job, None if it does not say soon; and whether it takes its node away."""
    shown = _show("job", job, SOON_S)
    known = {name: int(text) for name, text in shown.items() if text.isdecimal()}
    preempted = known.get("PreemptTime", 0) >= known.get("StartTime", 1)
    return known["EndTime"] - time.time() if "EndTime" in known else None, preempted


def _show(kind: str, name: str, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """What scontrol says of a node or job; nothing if it knows none."""
    try:
        answer = call(["scontrol", "--oneliner", "show", kind, name], timeout_s)
    except SlurmError:
        return {}
    # The id of one task of an array is that of the array as well: then Slurm shows all of them.
    lines = answer.splitlines()
    own = [line for line in lines if line.startswith(f"JobId={name} ")] or lines
    return dict(word.split("=", 1) for line in own for word in line.split() if "=" in word)
