"""How the harness of a data set runs a repository at a version: `specifications.json`, made from them.

Release 5 of `swebench` has no such specifications any more, because its rows bring their own script; those of
the last release that had them, of SWE-Gym's fork, of SWE-smith's profiles and of R2E-Gym are in the file.
`tests/helpers/swe_specifications.py` makes it, and tests hold it against the packages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from workers.handlers.swe.rows import Instance


@dataclass(frozen=True)
class Published:
    """What one harness says of a repository at a version."""

    tests: str
    """Shell text."""
    files: Literal["patch", "modules", "cases", "names", ""]
    """What is appended: files of the test patch, they as modules, its `[case …]`s, the tests' files."""
    before: list[str]
    """Shell lines before the installation."""
    install: list[str]
    build: list[str]
    """Shell lines when the tests are in place: of languages that compile them."""
    parser: str
    eval_type: str


def published(instance: Instance) -> Published:
    """The specification of an instance.

    Raises:
        ValueError: The data set's harness has none; the message says what of, and what helps.
    """
    everything = _table()
    of_source, repo = everything[instance.source], instance.repo.lower().removeprefix("swesmith/")
    # R2E-Gym puts a runner among the hidden tests where pytest does not run them.
    runner = next(filter(of_source.__contains__, instance.hidden_tests), repo)
    entries = of_source.get(runner, [])
    for entry in entries:
        if entry["versions"] is None or instance.version in entry["versions"]:
            break
    else:
        what = f"version {instance.version!r} of {instance.repo!r}" if entries else f"{instance.repo!r}"
        raise ValueError(
            f"no test command is known for {what}: the row has no `eval_script`, and the specifications of "
            f"its data set ({everything['sources'][instance.source]}) have none; take the row from a release "
            "of the set which has `eval_script` and `log_parser`, or give `spec.test_cmd` and "
            "`spec.log_parser`"
        )
    kept = ("files", "before", "install", "build", "parser", "eval_type")
    return Published(tests="\n".join(entry["tests"]), **{key: entry[key] for key in kept})


@cache
def _table() -> dict[str, Any]:
    """By data set and repository in lower case."""
    text = resources.files(__package__).joinpath("specifications.json").read_text()
    table = json.loads(text)
    for source in table.keys() - {"sources"}:
        by_repository: dict[str, list[dict[str, Any]]] = {}
        for entry in table[source]:
            by_repository.setdefault(entry["repo"], []).append(entry)
        table[source] = by_repository
    return table
