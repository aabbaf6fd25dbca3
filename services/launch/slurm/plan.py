"""What is submitted: the commands of sbatch, and the `environment` file that the jobs read."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import convert

from rollout.schema.base import DEFAULT_POLICY
from services.engines.credentials import directories
from services.guard import engine_token as guard
from services.launch import SlurmError, paths
from services.launch.parts import STAGES, slots_of
from services.launch.slurm import site
from services.launch.slurm.rundir import RunDir, Submitted
from services.launch.slurm.site import Site

HEAD, NODE, ENGINE = site.ROLES
ALLOCATION = "allocation"
"""A job that carries the whole service as steps."""
SEPARATE, ONE_JOB, ATTACHED = "separate", "one-job", "attached"
"""Forms of the service: a job for each part, one job, steps of an allocation that there is already."""
_WITH_VARIABLES = re.compile(r"[\w/.+:@%=,-]*(\$\w+[\w/.+:@%=,-]*)+")
MOST_NODES = 1000
"""Of one call; the default of Slurm's MaxArraySize is 1001."""
_NOT_PASSED_ON = {
    *("ROLLOUT_URL", "ROLLOUT_API_KEY", "ROLLOUT_NODE", "ROLLOUT_GATEWAY_HOST", "ROLLOUT_SANDBOX_DIR"),
    *("ROLLOUT_STACK", "ROLLOUT_SANDBOX_STACK", guard.VARIABLE),
    *("ROLLOUT_FLOWER_URL", "ROLLOUT_FLOWER_AUTH_FILE", "ROLLOUT_FLOWER_DB"),
}
"""Variables of the caller that mean something else on a node, or that no job needs."""


