"""The agent's patch: the difference between its work tree and that of a sandbox it never was in.

The work tree is carried out of the agent's sandbox as files, without its `.git`, and compared by the git of a
fresh one. So it does not matter what became of the agent's repository: commits, branches, hooks, filters,
external diffs, a replaced git or no repository at all. Only what the files are counts.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from workers.errors import InfrastructureError
from workers.handlers.base import Context
from workers.handlers.swe.protection import IMPORT_ROOTS, Protection
from workers.handlers.swe.repository import GIT_ENV, prepare
from workers.handlers.swe.rows import Instance
from workers.handlers.swe.specs import Spec

MAX_PATCH_BYTES = 1_000_000
"""A fix is far shorter; what is longer has build products or data in it."""
MAX_CHANGED_BYTES = 64 << 20
"""Of the new content of changed files. git compares them in memory, and none of a fix is that large."""
MAX_TREE_BYTES = 2 << 30
GIT_S = 300.0
"""Most seconds of one step of git."""
MAX_EXCLUDED = 200
"""Ignored directories that are left behind; a repository with more of them is small ones."""

# Whatever the image's configuration says, and whatever attributes the agent's tree brings: exact content.
_SETTINGS = (
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.eol=lf",
    "core.fileMode=true",
    "core.symlinks=true",
    "core.quotePath=true",
    "core.attributesFile=/dev/null",
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.sparseCheckout=false",
    "diff.renames=false",
    "submodule.recurse=false",
)
_GIT = "git " + " ".join(f"-c {setting}" for setting in _SETTINGS)


def _diff(options: str) -> str:
    return f"{_GIT} diff-index --cached --no-renames --ignore-submodules=all {options} $base"


_PATCH = (
    _diff("-p --binary --full-index --no-ext-diff --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/")
    + " > ../patch"
)
NEVER_TAKEN = (".venv/", "node_modules/")
"""Directories that are left alone unless they are tracked: they are large, and no fix."""
_ROOTS = " ".join(filter(None, IMPORT_ROOTS))
_NOTHING, _SUBMODULE = "000000", "160000"
"""Modes of `diff-index`."""
_QUIET = (
    "export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_LITERAL_PATHSPECS=1"
)


@dataclass(frozen=True)
class Patch:
    """What the agent changed."""

    text: str
    """A diff that `git apply` takes; "" for no change, and where there is a `problem`."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Changed paths that are not in it, and why; see `protection`."""
    problem: str | None = None
    """Why there is no patch although something was changed, in words."""


@dataclass(frozen=True)
class _Change:
    path: str
    added: bool
    blob: str | None
    """Of the new content; None where there is none."""


async def take_patch(ctx: Context[Any], instance: Instance, spec: Spec, sandbox: dict[str, Any]) -> Patch:
    """The patch of the agent in `ctx.sandbox`, whose processes are ended first.

    Args:
        sandbox: Options of `Sandboxes.fresh`, for the sandbox that compares.

    Raises:
        StageError: A sandbox failed.
    """
    assert ctx.sandbox is not None
    # A process of the agent must not change files while they are read.
    await ctx.sandbox.reset()
    work = f"/tmp/rollout-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="rollout-swe-") as directory:
        tree = Path(directory) / "tree.tar.gz"
        async with ctx.sandboxes.fresh(ctx, **sandbox) as pristine:
            await prepare(pristine, instance, spec)
            ignored = await _note_base(pristine, spec, work)
            try:
                await ctx.sandbox.archive(
                    spec.repo_dir, tree, exclude=[".git", *ignored], max_bytes=MAX_TREE_BYTES
                )
            except SandboxRequestError as error:
                return Patch("", problem=f"the work tree could not be read: {error}")
            await pristine.upload(tree, f"{work}/tree.tar.gz", max_bytes=2 * MAX_TREE_BYTES)
            await asyncio.to_thread(tree.unlink)
            return await _compare(pristine, instance, spec, work)


async def _note_base(pristine: SandboxClient, spec: Spec, work: str) -> list[str]:
    """Write the tree to compare with; answers what git ignores there, as patterns for `archive`."""
    said = await _git(
        pristine,
        f"cd {shlex.quote(spec.repo_dir)} && mkdir -p {work}/tree && {_environment(spec, work)} &&"
        f" printf '%s\\n' {' '.join(NEVER_TAKEN)} > {work}/excludes &&"
        f' cp "$GIT_DIR/index" {work}/index && {_GIT} add -A . && {_GIT} write-tree > {work}/base &&'
        " git ls-files -z --others --ignored --exclude-standard --directory | tr '\\0' '\\n'",
    )
    directories = [line[:-1] for line in said.splitlines() if line.endswith("/") and line != "./"]
    return [re.sub(r"([\[\]*?])", r"[\1]", name) for name in directories[:MAX_EXCLUDED]]


