"""Takes snapshots of sandboxes, and has what others are begun with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox import connection, paths
from sandbox.config import HostConfig
from sandbox.errors import NodeShort, SandboxError, SandboxGone, SandboxRequestError, SnapshotError
from sandbox.layer import Layer
from sandbox.room import DISK, DISK_FLOOR, free_disk, shortages
from sandbox.snapshots import copying
from sandbox.snapshots.manifest import MIB, Manifest, describe, image_of, read, write
from sandbox.snapshots.still import Still
from sandbox.snapshots.store import FILES, PACKED_FILES, Store
from sandbox.spec import SandboxSpec, SnapshotInfo

if TYPE_CHECKING:
    from sandbox.container import Container

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
PACKED = ".tar"
ASK_S = 60.0
"""For the server inside to answer, besides what it was told to wait."""
TIDY_S = 10.0
IN_MEMORY = "changed system files are kept in memory on this node, and cannot be copied"


class Snapshots:
    """Those of one host. Used from its event loop."""

    def __init__(
        self,
        state: Path,
        config: HostConfig,
        containers: Mapping[str, Container],
        remove: Callable[[Path], object],
    ) -> None:
        """`containers`: the host's, by id; `remove` removes a tree soon."""
        self._state = state
        self._floors = config.floors
        self._containers = containers
        self._store = Store(state / "snapshots", config.snapshots_mb * MIB, config.snapshots_s, remove)
        self._remove = remove
        self._busy: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._opened: dict[int, tuple[Manifest, Path | io.FileIO]] = {}
        """What is being begun with, by the identity of the spec."""
        self._coming = 0
        """Bytes that are being written for sandboxes to begin with."""
        self._tidied = 0.0
        self._counts = dict.fromkeys(("snapshots_taken", "snapshots_failed", "snapshots_begun"), 0)
        self.open = self._store.open

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One of `snapshots.client`. Raises SnapshotError, SandboxRequestError, SandboxGone."""
        match request:
            case {"op": "forget_snapshots", "owner": str(owner)}:
                return {"forgotten": self._store.forget(owner)}
            case {"op": "snapshot", "id": str(sandbox_id), "name": str(name), "owner": str(owner)}:
                if (container := self._containers.get(sandbox_id)) is None:
                    raise SandboxGone(f"there is no sandbox {sandbox_id}")
                wait_s, ends = float(request["wait_s"]), bool(request["ends"])
                return (await self.take(container, name, owner, wait_s, ends)).to_json()
        raise SandboxRequestError(f"incomplete request {request.get('op')!r} to the sandbox host")

    # -- take ----------------------------------------------

    async def take(
        self, container: Container, name: str, owner: str, wait_s: float, ends: bool
    ) -> SnapshotInfo:
        """See `HostClient.snapshot`."""
        target = _target(name)
        busy = self._busy.setdefault(container.id, asyncio.Lock())
        what = f"snapshot {name} of sandbox {container.id} of {container.spec.owner!r}"
        try:
            async with busy:
                info = await self._take(container, name, target, owner, wait_s, ends)
        except BaseException as error:
            self._counts["snapshots_failed"] += 1
            log.warning("%s was not taken: %s", what, error)
            if isinstance(error, OSError):
                raise SnapshotError(f"{what} cannot be written: {error}") from error
            raise
        self._counts["snapshots_taken"] += 1
        mib = info.bytes / MIB
        log.info("%s: %.1f MiB in %d files, %s, in %.3f s", what, mib, info.files, info.way, info.seconds)
        return info

    async def _take(
        self, container: Container, name: str, target: Path | None, owner: str, wait_s: float, ends: bool
    ) -> SnapshotInfo:
        _refuse(container)
        request = {"op": "state", "wait_s": wait_s}
        state = await connection.exchange(container.address, request, wait_s + ASK_S)
        still, ended = _still(container), False
        began = time.monotonic()
        try:
            await connection.in_thread(still.stop, ends)
            state |= await connection.exchange(container.address, {"op": "trees"}, ASK_S)
            manifest = await connection.in_thread(describe, container, name, owner, state)
            text = await connection.in_thread(write, manifest)  # megabytes, where much was done
            if target is None:
                way = await self._keep(container, manifest, text, still)
            else:
                way = await self._pack(container, manifest, text, target, still)
            ended = ends
        finally:
            if not ended:
                await asyncio.shield(asyncio.to_thread(still.go_on))
        return SnapshotInfo(name, manifest.bytes, manifest.files, way, round(time.monotonic() - began, 3))

    async def _keep(self, container: Container, manifest: Manifest, text: bytes, still: Still) -> str:
        self._store.make_room(manifest.name, manifest.bytes)
        if short := self._too_little_disk(manifest.bytes):
            raise SnapshotError(short)
        place = self._store.begin(container.runtime.run_as)
        try:
            way = "reflink" if copying.shares_blocks(self._store.place) else "copy"
            if way == "copy":  # one file is made sooner than many, and `tar` follows no link that comes late
                with io.FileIO(place / PACKED_FILES, "x") as file:
                    await copying.pack(container.runtime, container.launch, b"{}", file)
            else:
                await copying.copy_out(container.runtime, container.launch, place / FILES)
            await connection.in_thread(still.check)
            _refuse(container)  # its end would have removed files meanwhile
            self._store.finish(place, manifest, text)
        except BaseException:
            self._remove(place)
            raise
        return way

    async def _pack(
        self, container: Container, manifest: Manifest, text: bytes, target: Path, still: Still
    ) -> str:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if free_disk(target.parent) < manifest.bytes:
            raise SnapshotError(f"{manifest.bytes // MIB} MiB have no room at {target.parent}")
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with io.FileIO(os.open(unfinished, flags, 0o600), "w") as file:
                await copying.pack(container.runtime, container.launch, text, file)
                await connection.in_thread(still.check)
                _refuse(container)
                await connection.in_thread(os.fsync, file.fileno())
            unfinished.rename(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return "packed"

    def _too_little_disk(self, size: int) -> str:
        """Why so much more cannot be written on the node, or nothing."""
        left, floor = (free_disk(self._state) - size) // MIB, self._floors.disk_mb
        return f"{left} MiB of disk would be left, fewer than {DISK_FLOOR}={floor}" if left < floor else ""

    # -- begin ----------------------------------------------

    @contextlib.asynccontextmanager
    async def opened(self, spec: SandboxSpec) -> AsyncIterator[SandboxSpec]:
        """The spec of a sandbox: what its snapshot was taken of, which is not removed meanwhile; or itself.

        Raises SnapshotError, SandboxRequestError.
        """
        if not spec.snapshot:
            yield spec
            return
        target = _target(spec.snapshot)
        if spec.files:
            raise SandboxRequestError("what is begun with a snapshot has its files, and is given no others")
        with contextlib.ExitStack() as stack:
            try:
                if target is None:
                    place = stack.enter_context(self._store.used(spec.snapshot))
                    files: Path | io.FileIO = place / FILES
                    if (place / PACKED_FILES).exists():
                        files = stack.enter_context(_open_packed(place / PACKED_FILES))
                    manifest = await asyncio.to_thread(lambda: read((place / copying.MANIFEST).read_bytes()))
                else:
                    files = packed = stack.enter_context(_open_packed(target))
                    manifest = await asyncio.to_thread(lambda: read(copying.packed_manifest(packed)))
            except OSError as error:
                raise SnapshotError(f"snapshot {spec.snapshot} cannot be read: {error}") from error
            own = {"owner": spec.owner, "max_lifetime_s": spec.max_lifetime_s, "snapshot": spec.snapshot}
            spec = dataclasses.replace(manifest.spec, **own)
            self._opened[id(spec)] = manifest, files
            stack.callback(self._opened.pop, id(spec))
            yield spec

    async def fill(self, container: Container) -> None:
        """Give one that was not booted the files of its snapshot, if any. Raises SnapshotError, NodeShort."""
        if not (opened := self._opened.get(id(container.spec))):
            return
        (manifest, files), runtime, launch = opened, container.runtime, container.launch
        if (runtime.name, image_of(launch.rootfs)) != (manifest.runtime, manifest.rootfs):
            was = f"{manifest.runtime} and image {manifest.rootfs}"
            raise SnapshotError(
                f"it was taken on {was}; here are {runtime.name} and {image_of(launch.rootfs)}"
            )
        if runtime.in_memory and copying.UPPER in manifest.parts:
            raise SnapshotError(IN_MEMORY)
        if short := self._too_little_disk(self._coming + manifest.bytes):
            raise NodeShort(f"no sandbox is begun with a snapshot: {short}")
        self._coming += manifest.bytes
        try:
            if isinstance(files, Path):
                await copying.copy_in(runtime, launch, files, manifest.parts)
            else:
                await copying.unpack(runtime, launch, files, manifest.parts)
        finally:
            self._coming -= manifest.bytes

    async def restore(self, container: Container) -> None:
        """Give one that was booted the rest. Raises SnapshotError."""
        if opened := self._opened.get(id(container.spec)):
            state, before, noted = opened[0].state, opened[0].workspace, opened[0].noted
            if noted is not None:  # the boot has put into the layer what it always does
                await connection.in_thread(Layer(container.address).note_again, noted)
            if (now := container.runtime.places(container.launch).workspace) != before:  # of no container
                scratches = (str(Path(place).parent) for place in (before, now))
                state = json.loads(json.dumps(state).replace(*scratches))
            request = {"op": "restore", "state": state}
            try:
                await connection.exchange(container.address, request, ASK_S)
            except SandboxError as error:
                raise SnapshotError(f"its state cannot be given to a new sandbox: {error}") from error
            self._counts["snapshots_begun"] += 1

    # -- keeping order ----------------------------------------------

    def tidy(self) -> None:
        """To be called often: what was kept long enough goes, and what the node has no disk for."""
        if time.monotonic() - self._tidied > TIDY_S:
            self._tidied = time.monotonic()
            self._store.tidy(short=DISK in shortages(self._state, self._floors))

    @staticmethod
    def recover(container: Container) -> None:
        """Continue what an earlier host, killed meanwhile, had stopped in it."""
        _still(container).recover()

    def stats(self) -> dict[str, int]:
        """Counts since the start of the host, and what is kept."""
        return self._counts | {"snapshots_kept": len(self._store), "snapshots_bytes": self._store.size}


def _target(name: str) -> Path | None:
    """The file to pack into; None = a name of the node's own. Raises SandboxRequestError for neither."""
    if NAME.fullmatch(name):
        return None
    shared, path = paths.snapshot_dir(), Path(name)
    place = path.parent.resolve() / path.name
    if shared is None or not path.is_absolute() or not place.is_relative_to(shared) or place.suffix != PACKED:
        raise SandboxRequestError(
            f"snapshot {name!r}: no name, and no path of a {PACKED} below ROLLOUT_SNAPSHOT_DIR={shared}"
        )
    return place


def _open_packed(path: Path) -> io.FileIO:
    """Raises OSError, SnapshotError."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        file.close()
        raise SnapshotError(f"{path} is no file of our own")
    return file


def _refuse(container: Container) -> None:
    """Raises SnapshotError where it is known that the files cannot be had."""
    if container.info is None or container.ending is not None:
        raise SnapshotError(f"sandbox {container.id} is nobody's, or ends")
    if container.runtime.name == "apptainer" and copying.UPPER not in copying.parts_of(container.launch):
        raise SnapshotError(IN_MEMORY)


def _still(container: Container) -> Still:
    assert container.pid is not None
    return Still(container.pid, container.protected, container.launch.socket.parent / "still")
