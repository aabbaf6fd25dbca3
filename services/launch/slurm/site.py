"""What a site decides once: the site file, TOML.

```toml
scratch = "/scratch/local"      # node-local; sandboxes and unpacked images
images = "/shared/images"       # images by name (NAME.sif), seen by every node
modules = ["apptainer/1.3"]     # loaded by every job

[environment]                   # variables of every job
HF_HOME = "/shared/hf"

[sbatch]                        # options of every job, as `sbatch --NAME=VALUE`; true = `--NAME`
partition = "cpu"
account = "project17"
time = "12:00:00"

[sbatch.node]                   # and of those of one role: head, node, engine
exclusive = true
```
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.launch import SlurmError

ROLES = ("head", "node", "engine")
SITE_VARIABLE = "ROLLOUT_SLURM_SITE"
_OURS = {
    "output": "logs go into the run directory",
    "error": "logs go into the run directory",
    "job-name": "jobs of a service are found by their name",
    "array": "give --nodes",
    "nodes": "give --nodes; each node is a job of its own",
    "parsable": "the id is read from its output",
    "wait": "give --wait",
    "export": "use [environment]",
    "export-file": "use [environment]",
    "dependency": "the head's keeps two heads apart",
}
"""Options of sbatch that are not the site's, and why."""
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/@:-]*")

Options = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Site:
    """A site file, checked."""

    scratch: str = "/tmp"
    images: str | None = None
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    common: Options = field(default_factory=dict)
    """Options of sbatch for every job."""
    roles: dict[str, Options] = field(default_factory=dict)
    """And for those of a role."""

    def sbatch_options(self, role: str, given: Options, default: Options) -> list[str]:
        """Options of sbatch for a job of that role; a role's win over common ones, and `given` over both."""
        merged = {**default, **self.common, **self.roles.get(role, {}), **given}
        return [_option(name, value) for name, value in merged.items() if value is not False]


def _option(name: str, value: str | int | float | bool) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def default_path(home: Path) -> Path | None:
    """`$ROLLOUT_SLURM_SITE`, else `slurm.toml` in ROLLOUT_HOME if there is one."""
    if named := os.environ.get(SITE_VARIABLE):
        return Path(named)
    path = home / "slurm.toml"
    return path if path.is_file() else None


def load(path: Path | None) -> Site:
    """Read a site file; None = a site without one.

    Raises:
        SlurmError: It cannot be read, or says what cannot be; names file and key.
    """
    if path is None:
        return Site()
    try:
        return parse(tomllib.loads(path.read_text()))
    except (OSError, ValueError, SlurmError) as error:
        raise SlurmError(f"site file {path}: {error}") from None


def parse(data: dict[str, Any]) -> Site:
    """Check what a site file says.

    Raises:
        SlurmError: A key is unknown or its value does not fit.
    """
    known = {"scratch", "images", "modules", "environment", "sbatch"}
    if unknown := sorted(set(data) - known):
        raise SlurmError(f"unknown key {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    scratch, images = data.get("scratch", "/tmp"), data.get("images")
    for name, value in (("scratch", scratch), ("images", images)):
        # $USER and the like are for the node to say.
        if value is not None and (not isinstance(value, str) or value[:1] not in ("/", "$")):
            raise SlurmError(f"{name} = {value!r} is no absolute path")
    modules = data.get("modules", [])
    if not isinstance(modules, list) or not all(isinstance(m, str) and _MODULE.fullmatch(m) for m in modules):
        raise SlurmError(f'modules = {modules!r} is no list of module names such as "apptainer/1.3"')
    variables = data.get("environment", {})
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name) or not isinstance(value, str | int | float):
            raise SlurmError(f"environment.{name} = {value!r} is no variable with a text or number")
    sbatch = dict(data.get("sbatch", {}))
    roles = {role: sbatch.pop(role) for role in ROLES if isinstance(sbatch.get(role), dict)}
    check_options("sbatch", sbatch)
    for role, options in roles.items():
        check_options(f"sbatch.{role}", options)
    environment = {name: str(value) for name, value in variables.items()}
    return Site(scratch, images, tuple(modules), environment, sbatch, roles)


def check_options(place: str, options: dict[str, Any]) -> None:
    """Raises SlurmError for what is no long option of sbatch, or one that is not the site's."""
    for name, value in options.items():
        if not _NAME.fullmatch(name) or not isinstance(value, str | int | float | bool):
            raise SlurmError(
                f"{place}.{name} = {value!r} is no long option of sbatch with a text, number or true; roles "
                f"are {', '.join(ROLES)}"
            )
        if name in _OURS:
            raise SlurmError(f"{place}.{name} cannot be set here: {_OURS[name]}")
