"""What a row of a SWE set says of its own solution, and of what no agent may see."""

from __future__ import annotations

import shlex
from typing import Any

from sandbox.client import SandboxClient
from workers.errors import TaskError
from workers.handlers.fields import parsed
from workers.handlers.oracle import Hidden, NoOracle, changed_lines
from workers.handlers.swe.repository import GIT_ENV
from workers.handlers.swe.rows import Instance, SweTask
from workers.handlers.swe.specs import Spec

PATCH = "/tmp/rollout-solution.diff"
GIT_S = 120.0


async def apply_fix(box: SandboxClient, task: SweTask, instance: Instance, spec: Spec) -> None:
    """Do what the row's fix does: its patch, backwards where that is the bug, or the files of its commit.

    Raises:
        NoOracle: The row brings no fix.
        TaskError: It does not apply to the tree that the agent gets.
    """
    files = {} if task.patch else fixed_files(task)
    for name, text in files.items():
        await box.write_file(f"{spec.repo_dir}/{name}", text)
    if files:
        return
    if not task.patch:
        raise NoOracle("the row has no `patch`")
    await box.write_file(PATCH, task.patch)
    backwards = "-R " if instance.bug_patch else ""
    result = await box.bash(
        f"(cd {shlex.quote(spec.repo_dir)} && {GIT_ENV} && git apply {backwards}--whitespace=nowarn {PATCH};"
        f" code=$?; rm -f {PATCH}; exit $code)",
        timeout=GIT_S,
    )
    if result.exit_code != 0:
        raise TaskError(f"{instance.instance_id}: patch does not apply: {result.output[-1000:].strip()}")


def fixed_files(task: SweTask) -> dict[str, str]:
    """R2E-Gym: path → text of the files that the row's `parsed_commit_content` changes, tests left out."""
    commit = parsed((task.model_extra or {}).get("parsed_commit_content"))
    diffs = commit.get("file_diffs") if isinstance(commit, dict) else None
    changed = task.modified_files or []
    texts = {_path(diff): diff.get("new_file_content") for diff in diffs or [] if isinstance(diff, dict)}
    return {name: texts[name] for name in changed if isinstance(texts.get(name), str) and "test" not in name}


def _path(diff: dict[str, Any]) -> str:
    header = diff.get("header")
    file = header.get("file") if isinstance(header, dict) else None
    return str(file.get("path")) if isinstance(file, dict) else ""


def hidden_of(task: SweTask, instance: Instance, spec: Spec) -> list[Hidden]:
    """The fix, the tests, and every commit behind the one that the agent starts from."""
    patch = task.patch or ""
    fix = changed_lines(patch, "-" if instance.bug_patch else "+")
    return [
        Hidden("the fix", fix),
        Hidden("the tests (test_patch)", changed_lines(instance.test_patch)),
        *(Hidden(f"the tests ({name})", text) for name, text in instance.hidden_tests.items()),
        Hidden("later commits", "", repository=spec.repo_dir),
    ]