@dataclass(frozen=True)
class Engines:
    """LLM servers, each job one node."""

    nodes: int
    model: str | None = None
    """For `vllm serve`; None with a command of one's own."""
    command: str | None = None
    """In the words {model}, {host} and {port} are filled in; run once for each set of GPUs."""
    gpus: int = 1
    """GPUs of one server; a node's are divided into such sets. 0 = one server, whatever GPUs there are."""
    policy: str = DEFAULT_POLICY
    """Which one they serve."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z0-9][a-z0-9._-]{0,62}", self.policy):
            raise SlurmError(f"--engine-policy {self.policy!r:.80} is no policy's name: a-z, 0-9, . _ -")


@dataclass(frozen=True)
class UpOptions:
    """What `rollout slurm up` was asked."""

    nodes: int
    slots: dict[str, int] = field(default_factory=dict)
    """Rollouts at once by stage and node; a stage without a number gets the default."""
    engines: Engines | None = None
    given: dict[str, Any] = field(default_factory=dict)
    """Options of sbatch from the command line, which win over the site file's."""
    data_dir: str | None = None
    """Where Redis keeps its append-only file; None = in the run directory."""
    renew: bool = False
    """True: at their time limit jobs go back to the queue instead of ending."""
    flower: bool = True
    form: str = SEPARATE

    def __post_init__(self) -> None:
        if self.form == ONE_JOB and not self.nodes:
            raise SlurmError("--one-job needs --nodes of at least 1: the head is on the first")
        if self.engines and not (self.engines.model or self.engines.command):
            raise SlurmError("--engine-nodes needs --engine-model or --engine-command")
        site.check_options("sbatch", self.given)

    def to_json(self, where: Site) -> dict[str, Any]:
        # What the environment of `up` decided holds for whoever submits more, or counts slots.
        slots = {stage: self.slots_of(stage) for stage in STAGES}
        return {"up": asdict(self) | {"slots": slots}, "site": asdict(where)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> tuple[UpOptions, Site]:
        return convert(data["up"], UpOptions), convert(data["site"], Site)

    def slots_of(self, stage: str) -> int:
        return slots_of(stage, self.slots)


@dataclass(frozen=True)
class Submission:
    """One call of sbatch."""

    record: Submitted
    command: list[str]


def _sbatch(run: RunDir, role: str) -> list[str]:
    name, output = f"rollout-{role}-{run.service}", f"{run.logs}/{role}-%j.log"
    return ["sbatch", "--parsable", f"--job-name={name}", f"--output={output}"]


def submission(
    run: RunDir, where: Site, options: UpOptions, role: str, count: int = 1, stages: tuple[str, ...] = STAGES
) -> Submission:
    """The call of sbatch for `count` jobs of a role.

    Args:
        stages: Of nodes. Of engines the policy that they serve, where it is not what `up` was asked for.
    """
    command = _sbatch(run, role)
    # Two heads would write into the same append-only file.
    command.append("--dependency=singleton" if role == HEAD else f"--array=1-{count}")
    command += where.sbatch_options(role, options.given, {} if role == HEAD else {"exclusive": True})
    command += [str(paths.deploy_file(f"slurm/{role}.sbatch")), str(run.path)]
    served = list(stages) if role == NODE or stages != STAGES else []
    if served:
        command.append(",".join(served))
    return Submission(Submitted("", role, count, served), command)


def allocation_script(run: RunDir) -> list[str]:
    """The script that begins the steps of an allocation, and its arguments."""
    script = paths.deploy_file("slurm/allocation.sbatch")
    return [str(script), str(run.path), str(script.parent)]


def allocation(run: RunDir, where: Site, options: UpOptions) -> Submission:
    """The call of sbatch for one job that carries everything; with engines, a heterogeneous one."""
    command = _sbatch(run, ALLOCATION)
    if not options.engines:
        # The components of a heterogeneous job would wait for each other.
        command.append("--dependency=singleton")
    command += [f"--nodes={options.nodes}", *where.sbatch_options(NODE, options.given, {"exclusive": True})]
    if options.engines:
        engines = where.sbatch_options(ENGINE, options.given, {"exclusive": True})
        command += [":", f"--nodes={options.engines.nodes}", *engines]
    return Submission(Submitted("", ALLOCATION), [*command, *allocation_script(run)])


def submissions(run: RunDir, where: Site, options: UpOptions) -> list[Submission]:
    """Everything that `up` submits, in its order."""
    if options.form == ONE_JOB:
        return [allocation(run, where, options)]
    counts = {HEAD: 1, NODE: options.nodes, ENGINE: options.engines.nodes if options.engines else 0}
    return [submission(run, where, options, role, count) for role, count in counts.items() if count]


def environment(run: RunDir, where: Site, options: UpOptions, environ: Mapping[str, str] = os.environ) -> str:
    """Text of the run directory's `environment`: modules, then variables, as shell."""
    values = {
        name: value
        for name, value in environ.items()
        if (name.startswith("ROLLOUT_") or name in ("LANG", "SLURM_CONF")) and name not in _NOT_PASSED_ON
    }
    search = [str(paths.REPO), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    values["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(search))
    values["ROLLOUT_PYTHON"] = sys.executable
    values["ROLLOUT_HOME"] = str(paths.home())
    values["ROLLOUT_SLURM_RENEW"] = "1" if options.renew else "0"
    values["ROLLOUT_SLURM_FLOWER"] = "1" if options.flower else "0"
    for stage in STAGES:
        values[f"ROLLOUT_SLURM_SLOTS_{stage.upper()}"] = str(options.slots_of(stage))
    if options.data_dir:
        values["ROLLOUT_SLURM_DATA"] = options.data_dir
    if options.engines:
        values["ROLLOUT_SLURM_ENGINE_COMMAND"] = options.engines.command or ""
        values["ROLLOUT_SLURM_ENGINE_MODEL"] = options.engines.model or ""
        values["ROLLOUT_SLURM_ENGINE_GPUS"] = str(options.engines.gpus)
        values["ROLLOUT_SLURM_ENGINE_POLICY"] = options.engines.policy
    lines = ["# Written by `rollout slurm up`; every job of the service reads it when it starts."]
    lines += _module_lines(where.modules)
    sites = {"ROLLOUT_SLURM_SCRATCH": where.scratch, **where.environment}
    if where.images:
        sites["ROLLOUT_IMAGES"] = where.images
    if options.engines:
        keys = directories(sites.get("ROLLOUT_ENGINE_KEYS") or environ.get("ROLLOUT_ENGINE_KEYS", ""))
        sites["ROLLOUT_ENGINE_KEYS"] = ":".join([str(run.engine_keys), *keys])
    for name, value in sorted({**values, **sites}.items()):
        lines.append(f"export {name}={_quoted(value, of_the_site=name in sites)}")
    return "\n".join(lines) + "\n"


def _module_lines(modules: Sequence[str]) -> list[str]:
    """Shell that loads modules, or ends the job with a word why not.

    A batch shell reads no profile, and gets no functions of the caller's: `module` may have to be defined
    first. What defines it, and modules, need not stand `set -u`.
    """
    if not modules:
        return []
    return [
        "case $- in *u*) unset_is_error=1 ;; *) unset_is_error= ;; esac",
        "set +u",
        # Profiles set PATH as if nobody had before.
        "type module > /dev/null 2>&1 || { before=$PATH; . /etc/profile || :; PATH=$PATH:$before; }",
        *(f"module load {name} || {{ echo 'module load {name} failed' >&2; exit 1; }}" for name in modules),
        '[ -z "$unset_is_error" ] || set -u',
        "unset unset_is_error",
    ]


def _quoted(value: str, *, of_the_site: bool) -> str:
    """For the shell. In a path of the site's, $USER and the like are left for the node to fill in."""
    if of_the_site and _WITH_VARIABLES.fullmatch(value):
        return f'"{value}"'
    return shlex.quote(value)
