"""Compose files of Harbor tasks: one service, whose image, variables and directory are taken over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.datasets import import_of
from rollout.suites import SuiteError
from rollout.suites.harbor.config import EnvironmentConfig

COMPOSE_FILES = ("docker-compose.yaml", "singularity-compose.yaml")
MAX_BYTES = 256 << 10
"""Of a file: it is read by Python, slowly."""
WITHOUT_EFFECT = frozenset(
    {"container_name", "init", "platform", "pull_policy", "restart", "stdin_open", "tty"}
)
"""Keys of a service that change nothing here."""
_BUILDS = {"context": r"\.?/?|\$\{CONTEXT_DIR[^}]*\}", "dockerfile": r"(\./)?Dockerfile"}
"""What `build` may say: that the image is that of the Dockerfile beside it."""
_WAITS = re.compile(r"(sleep|infinity|tail|-f|/dev/null|(/bin/)?(ba)?sh|-l?c|\s|[\[\]\",'])*")
"""Commands that keep a container there and do nothing."""
_OURS = re.compile(r"\$\{(MAIN_IMAGE_NAME|PREBUILT_IMAGE_NAME)[^}]*\}")


def environment_of(folder: Path, environment: EnvironmentConfig) -> EnvironmentConfig:
    """What the compose files of a task add to its environment; what task.toml says itself holds.

    Raises:
        SuiteError: They ask for several services, or for what a sandbox here does not have, in this line.
    """
    for file in filter(Path.is_file, (folder / name for name in COMPOSE_FILES)):
        found = dict(_settings(file))
        env = found.pop("env", {})
        found = {name: value for name, value in found.items() if getattr(environment, name) is None}
        if (folder / "Dockerfile").is_file():
            found.pop("docker_image", None)
        environment = environment.model_copy(update={**found, "env": {**env, **environment.env}})
    return environment


def _settings(file: Path) -> Iterator[tuple[str, Any]]:
    yaml = import_of("yaml", f"{file}")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise SuiteError(f"{file}: larger than {MAX_BYTES >> 10} KiB")
        root = yaml.compose(file.read_text("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        raise SuiteError(f"{file}: {error}") from None
    services = next((node for _, name, node in _entries(file, "the file", root) if name == "services"), None)
    for line, name, service in _entries(file, "services", services):
        if name != "main":
            raise SuiteError(f"{file}, line {line}: service {name!r}: only main, one service, runs here")
        for at, key, node in _entries(file, "services.main", service):
            yield from _setting(f"{file}, line {at}: services.main.{key}", key, node)


def _setting(where: str, key: str, node: Any) -> Iterator[tuple[str, Any]]:
    if key == "image":
        if not _OURS.fullmatch(_word(where, node)):
            yield "docker_image", node.value
    elif key == "working_dir":
        if not _word(where, node).startswith("/"):
            raise SuiteError(f"{where}: {node.value!r} is no absolute path")
        yield "workdir", node.value
    elif key == "build":
        parts = node.value if node.id == "mapping" else [(None, node)]
        for name, value in parts:
            part = name.value if name else "context"
            if part not in _BUILDS or not re.fullmatch(_BUILDS[part], _word(where, value)):
                raise SuiteError(f"{where}: {part}: the image is that of environment/Dockerfile, as it is")
    elif key == "deploy":  # else it says what task.toml does
        if _holds(node, "devices"):
            raise SuiteError(f"{where}: devices: sandboxes have none")
    elif key == "environment":
        pairs = node.value if isinstance(node.value, list) else []
        if node.id == "mapping":
            yield "env", {_word(where, name): _word(where, value) for name, value in pairs}
        else:
            words = (_word(where, entry).partition("=") for entry in pairs)
            yield "env", {name: value if given else f"${{{name}}}" for name, given, value in words}
    elif key in ("command", "entrypoint"):
        words = node.value if node.id == "sequence" else [node]
        if not _WAITS.fullmatch(" ".join(_word(where, word) for word in words)):
            raise SuiteError(f"{where}: nothing is started beside the agent")
    elif key not in WITHOUT_EFFECT:
        raise SuiteError(f"{where}: sandboxes have nothing like it")


def _entries(file: Path, what: str, node: Any) -> list[tuple[int, str, Any]]:
    """Line, key and value of each entry of a mapping; none of what is absent."""
    if node is None or (node.id == "scalar" and not node.value):
        return []
    if node.id != "mapping":
        raise SuiteError(f"{file}, line {node.start_mark.line + 1}: {what} is no mapping")
    return [(key.start_mark.line + 1, str(key.value), value) for key, value in node.value]


def _holds(node: Any, word: str) -> bool:
    """Whether a word is in it, at whatever depth. Each node once: aliases make few lines endlessly large."""
    seen: set[int] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, tuple | list):
            pending += node
        elif node.value == word:
            return True
        elif not isinstance(node.value, str):
            pending += node.value
    return False


def _word(where: str, node: Any) -> str:
    if node.id != "scalar":
        raise SuiteError(f"{where}: a word or a number is wanted")
    return str(node.value)
