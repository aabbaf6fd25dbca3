"""The agent's patch: the difference between its work tree and that of a sandbox it never was in.

The sandbox's server noted the work tree before the agent came and says what is different; only that travels.
It is compared with a fresh sandbox by a git that obeys nothing of either tree (`plain_git`). So it does not
matter what became of the agent's repository: commits, branches, hooks, attributes, filters, a replaced git or
no repository at all. Only what the files are counts, and an agent whose files cannot be taken has no patch.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sandbox.client import BashResult, SandboxClient
from sandbox.errors import SandboxRequestError
from sandbox.transfer import TreeEntry
from workers.errors import InfrastructureError
from workers.handlers.base import Context
from workers.handlers.swe import plain_git
from workers.handlers.swe.plain_git import GIT
from workers.handlers.swe.protection import IMPORT_ROOTS, Protection
from workers.handlers.swe.repository import GIT_ENV, prepare
from workers.handlers.swe.rows import Instance
from workers.handlers.swe.specs import Spec

MAX_PATCH_BYTES = 1_000_000
"""A fix is far shorter; what is longer has build products or data in it."""
MAX_CHANGED_BYTES = 64 << 20
"""The new content of changed files has no more: git compares them in memory, and no fix is that large."""
MAX_CHANGED_FILES = 2000
MAX_IGNORE_BYTES = 1 << 20
"""A `.gitignore` that the agent wrote has no more."""
GIT_S = 300.0
"""Most seconds of a step of git on what the image holds."""
AGENTS_GIT_S = 20.0
"""The same on what the agent made, which may be made to take long."""
NEVER_TAKEN = (".venv", "node_modules")
"""Directories that are left alone unless they are tracked: they are large, and no fix."""
FULL_DISK = "No space left on device"

_PATCH = (
    f"{GIT} diff-tree -r -p --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color"
    " --src-prefix=a/ --dst-prefix=b/"
)
_SUBMODULE = "160000"


@dataclass(frozen=True)
class Patch:
    """What the agent changed."""

    text: str
    """A diff that `git apply` takes; "" for no change, and where there is a `problem`."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Changed paths that are not in it, and why; see `protection`."""
    problem: str | None = None
    """Why there is no patch although something was changed, in words. The agent is to blame."""


class _NoPatch(Exception):
    """The agent's files cannot be taken; the message says why."""


async def note_base(sandbox: SandboxClient, spec: Spec) -> None:
    """Have the agent's sandbox remember the work tree as it is, before the agent comes."""
    names = "|".join(NEVER_TAKEN).replace(".", r"\.")
    listed = await sandbox.bash(
        f"(cd {shlex.quote(spec.repo_dir)} && {GIT_ENV} &&"
        f" git ls-files | grep -oE '(^|/)({names})/' | sort -u)",
        timeout=GIT_S,
    )
    tracked = {line.strip("/") for line in listed.output.split()}
    await sandbox.note_tree(spec.repo_dir, exclude=[".git", *sorted(set(NEVER_TAKEN) - tracked)])


async def take_patch(ctx: Context[Any], instance: Instance, spec: Spec, sandbox: dict[str, Any]) -> Patch:
    """The patch of the agent in `ctx.sandbox`, whose processes are ended first.

    Args:
        sandbox: Options of `Sandboxes.fresh`, for the sandbox that compares.

    Raises:
        StageError: A sandbox failed.
    """
    assert ctx.sandbox is not None
    # A process of the agent must not change files while they are read. This ends them all, and unlike `reset`
    # needs no shell, which the agent may have broken.
    await ctx.sandbox.exec(["true"])
    try:
        changes = await ctx.sandbox.changed_tree(spec.repo_dir)
    except SandboxRequestError as error:
        return Patch("", problem=f"the work tree could not be read: {error}")
    changed = [entry for entry in changes.changed if not _of_a_repository(entry.path)]
    removed = [path for path in changes.removed if not _of_a_repository(path)]
    if not changed and not removed:
        return Patch("")
    async with ctx.sandboxes.fresh(ctx, **sandbox) as pristine:
        await prepare(pristine, instance, spec)
        comparison = _Comparison(ctx.sandbox, pristine, spec)
        try:
            return await comparison.patch(changed, removed, instance.gold_files)
        except _NoPatch as problem:
            return Patch("", comparison.dropped, str(problem))


