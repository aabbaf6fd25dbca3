"""Copies what a sandbox wrote, by `cp` and `tar` of the node: links, modes, times, holes, overlay marks.

They run as the sandboxes' user and never with more rights than that: as the owner of all files in a user
namespace, who may also read what he has closed to himself. They follow no link.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path

from sandbox import connection, paths, trees
from sandbox.errors import SnapshotError
from sandbox.runtimes import Launch, Runtime
from sandbox.runtimes.base import PRELOAD

UPPER = "upper"
"""What was changed of the image's files; lies one deeper in a sandbox's scratch than in a snapshot."""
PARTS = (UPPER, "workspace", "home", "tmp", "shm")
OF_RUNTIME = ".singularity.d"
"""Apptainer would run scripts from there before any wall is up."""
READ_OUTSIDE = ("etc/passwd", "etc/group")
"""Of the image, by Apptainer, to add the user."""
MIB = 1 << 20
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 256 << 20
WORDS_BYTES = 2000
COPY_S, KILL_S = 600.0, 5.0
FICLONE = 0x40049409
"""`linux/fs.h`."""


def parts_of(launch: Launch) -> list[str]:
    """Those that there are."""
    return [part for part in PARTS if _place(launch, part).is_dir()]


async def copy_out(runtime: Runtime, launch: Launch, target: Path) -> None:
    """Copy all parts into `target`. Raises SnapshotError; what was copied by then is left there."""
    sources = [_place(launch, part) for part in parts_of(launch)]
    await _run(runtime, [*_CP, "-t", ".", "--", *map(str, sources)], cwd=target)


async def copy_in(runtime: Runtime, launch: Launch, source: Path, parts: list[str]) -> None:
    """Copy these parts of a snapshot into a sandbox that was not booted. Raises SnapshotError."""
    await _run(runtime, [*_CP, "-t", str(launch.scratch), "--", *parts], cwd=source)
    await connection.in_thread(_settle, runtime, launch)


async def pack(runtime: Runtime, launch: Launch, manifest: bytes, target: io.FileIO) -> None:
    """Write manifest and parts as one archive. Raises SnapshotError, OSError."""
    head = tarfile.TarInfo(MANIFEST)
    head.size, head.mode = len(manifest), 0o600
    begin = head.tobuf(tarfile.PAX_FORMAT) + manifest + bytes(-len(manifest) % tarfile.BLOCKSIZE)
    if target.write(begin) != len(begin):
        raise SnapshotError("no space is left for the snapshot")
    parts = parts_of(launch)
    upper = ["-C", "overlay", UPPER] if UPPER in parts else []
    command = [*_TAR, "--sparse", "-b", "512", "-cf", "-", *(part for part in parts if part != UPPER), *upper]
    await _run(runtime, command, cwd=launch.scratch, stdout=target.fileno())


def packed_manifest(source: io.FileIO) -> bytes:
    """What an archive begins with. Raises OSError, SnapshotError."""
    try:
        head = tarfile.TarInfo.frombuf(source.read(tarfile.BLOCKSIZE), "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeError) as error:
        raise SnapshotError(f"the snapshot is damaged: {error}") from error
    if head.name != MANIFEST or not 0 < head.size <= MOST_MANIFEST_BYTES:
        raise SnapshotError("the snapshot has no manifest")
    return source.read(head.size)


async def unpack(runtime: Runtime, launch: Launch, source: io.FileIO, parts: list[str]) -> None:
    """The inverse of :func:`pack`, into a sandbox that was not booted. Raises SnapshotError.

    The program takes off what begins with `/`, refuses `..`, and makes links last: none is written through.
    """
    source.seek(0)  # of the file itself, for nothing is buffered
    command = [*_TAR, "--no-same-owner", "-xpf", "-", "--", *parts]
    await _run(runtime, command, cwd=launch.scratch, stdin=source.fileno())
    await connection.in_thread(_settle, runtime, launch)


@functools.cache
def shares_blocks(place: Path) -> bool:
    """Whether files in that directory can be copied without copying what is in them."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=place) as original:
        original.write(bytes(4096))
        original.flush()
        with tempfile.TemporaryFile(dir=place) as copy:
            fcntl.ioctl(copy.fileno(), FICLONE, original.fileno())
            return True
    return False


