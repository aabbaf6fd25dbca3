"""The specified tests as files: taken from a sandbox before the patch comes into it, put in place after.

So neither attributes, hooks and configuration that the patch brings, nor what its code did to git, have a say
in what the tests are.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import dataclass

from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from workers.errors import TaskError
from workers.handlers.swe.repository import GIT_ENV
from workers.handlers.swe.rows import Instance, files_of
from workers.handlers.swe.specs import Spec
from workers.handlers.swe.testfiles import TestFiles

GIT_S = 300.0
MAX_SOURCE_BYTES = 4 << 20
"""Of a file of tests; a longer one is run, but not read."""


class NotPlaced(Exception):
    """The specified tests cannot be put on top of the patch; the message says why."""


@dataclass(frozen=True)
class _Item:
    content: bytes
    mode: int
    link: bool = False
    """The content is where a symbolic link leads."""


@dataclass(frozen=True)
class Specified:
    """The specified tests of an instance."""

    items: dict[str, _Item | None]
    """What the row puts at each path; None = nothing is to be there."""
    files: TestFiles
    """All the files that they are in, also those that the repository has."""


async def check_test_patch(sandbox: SandboxClient, instance: Instance, spec: Spec) -> None:
    """Before an agent works: whether the row's tests can be put in place at all. Leaves no trace of them.

    Raises:
        TaskError: They cannot.
    """
    if not instance.test_patch.strip():
        return
    work = f"/tmp/rollout-{secrets.token_hex(8)}"
    await sandbox.write_file(f"{work}/tests.diff", instance.test_patch)
    script = (
        f"(cd {shlex.quote(spec.repo_dir)} && {GIT_ENV} && export GIT_INDEX_FILE={work}/index &&"
        f" git read-tree HEAD && git apply --cached --check {work}/tests.diff;"
        f" code=$?; rm -rf {work}; exit $code)"
    )
    result = await sandbox.bash(script, timeout=GIT_S)
    if result.exit_code != 0:
        raise _bad_test_patch(instance, result.output)


async def take_specified(sandbox: SandboxClient, instance: Instance, spec: Spec, work: str) -> Specified:
    """The specified tests, in a sandbox that no code of the patch has run in, and leave it as it was.

    Raises:
        TaskError: The test patch does not apply to the base commit.
    """
    items: dict[str, _Item | None] = {
        f"r2e_tests/{name}": _Item(text.encode(), 0o644) for name, text in instance.hidden_tests.items()
    }
    names = files_of(instance.test_patch) if instance.test_patch.strip() else []
    enter = f"cd {shlex.quote(spec.repo_dir)} && {GIT_ENV}"
    clear = (
        f"for name in {' '.join(map(shlex.quote, names))}; do\n"
        'git checkout -q HEAD -- "$name" 2>/dev/null || rm -rf -- "$name"; done'
    )
    if names:
        file = f"{work}/tests.diff"
        await sandbox.write_file(file, instance.test_patch)
        result = await sandbox.bash(
            f"({enter}\n{clear}\ngit apply --whitespace=nowarn {file})", timeout=GIT_S
        )
        if result.exit_code != 0:
            raise _bad_test_patch(instance, result.output)
        for name in names:
            items[name] = await _item(sandbox, f"{spec.repo_dir}/{name}")
    sources = await _sources(sandbox, spec, items)
    if names:
        # What installing the patch starts must not find them.
        await sandbox.bash(f"({enter}\n{clear}\nrm -rf {file})", timeout=GIT_S)
    return Specified(items, TestFiles(sources))


def _bad_test_patch(instance: Instance, words: str) -> TaskError:
    return TaskError(
        f"{instance.instance_id}: test_patch does not apply to the base commit: {words[-1000:].strip()}"
    )


async def _item(sandbox: SandboxClient, path: str) -> _Item | None:
    info = await sandbox.stat(path, follow=False)
    if info.kind == "file":
        return _Item(await sandbox.read_file(path), info.mode)
    if info.kind == "link":
        target = await sandbox.bash(f"readlink -n -- {shlex.quote(path)}")
        return _Item(target.output.encode(), 0o777, link=True)
    return None


async def _sources(sandbox: SandboxClient, spec: Spec, items: dict[str, _Item | None]) -> dict[str, str]:
    sources = {}
    for name in spec.test_files:
        if not name.endswith(".py"):
            continue
        item = items[name] if name in items else await _item(sandbox, f"{spec.repo_dir}/{name}")
        if item is not None and not item.link and len(item.content) <= MAX_SOURCE_BYTES:
            try:
                sources[name] = item.content.decode("utf-8")
            except UnicodeDecodeError:
                continue
    return sources


async def place(sandbox: SandboxClient, spec: Spec, specified: Specified) -> None:
    """Put the specified tests in place, whatever is there.

    Raises:
        NotPlaced: It cannot be done, though it can without the patch.
    """
    items = specified.items
    if not items:
        return
    lines = [f"cd {shlex.quote(spec.repo_dir)} || exit 1"]
    for name, item in items.items():
        parts = name.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        lines += [f"[ -d {shlex.quote(path)} ] || rm -f -- {shlex.quote(path)}" for path in above]
        lines.append(f"rm -rf -- {shlex.quote(name)}")
        if item is not None and item.link:
            target, directory = item.content.decode(), "/".join(parts[:-1]) or "."
            lines.append(f"mkdir -p -- {shlex.quote(directory)}")
            lines.append(f"ln -s -- {shlex.quote(target)} {shlex.quote(name)}")
    try:
        result = await sandbox.bash("(\n" + "\n".join(lines) + "\n)", timeout=GIT_S)
        for name, item in items.items():
            if item is not None and not item.link:
                await sandbox.write_file(f"{spec.repo_dir}/{name}", item.content, item.mode)
    except SandboxRequestError as error:
        raise NotPlaced(str(error)) from error
    if result.exit_code != 0:
        raise NotPlaced(result.output[-1000:].strip())