class _Comparison:
    """A comparison of the agent's changes with a fresh sandbox."""

    def __init__(self, agents: SandboxClient, pristine: SandboxClient, spec: Spec) -> None:
        self._agents, self._pristine, self._spec = agents, pristine, spec
        self._work = f"/tmp/rollout-{secrets.token_hex(8)}"
        self.dropped: dict[str, str] = {}

    async def patch(self, changed: list[TreeEntry], removed: list[str], gold_files: list[str]) -> Patch:
        is_left_out = await self._not_taken(changed, removed)
        rules = Protection(self._spec.test_files, gold_files, await self._roots())
        kept: list[TreeEntry] = []
        gone: list[str] = []
        for path, entry in [*((entry.path, entry) for entry in changed), *((path, None) for path in removed)]:
            if is_left_out(path):
                continue
            if why := rules.objection(path, entry is not None and entry.new):
                self.dropped[_printable(path)] = why
            elif entry is not None:
                kept.append(entry)
            else:
                gone.append(path)
        kept.sort(key=lambda entry: entry.path)
        if len(kept) > MAX_CHANGED_FILES:
            raise _NoPatch(f"{len(kept)} files were changed, too many to compare: {_names(kept)}")
        if (size := sum(entry.size for entry in kept)) > MAX_CHANGED_BYTES:
            raise _NoPatch(f"the changed files have {size} bytes, too many to compare: {_names(kept)}")
        return Patch(await self._compared(kept, gone), self.dropped)

    async def _not_taken(self, changed: list[TreeEntry], removed: list[str]) -> Callable[[str], bool]:
        """A predicate of paths: what git ignores there, with the agent's `.gitignore`s, and submodules."""
        work, tree = self._work, shlex.quote(self._spec.repo_dir)
        paths = [entry.path for entry in changed] + removed
        await self._pristine.write_file(f"{work}/paths", _joined(paths))
        await self._image(
            f"{plain_git.make(work)}\nmkdir -p {work}/ignore\n(cd {tree} && unset GIT_DIR && {GIT_ENV} &&"
            f" xargs -0r git --literal-pathspecs ls-files -s -z -- < {work}/paths > {work}/tracked &&"
            f" {{ git ls-files -s -z | grep -z '^{_SUBMODULE} ' >> {work}/tracked || :; }} &&"
            f" git ls-files -z --cached --others -- .gitignore '*/.gitignore' > {work}/ignores &&"
            f" {{ xargs -0r cp --parents -t {work}/ignore < {work}/ignores 2>/dev/null || :; }} &&"
            f' {{ cat "$(git rev-parse --git-path info/exclude)" 2>/dev/null || :; }} >'
            f" {work}/git/info/exclude)"
            f" && printf '%s/\\n' {' '.join(NEVER_TAKEN)} >> {work}/git/info/exclude"
        )
        tracked, submodules = set(), []
        for line in _fields(await self._pristine.read_file(f"{work}/tracked")):
            mode, _, path = line.partition("\t")
            tracked.add(path)
            if mode.startswith(_SUBMODULE):
                submodules.append(f"{path}/")
        await self._take_ignores(changed, removed)
        # With `./`, or a name that begins with a colon would be more than a name.
        names = _joined(f"./{path}" for path in paths if path not in tracked)
        await self._pristine.write_file(f"{work}/asked", names)
        await self._agent(
            f"{plain_git.use(work, f'{work}/ignore')} && {{ {GIT} check-ignore --no-index -z --stdin"
            f" < ../asked > ../ignored; [ $? -le 1 ]; }}",
            "which files are ignored",
        )
        raw = await self._pristine.read_file(f"{work}/ignored")
        ignored = {path.removeprefix("./") for path in _fields(raw)}
        return lambda path: path in ignored or path.startswith(tuple(submodules))

    async def _take_ignores(self, changed: list[TreeEntry], removed: list[str]) -> None:
        written = [entry for entry in changed if entry.path.split("/")[-1] == ".gitignore"]
        gone = [path for path in removed if path.split("/")[-1] == ".gitignore"]
        # git follows no link of that name.
        gone += [entry.path for entry in written if entry.kind == "link"]
        if gone:
            names = " ".join(shlex.quote(f"{self._work}/ignore/{_printable(path)}") for path in gone)
            await self._image(f"rm -rf -- {names}")
        for entry in written:
            if entry.kind != "file":
                continue
            if entry.size > MAX_IGNORE_BYTES:
                raise _NoPatch(f"{_printable(entry.path)} has {entry.size} bytes, too many to obey")
            content = await self._read(entry)
            try:
                await self._pristine.write_file(f"{self._work}/ignore/{entry.path}", content)
            except SandboxRequestError as error:
                raise _NoPatch(f"{_printable(entry.path)} cannot be obeyed: {error}") from error

    async def _roots(self) -> list[str]:
        """Names directly in the import roots of the fresh tree, such as `src/pkg` or `setup.py`."""
        names: list[str] = []
        for root in IMPORT_ROOTS:
            with suppress(SandboxRequestError):  # a repository without it
                listed = await self._pristine.list_dir(f"{self._spec.repo_dir}/{root}")
                names += [f"{root}{info.name}" for info in listed]
        return names

    async def _compared(self, kept: Sequence[TreeEntry], gone: Sequence[str]) -> str:
        work = self._work
        old = [entry.path for entry in kept if not entry.new] + list(gone)
        await self._pristine.write_file(f"{work}/old", _joined(old))
        words = await self._image(
            f"{plain_git.use(work, self._spec.repo_dir)} && export GIT_INDEX_FILE={work}/index-old &&"
            f" {GIT} update-index -z --add --remove --stdin < {work}/old && {GIT} write-tree"
        )
        base = words.split()[-1]
        for number, entry in enumerate(kept):
            content = os.fsencode(entry.link) if entry.kind == "link" else await self._read(entry)
            await self._pristine.write_file(f"{work}/new/{number}", content)
        await self._pristine.write_file(
            f"{work}/numbers", "".join(f"{work}/new/{number}\n" for number in range(len(kept)))
        )
        await self._agent(
            f"{plain_git.use(work)} && {GIT} hash-object -w --no-filters --stdin-paths"
            " < ../numbers > ../blobs",
            "the content of the files",
        )
        blobs = (await self._pristine.read_file(f"{work}/blobs")).decode().split()
        lines = (f"{_mode(entry)} {blob}\t{entry.path}" for entry, blob in zip(kept, blobs, strict=True))
        await self._pristine.write_file(f"{work}/entries", _joined(lines))
        compare = (
            f"{plain_git.use(work)} && export GIT_INDEX_FILE={work}/index-new &&"
            f" {GIT} update-index -z --index-info < ../entries && new=$({GIT} write-tree) &&"
            f" {_PATCH} {base} $new > ../patch"
        )
        await self._agent(compare, "the difference")
        try:
            return (await self._written(kept)).decode()
        except UnicodeDecodeError:
            # Text in another encoding: as git's form for binary files, which is plain ASCII.
            attributes = f"{shlex.quote(plain_git.AS_BINARY)} >> {work}/git/info/attributes"
            await self._agent(f"echo {attributes} && {compare}", "the difference")
            return (await self._written(kept)).decode()

    async def _read(self, entry: TreeEntry) -> bytes:
        try:
            return await self._agents.read_file(f"{self._spec.repo_dir}/{entry.path}", MAX_CHANGED_BYTES)
        except SandboxRequestError as error:
            raise _NoPatch(f"{_printable(entry.path)} could not be read: {error}") from error

    async def _written(self, kept: Sequence[TreeEntry]) -> bytes:
        path = f"{self._work}/patch"
        if (await self._pristine.stat(path)).size > MAX_PATCH_BYTES:
            raise _NoPatch(f"the patch has more than {MAX_PATCH_BYTES} bytes: {_names(kept)}")
        return await self._pristine.read_file(path)

    async def _image(self, script: str) -> str:
        """A step on what the image holds: that it fails is nobody's fault in here."""
        result = await self._pristine.bash(f"(\n{script}\n)", timeout=GIT_S)
        if result.exit_code != 0:
            raise _trouble(result)
        return result.output

    async def _agent(self, script: str, what: str) -> str:
        """A step on what the agent made: that it fails leaves the agent without a patch, and no way out."""
        result = await self._pristine.bash(f"(\n{script}\n)", timeout=AGENTS_GIT_S)
        if FULL_DISK in result.output:
            raise _trouble(result)
        if result.exit_code != 0:
            took = f" within {AGENTS_GIT_S:g} s" if result.timed_out else ""
            raise _NoPatch(f"git could not tell {what}{took}: {result.output[-500:].strip()}")
        return result.output


def _trouble(result: BashResult) -> InfrastructureError:
    words = result.output[-1000:].strip()
    return InfrastructureError(f"the patch cannot be taken: git ended with {result.exit_code}: {words}")


def _of_a_repository(path: str) -> bool:
    return any(part.lower() == ".git" for part in path.split("/"))


def _mode(entry: TreeEntry) -> str:
    if entry.kind == "link":
        return "120000"
    return "100755" if entry.mode & 0o100 else "100644"


def _fields(raw: bytes) -> list[str]:
    return [os.fsdecode(part) for part in raw.split(b"\0") if part]


def _joined(parts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(part) + b"\0" for part in parts)


def _names(kept: Sequence[TreeEntry]) -> str:
    more = f" and {len(kept) - 5} more" if len(kept) > 5 else ""
    return ", ".join(_printable(entry.path) for entry in kept[:5]) + more


def _printable(path: str) -> str:
    return path.encode("utf-8", "replace").decode()
