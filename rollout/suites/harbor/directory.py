"""A Harbor task directory: what is in it, and whether it can run here. Nothing in it is executed."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout.errors import problems_of
from rollout.suites import SuiteError
from rollout.suites.harbor.compose import COMPOSE_FILES, environment_of
from rollout.suites.harbor.config import (
    AgentConfig,
    EnvironmentConfig,
    HealthcheckConfig,
    StepConfig,
    TaskConfig,
    VerifierConfig,
    merged,
    unknown,
)

CONFIG = "task.toml"
MAX_TEXT_BYTES = 1 << 20
"""Of `task.toml` and of an instruction."""


@dataclass(frozen=True)
class StepDirectory:
    """One turn of a task, with what holds in it; a task without `[[steps]]` has one, without a name."""

    name: str
    config: StepConfig
    """As the file says it; for a task without steps as if it were its step."""
    instruction: str
    agent: AgentConfig
    """The step's settings over the task's; so is `verifier`."""
    verifier: VerifierConfig
    tests: tuple[Path, ...]
    """Directories that make up `/tests`: the task's, then the step's, whose files take the place of those."""
    solution: Path | None
    """With `solve.sh`; becomes `/solution` for an oracle."""
    workdir: Path | None
    """What is put into the working directory before the step; `setup.sh` in it is run there."""
    trajectory: Path | None
    """What the agent did before, as an ATIF `trajectory.json`."""

    @property
    def healthcheck(self) -> HealthcheckConfig | None:
        """The step's own, beside that of the environment."""
        return self.config.healthcheck


@dataclass(frozen=True)
class TaskDirectory:
    """A task, as its directory has it."""

    path: Path
    name: str
    """`org/name`, or where the file says none that of the directory."""
    config: TaskConfig
    instruction: str
    """Empty for a task with steps, which have their own."""
    steps: tuple[StepDirectory, ...]
    warnings: tuple[str, ...]
    """What is in it and not heeded."""

    @property
    def environment(self) -> Path:
        """Where the Dockerfile is, if there is one, with what it copies."""
        return self.path / "environment"

    def tests_with_dockerfile(self, step: StepDirectory) -> Path | None:
        """The tests that a separate verifier's image is built from; None = it is another image."""
        if not step.verifier.separate:
            return None
        return next((tests for tests in reversed(step.tests) if (tests / "Dockerfile").is_file()), None)


def load(path: str | Path, check_image: bool = True) -> TaskDirectory:
    """Read a task directory.

    Args:
        check_image: Whether its Dockerfile is looked at, too, where what builds images is installed.

    Raises:
        SuiteError: Something is missing, wrong, or not to be had here; it names the file, and line or field.
    """
    root = Path(path)
    file = root / CONFIG
    text = _text(file)
    try:
        config = TaskConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{file}: {error}") from None
    except ValidationError as error:
        raise SuiteError(f"{file}: {problems_of(error)}") from None
    except (ValueError, OverflowError, RecursionError) as error:  # of numbers and tables that are too much
        raise SuiteError(f"{file}: cannot be read: {error}") from None
    environment = environment_of(root / "environment", config.environment)
    config = config.model_copy(update={"environment": environment})
    _require_possible(file, config)
    steps = tuple(_steps(root, config))
    if check_image and config.environment.docker_image is None:
        _require_buildable(root / "environment" / "Dockerfile")
    warnings = [f"{file}: {ascii(name)[1:-1]} is not known" for name in unknown(config)]
    warnings += [f"{found}: its rules are not heeded" for found in sorted(root.rglob(".harborignore"))]
    return TaskDirectory(
        path=root,
        name=config.task.name if config.task else root.resolve().name,
        config=config,
        instruction="" if config.steps else steps[0].instruction,
        steps=steps,
        warnings=tuple(warnings),
    )


def without_canary(text: str) -> str:
    """A text without the marks at its start by which contaminated training data is found, and empty lines."""
    lines = text.split("\n")
    first = next((at for at, line in enumerate(lines) if not _is_mark(line.strip().lower())), len(lines))
    return "\n".join(lines[first:])


