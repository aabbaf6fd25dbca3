"""Sets of Harbor tasks: a task directory, a tree of them, or a `registry.json` with clones of what it names.

Nothing is fetched. A clone is read at the commit that the registry names, and never checked out.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rollout.datasets import Row
from rollout.schema import RolloutRequest
from rollout.suites import HARBOR, SuiteError
from rollout.suites.bundles import Bundle, pack, unpack
from rollout.suites.harbor.directory import CONFIG, TaskDirectory, load

if TYPE_CHECKING:
    from rollout.client import Client

_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}|HEAD")
_GIT_S = 120.0
_OFFLINE = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
"""A clone that lacks objects would ask where it came from for them."""


@dataclass(frozen=True)
class Source:
    """Where one task is: a directory, or a place in a clone at a commit."""

    path: Path
    """The directory, or the clone."""
    commit: str | None = None
    within: str = ""
    """Of a clone: the task's place in it."""

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.path}@{self.commit}:{self.within}" if self.commit else f"{self.path}"

    def open(self) -> AbstractContextManager[Path]:
        """Its directory, for as long as it is open."""
        return self._extracted() if self.commit else nullcontext(self.path)

    @contextmanager
    def _extracted(self) -> Iterator[Path]:
        archive = _git(self.path, "archive", "--format=tar", f"{self.commit}:{self.within}")
        with tempfile.TemporaryDirectory(prefix="rollout-task-") as directory:
            place = Path(directory, PurePosixPath(self.within).name or "task")
            try:  # by the reader of bundles: a clone may be anybody's
                unpack(gzip.compress(archive, 1), hashlib.sha256(archive).hexdigest(), place)
            except SuiteError as error:
                raise SuiteError(f"{self.where}: {error}") from None
            yield place