_FREED = ("unshare", "--user", "--map-root-user", "--")
_CP = ("cp", "-a", "--no-preserve=ownership", "--reflink=auto", "--sparse=auto")
_TAR = ("tar", "--xattrs", "--xattrs-include=user.*", "--numeric-owner", "--format=posix")


def _place(launch: Launch, part: str) -> Path:
    return launch.scratch / ("overlay" if part == UPPER else "") / part


def _settle(runtime: Runtime, launch: Launch) -> None:
    """Put the upper layer where it belongs, without what would be in the way of walls that are to come."""
    upper = _place(launch, UPPER)
    for place in (launch.scratch / part for part in PARTS):
        if os.path.lexists(place):
            mode = place.lstat().st_mode
            if not stat.S_ISDIR(mode):
                raise SnapshotError(f"the snapshot is damaged: its {place.name} is no directory")
            place.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)  # the server is to begin there
    if (launch.scratch / UPPER).exists():
        (launch.scratch / UPPER).rename(upper)
    own = upper / OF_RUNTIME
    if os.path.lexists(own):
        if stat.S_ISDIR(own.lstat().st_mode):
            trees.remove(own)
        else:
            own.unlink()
    _refuse_links(runtime, launch)


def _refuse_links(runtime: Runtime, launch: Launch) -> None:
    """Runtimes mount where links lead, and at this boot they would meet what the agent put there at the last.

    Raises SnapshotError.
    """
    for name in READ_OUTSIDE:
        place = _place(launch, UPPER) / name
        info = place.lstat() if os.path.lexists(place) else None
        if info is None or stat.S_ISCHR(info.st_mode):  # it is as in the image, or removed
            continue
        if not stat.S_ISREG(info.st_mode) or info.st_size >= MIB:
            raise SnapshotError(f"/{name} is no file of a usual size")
    binds = runtime.all_binds(launch)
    own = {bind.target: bind.source for bind in binds if bind.source.parent == launch.scratch}
    asked = {bind.target for bind in launch.binds}
    for target in {*(bind.target for bind in binds), PRELOAD}:
        inside = next((place for place in own if target.startswith(place + "/")), "")
        place = own.get(inside, _place(launch, UPPER))
        *above, last = target[len(inside) + 1 :].split("/")
        for name in above:
            place /= name
            kind = stat.S_IFMT(place.lstat().st_mode) if os.path.lexists(place) else stat.S_IFCHR
            if kind == stat.S_IFCHR:  # it is as in the image, or removed
                break
            if kind != stat.S_IFDIR:
                raise SnapshotError(
                    f"{target} cannot be shown in it: what holds it was replaced by a link or a file"
                )
        else:
            if target in {*asked, *own} and (place / last).is_symlink():
                raise SnapshotError(f"{target} cannot be shown in it: it was replaced by a link")


async def _run(runtime: Runtime, command: list[str], cwd: Path, **streams: int) -> None:
    """Run a program as the sandboxes' user to its end; cancelled, it is ended. Raises SnapshotError."""
    user = runtime.as_user()
    freed = _FREED if _may_be_freed(user.get("user")) else ()
    environment = {"PATH": paths.tool_path(), "LC_ALL": "C"}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **streams}
    try:
        process = await asyncio.create_subprocess_exec(
            *freed, *command, cwd=cwd, env=environment, stderr=subprocess.PIPE, **options, **user
        )
    except OSError as error:
        raise SnapshotError(f"{command[0]} cannot be started: {error}") from error
    try:
        assert process.stderr is not None
        words = b""
        async with asyncio.timeout(COPY_S):
            while said := await process.stderr.read(1 << 16):  # a complaint for each of a million files
                words = (words + said)[:WORDS_BYTES]
            code = await process.wait()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):  # it may hang in a file system
            await asyncio.wait_for(process.wait(), KILL_S)
        if isinstance(error, TimeoutError):
            raise SnapshotError(f"{command[0]} was not through after {COPY_S:g} s") from error
        raise
    if code != 0:
        text = words.decode(errors="replace").strip()
        raise SnapshotError(f"{command[0]} ended with {code}; it said: {text or '(nothing)'}")


@functools.cache
def _may_be_freed(user: int | None) -> bool:
    """Whether a namespace lets that user read what it has closed to itself; root needs none."""
    if user is None and os.geteuid() == 0:
        return False
    owner = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    command, env = [*_FREED, "true"], {"PATH": paths.tool_path()}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, env=env, capture_output=True, timeout=30, **owner).returncode == 0
    return False