def _is_mark(line: str) -> bool:
    """Whether a line is a comment with a canary, or nothing. No pattern: texts hold them up for hours."""
    comment = line.startswith("#") or (line.startswith("<!--") and line.endswith("-->"))
    return not line or (comment and "canary" in line)


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        if len(data) > MAX_TEXT_BYTES:
            raise SuiteError(f"{file}: larger than {MAX_TEXT_BYTES >> 20} MiB")
        return data.decode()
    except OSError as error:
        raise SuiteError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SuiteError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _instruction(file: Path) -> str:
    text = without_canary(_text(file))
    if not text.strip():
        raise SuiteError(f"{file}: says nothing")
    return text


def _steps(root: Path, config: TaskConfig) -> list[StepDirectory]:
    shared = _folder(root / "tests")
    if not config.steps:
        step = StepConfig.model_construct(name="", agent=config.agent, verifier=config.verifier)
        return [_step(root, root, config, step, (shared,), config.verifier)]
    found = []
    for step in config.steps:
        folder = root / "steps" / step.name
        tests = shared, _folder(folder / "tests")
        found.append(_step(root, folder, config, step, tests, merged(config.verifier, step.verifier)))
    return found


def _step(
    root: Path,
    folder: Path,
    config: TaskConfig,
    step: StepConfig,
    tests: tuple[Path | None, ...],
    verifier: VerifierConfig,
) -> StepDirectory:
    trajectory = folder / "trajectory.json"
    made = StepDirectory(
        name=step.name,
        config=step,
        instruction=_instruction(folder / "instruction.md"),
        agent=merged(config.agent, step.agent),
        verifier=verifier,
        tests=tuple(filter(None, tests)),
        solution=_folder(folder / "solution") or _folder(root / "solution"),
        workdir=_folder(folder / "workdir") if step.name else None,
        trajectory=trajectory if trajectory.is_file() else None,
    )
    bundled = verifier.separate and (
        (verifier.environment is not None and verifier.environment.docker_image)
        or any((directory / "Dockerfile").is_file() for directory in made.tests)
    )
    if not bundled and not any((directory / "test.sh").is_file() for directory in made.tests):
        wanted = " or ".join(f"{place / 'tests' / 'test.sh'}" for place in dict.fromkeys((root, folder)))
        raise SuiteError(f"{wanted}: missing; it is what a task is verified by")
    return made


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _require_possible(file: Path, config: TaskConfig) -> None:
    """Refuse what no sandbox here can be."""
    environments = {"environment": config.environment}
    steps = {f"steps.{at}.": step for at, step in enumerate(config.steps)}
    for prefix, part in {"": config, **steps}.items():
        if part.verifier.environment is not None:
            environments[f"{prefix}verifier.environment"] = part.verifier.environment
        for at, hook in enumerate(part.verifier.collect):
            _require_main(file, f"{prefix}verifier.collect.{at}.service", hook.service)
        for at, artifact in enumerate(part.artifacts):
            _require_main(file, f"{prefix}artifacts.{at}.service", artifact.service)
    for name, environment in environments.items():
        _require_machine(file, name, environment)
    folder = file.parent / "environment"
    if config.environment.docker_image is None and not (folder / "Dockerfile").is_file():
        names = ", ".join(("Dockerfile", *COMPOSE_FILES))
        raise SuiteError(
            f"{file}: environment.docker_image names no image, and {folder} has none of {names} that does"
        )


def _require_main(file: Path, field: str, service: str | None) -> None:
    if service not in (None, "main"):
        raise SuiteError(f"{file}: {field}: {service!r}: only main, one service, runs here")


def _require_machine(file: Path, name: str, environment: EnvironmentConfig) -> None:
    if environment.os != "linux":
        raise SuiteError(f"{file}: {name}.os: {environment.os!r}: sandboxes are Linux")
    if environment.gpus or environment.tpu:
        field = "gpus" if environment.gpus else "tpu"
        raise SuiteError(f"{file}: {name}.{field}: sandboxes have no accelerators")


@lru_cache(maxsize=1)
def _dockerfile_readers() -> list[Callable[[Path], Any]]:
    """What builds images of Dockerfiles, where it is installed."""
    readers = []
    for point in entry_points(group="rollout.dockerfile_readers"):
        with suppress(ModuleNotFoundError):  # of a part that a trainer need not have
            readers.append(point.load())
    return readers


def _require_buildable(dockerfile: Path) -> None:
    for reader in _dockerfile_readers():
        try:
            reader(dockerfile)
        except Exception as error:  # the reader's own kinds, which the client does not know
            raise SuiteError(f"{dockerfile.parent}/{error}") from None