def sources(path: str | Path, split: str | None = None, clones: str | Path | None = None) -> Iterator[Source]:
    """Where the tasks of a set are, in the order of their paths or of the registry.

    Args:
        path: A task directory, a directory with some below it, or a `registry.json`.
        split: Of a registry with several sets: `NAME` or `NAME@VERSION`.
        clones: Directory in which the repositories of a registry lie by their names.

    Raises:
        SuiteError: There is no task, or a repository or a commit is not here; it is named.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(_below(path))
        if not found:
            raise SuiteError(f"{path}: no {CONFIG} is there, nor in a directory below it")
        yield from map(Source, found)
    else:
        for number, entry in enumerate(_registered(path, split)):
            yield _source(path, f"{path}, task {number}", entry, clones)


def _below(folder: Path) -> Iterator[Path]:
    """Task directories; what is in one of them is its own."""
    for here, folders, files in os.walk(folder):
        if CONFIG in files:
            folders.clear()
            yield Path(here)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _registered(path: Path, split: str | None) -> list[Any]:
    try:
        sets = json.loads(path.read_text("utf-8"))
        named = {f"{entry['name']}@{entry['version']}": list(entry["tasks"]) for entry in sets}
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise SuiteError(f"{path}: is no registry, a list of name, version and tasks ({error!r})") from None
    fit = [name for name in named if split in (None, name, name.rpartition("@")[0])]
    if len(fit) != 1:
        raise SuiteError(f"{path} has the sets {', '.join(named)}: name one as --split NAME@VERSION")
    return named[fit[0]]


def _source(registry: Path, where: str, entry: Any, clones: str | Path | None) -> Source:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise SuiteError(f"{where}: has no path")
    within, url = entry["path"].strip("/"), entry.get("git_url")
    if ".." in PurePosixPath(within).parts:
        raise SuiteError(f"{where}: path {within!r} leads elsewhere")
    if url is None:
        return Source(registry.parent / within)
    commit = str(entry.get("git_commit_id") or "HEAD")
    name = str(url).rstrip("/").rpartition("/")[2].rpartition(":")[2].removesuffix(".git")
    if not _COMMIT.fullmatch(commit) or name in ("", ".", ".."):
        raise SuiteError(f"{where}: git_url {url!r} and git_commit_id {commit!r} name no commit")
    if clones is None:
        raise SuiteError(f"{where}: is in {url}: clone it, and give the directory with the clone as --clones")
    clone = Path(clones, name)
    if not clone.is_dir():
        raise SuiteError(f"{where}: {clone} is missing: git clone {url} {clone}")
    try:
        _git(clone, "cat-file", "-e", f"{commit}^{{commit}}")
    except SuiteError as error:
        raise SuiteError(
            f"{where}: commit {commit} is not in {clone}: git -C {clone} fetch ({error})"
        ) from None
    return Source(clone, commit, within)


def _git(clone: Path, *words: str) -> bytes:
    settings = (
        "protocol.allow=never",
        "filter.lfs.smudge=",
        "filter.lfs.process=",
        "filter.lfs.required=false",
    )
    command = ["git", "-C", str(clone), *(word for setting in settings for word in ("-c", setting)), *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, env={**os.environ, **_OFFLINE})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SuiteError(f"git: {error}") from None
    if done.returncode:
        raise SuiteError(done.stderr.decode(errors="replace").strip() or f"git ended with {done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class HarborTask:
    """A task of a set, without its content."""

    source: Source
    name: str
    digest: str
    """Of its bundle."""
    warnings: tuple[str, ...]

    def bundle(self) -> Bundle:
        """Its content. Raises SuiteError where it changed meanwhile."""
        with self.source.open() as path:
            bundle = pack(path)
        if bundle.digest != self.digest:
            raise SuiteError(f"{self.source.where}: has changed since it was read")
        return bundle

    def request(
        self, n: int = 1, *, options: Mapping[str, Any] | None = None, **fields: Any
    ) -> RolloutRequest:
        """A request for `n` rollouts of it.

        Args:
            options: Further fields of the task, such as `timeout_multiplier`.
            fields: Of the request: `limits`, `sampling`, `tags` …
        """
        task = {"bundle": self.digest, "name": self.name, **(options or {})}
        return RolloutRequest(handler=HARBOR, task=task, n=n, **fields)


def read(source: Source, check_image: bool = True) -> HarborTask:
    """Look at one task whole. Raises SuiteError as `load` and `pack`, naming the place in the registry."""
    with source.open() as path:
        try:
            directory: TaskDirectory = load(path, check_image)
            digest = pack(path).digest
        except SuiteError as error:
            raise SuiteError(str(error).replace(str(path), source.where)) from None
        warnings = tuple(text.replace(str(path), source.where) for text in directory.warnings)
    return HarborTask(source, directory.name, digest, warnings)


def tasks(
    path: str | Path, split: str | None = None, clones: str | Path | None = None, check_image: bool = True
) -> Iterator[HarborTask]:
    """The tasks of a set, one at a time.

    Args:
        check_image: As `load` has it; the others as `sources`.

    Raises:
        SuiteError: As `sources`, `load` and `pack`.
    """
    return (read(source, check_image) for source in sources(path, split, clones))


def requests(
    path: str | Path,
    client: Client,
    n: int = 1,
    *,
    split: str | None = None,
    clones: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Iterator[RolloutRequest]:
    """Requests for the tasks of a set, for `client.rollouts`; the bundle of each is put first.

    Args:
        options, fields: As `HarborTask.request` has them.
    """
    for task in tasks(path, split, clones, check_image="image" not in (options or {})):
        client.put_bundle(task)
        yield task.request(n, options=options, **fields)


def rows(path: str | Path, split: str | None = None, clones: str | Path | None = None) -> Iterator[Row]:
    """The same as rows of a dataset."""
    for number, task in enumerate(tasks(path, split, clones), 1):
        data = {"bundle": task.digest, "name": task.name}
        yield Row(number, task.source.where, data, task)