async def _compare(pristine: SandboxClient, instance: Instance, spec: Spec, work: str) -> Patch:
    """The difference of the agent's tree, packed in `work`, and the noted base."""
    enter = (
        f"cd {shlex.quote(spec.repo_dir)} && {_environment(spec, work)} && base=$(cat {work}/base) &&"
        f" cd {work}/tree && export GIT_WORK_TREE=$PWD"
    )
    await _git(
        pristine,
        f"{enter} && tar -xzpf ../tree.tar.gz --no-same-owner &&"
        f" {_GIT} add -A . && {_diff('--raw -z')} > ../raw &&"
        f" {{ git ls-tree -z --name-only $base && git ls-tree -z --name-only $base {_ROOTS}; }} > ../roots",
    )
    changes = _changes(await pristine.read_file(f"{work}/raw"))
    roots = (await pristine.read_file(f"{work}/roots")).decode("utf-8", "surrogateescape").split("\0")
    protection = Protection(spec.test_files, instance.gold_files, roots)
    objections = {change.path: protection.objection(change.path, change.added) for change in changes}
    dropped = {path: why for path, why in objections.items() if why is not None}
    told = {_printable(path): why for path, why in dropped.items()}
    kept = [change for change in changes if change.path not in dropped]
    await pristine.write_file(f"{work}/blobs", "".join(f"{change.blob}\n" for change in kept if change.blob))
    sizes = "git cat-file --batch-check='%(objectsize)' < ../blobs"
    said = await _git(
        pristine, f"{enter} && {sizes} | (sum=0; while read size; do ((sum += size)); done; echo $sum)"
    )
    if (size := int(said.split()[-1])) > MAX_CHANGED_BYTES:
        return Patch("", told, f"the changed files have {size} bytes, too many to compare: {_names(kept)}")
    await pristine.write_file(f"{work}/drop", "\0".join(dropped).encode("utf-8", "surrogateescape"))
    take_back = f"{_GIT} reset -q --pathspec-from-file=../drop --pathspec-file-nul $base" if dropped else ":"
    await _git(pristine, f"{enter} && {take_back} && {_PATCH}")
    raw = await _written(pristine, work)
    if raw is not None and not _is_utf_8(raw):
        # Text in another encoding: as git's form for binary files, which is plain ASCII.
        as_binary = "mkdir -p $GIT_DIR/info && echo '* -diff' > $GIT_DIR/info/attributes"
        await _git(pristine, f"{enter} && {as_binary} && {_PATCH}")
        raw = await _written(pristine, work)
    if raw is None:
        return Patch("", told, f"the patch has more than {MAX_PATCH_BYTES} bytes: {_names(kept)}")
    return Patch(raw.decode(), told)


async def _written(pristine: SandboxClient, work: str) -> bytes | None:
    """The patch; None if it is too long."""
    path = f"{work}/patch"
    return None if (await pristine.stat(path)).size > MAX_PATCH_BYTES else await pristine.read_file(path)


def _is_utf_8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _environment(spec: Spec, work: str) -> str:
    # The repository's own index and work tree are left alone; objects are added to its store.
    return (
        f"{_config(work)} && {_QUIET} && export GIT_DIR=$(git rev-parse --absolute-git-dir)"
        f" GIT_INDEX_FILE={work}/index GIT_WORK_TREE={shlex.quote(spec.repo_dir)}"
    )


def _config(work: str) -> str:
    """`GIT_ENV`, and what no patch takes."""
    return (
        f"{GIT_ENV} && export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_1=core.excludesFile"
        f" GIT_CONFIG_VALUE_1={work}/excludes"
    )


async def _git(pristine: SandboxClient, script: str) -> str:
    result = await pristine.bash(f"(\n{script}\n)", timeout=GIT_S)
    if result.exit_code != 0:
        # Nothing here is the agent's but the content of files, which git takes as it is.
        raise InfrastructureError(
            f"the patch cannot be taken: git ended with {result.exit_code}: {result.output[-1000:].strip()}"
        )
    return result.output


def _changes(raw: bytes) -> list[_Change]:
    """What `diff-index --raw -z` says."""
    fields = raw.decode("utf-8", "surrogateescape").split("\0")
    changes = []
    for meta, path in zip(fields[::2], fields[1::2], strict=False):
        old_mode, new_mode, _, blob, _ = meta.lstrip(":").split(" ")
        gone = new_mode in (_NOTHING, _SUBMODULE)
        changes.append(_Change(path, old_mode == _NOTHING, None if gone else blob))
    return changes


def _names(changes: list[_Change]) -> str:
    names = [change.path for change in changes]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(_printable, names[:5])) + more


def _printable(path: str) -> str:
    return path.encode("utf-8", "replace").decode()
