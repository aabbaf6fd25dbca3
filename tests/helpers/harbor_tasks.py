"""Harbor tasks, each written as a directory by a few lines; their image is the base image."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from rollout.suites.bundles import pack
from workers.bundles import keep

PASSES = "echo 1 >/logs/verifier/reward.txt"
BASE = '[environment]\ndocker_image = "base"\n'


def checks(condition: str) -> str:
    """A `tests/test.sh` that gives 1 where a command of the shell succeeds, else 0."""
    return f"if {condition}; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"


def write_task(
    root: Path,
    toml: str = "",
    *,
    instruction: str | None = "Make the file done.txt.",
    test: str | None = checks("test -f done.txt"),
    solution: str | None = "touch done.txt\n",
    files: Mapping[str, str] | None = None,
) -> Path:
    """A task directory.

    Args:
        toml: `task.toml` but for the image, which is the base image unless it names one.
        instruction, test, solution: `instruction.md`, `tests/test.sh`, `solution/solve.sh`; None = there is none.
        files: Further ones, by their paths.
    """
    text = textwrap.dedent(toml)
    if "docker_image" not in text and not any(name.endswith("Dockerfile") for name in files or ()):
        text = text.replace("[environment]\n", BASE, 1) if "[environment]" in text else BASE + text
    named = {
        "task.toml": text,
        "instruction.md": instruction,
        "tests/test.sh": test,
        "solution/solve.sh": solution,
        **{name: textwrap.dedent(content) for name, content in (files or {}).items()},
    }
    for name, content in named.items():
        if content is not None:
            place = root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
    return root


def request(root: Path, **more: object) -> dict[str, object]:
    """The `task` of a request for a directory, whose bundle is kept in this process."""
    bundle = pack(root)
    keep(bundle)
    return {"bundle": bundle.digest, **more}
