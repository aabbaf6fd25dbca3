"""The containers of one host: start or claim, release, adopt what an earlier host left running."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sandbox import connection, paths, payload, processes, trees
from sandbox.config import HostConfig
from sandbox.container import Container, end_strays, runtime_of
from sandbox.equipment import Equipment
from sandbox.errors import ImageError, NodeShort, SandboxError, SandboxRequestError, SandboxStartError
from sandbox.pool import Kind, WarmPool
from sandbox.records import Record, Records, boot_id, now
from sandbox.room import shortages
from sandbox.runtimes import Launch, Runtime
from sandbox.runtimes.template import Clone
from sandbox.snapshots import Snapshots
from sandbox.spec import Fate, SandboxInfo, SandboxSpec

log = logging.getLogger(__name__)

ID_BYTES = 4  # short, because socket paths are limited
SANDBOX_ID = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}")
JANITOR_PERIOD_S = 1.0
PARALLEL_STARTS = 2 * (os.cpu_count() or 1)  # measured: more only makes each start slower
REMOVING_THREADS = 2
MOST_ENDING = 16  # beyond, who ends one waits for it: sandboxes must not come faster than they go
SETUP_TIMEOUT_S = 10.0
REFILL_AFTER_S = 0.02
FATES_KEPT = 1000
COUNTS = (
    *("started", "claimed_warm", "cloned", "failed", "released"),
    *("expired", "died", "limited", "node", "adopted", "swept"),
)


class Containers:
    """All containers of a host. Used from one event loop; blocking work goes to threads."""

    def __init__(self, state: Path, config: HostConfig):
        self.state = state
        self.config = config
        self.equipment = Equipment(state, config)
        self._all: dict[str, Container] = {}
        self._start_slots = asyncio.Semaphore(PARALLEL_STARTS)
        self._waiting = 0
        # Threads of their own, so that what takes long delays nothing but its like.
        self._removing = ThreadPoolExecutor(REMOVING_THREADS, "removing")
        self.snapshots = Snapshots(state, config, self._all, partial(self._removing.submit, trees.remove))
        self._boot_id = boot_id()
        self._fates: collections.OrderedDict[str, Fate] = collections.OrderedDict()
        self.counts = dict.fromkeys(COUNTS, 0)
        paths.own_directory(state / "records", 0o700)
        payloads = paths.own_directory(state / "payload", 0o711)
        self._payload = payload.stage(payloads)
        self._records = Records(state / "records")
        self.pool = WarmPool(config, self._boot_warm, self._end_soon, lambda: self._waiting > 0)

    # -- start ----------------------------------------------

    async def start(self, spec: SandboxSpec) -> SandboxInfo:
        """Give a sandbox whose shell is ready: a warm one if there is one of that kind, else a new one.

        Raises ImageError, NodeShort, RuntimeUnavailable, SandboxRequestError, SnapshotError, or
        SandboxStartError with the runtime's stderr.
        """
        began = time.monotonic()
        async with self.snapshots.opened(spec) as spec:
            kind, runtime = await self.equipment.kind_of(spec)
            try:
                info = None if spec.snapshot else await self._claim(kind, spec, began)
                if info is None:
                    container = await self._boot_new(kind, runtime, spec)
                    info = await self._hand_over(container, spec, began)
            except BaseException:
                self.counts["failed"] += 1
                raise
            finally:
                # Once the asker has it and its first command is done, for which others would compete.
                again = asyncio.get_running_loop().call_later
                again(REFILL_AFTER_S, self.pool.asked, kind, 0 if spec.snapshot else None)
            self.counts["started"] += 1
            self.counts["claimed_warm"] += info.warm
            return info

    async def _claim(self, kind: Kind, spec: SandboxSpec, began: float) -> SandboxInfo | None:
        """A warm one, if there is one that still answers."""
        while container := self.pool.take(kind):
            try:
                return await self._hand_over(container, spec, began, warm=True)
            except SandboxStartError as error:
                log.warning("a warm sandbox was not to be had: %s", error)
        return None

    async def keep_warm(self, spec: SandboxSpec, count: int) -> None:
        """Have `count` sandboxes of the spec's kind ready soon, e.g. for a stage that is still to come."""
        kind, _ = await self.equipment.kind_of(spec)
        self.pool.asked(kind, count)

    async def _boot_warm(self, kind: Kind) -> Container:
        spec = SandboxSpec(image=kind.image, runtime=kind.runtime, network=kind.network)
        try:
            runtime = await self.equipment.runtime(kind.runtime)
            container = await self._boot_new(kind, runtime, spec, rehearse=True)
        except BaseException:
            self.counts["failed"] += 1
            raise
        self._write_record(container)
        return container

    async def _boot_new(
        self, kind: Kind, runtime: Runtime, spec: SandboxSpec, rehearse: bool = False
    ) -> Container:
        """`rehearse`: have one exchange with its server, for the first takes longest."""
        self._waiting += 1
        try:
            await self._start_slots.acquire()
        finally:
            self._waiting -= 1
        try:
            if short := shortages(self.state, self.config.floors):
                raise NodeShort("no sandbox is started: " + "; ".join(short.values()))
            container = self._prepare(kind, runtime, spec)
            try:
                await self.snapshots.fill(container)
                await container.boot(self.equipment.hold_images, self._write_record)
                self.counts["cloned"] += isinstance(container.process, Clone)
                if rehearse:
                    await self._ask(container, {"op": "setup", "env": {}})
                if kind.ipython:
                    await self._ask(container, {"op": "ipython_warm"})
            except BaseException:
                await self.release(container.id)
                raise
            return container
        finally:
            self._start_slots.release()

    def _prepare(self, kind: Kind, runtime: Runtime, spec: SandboxSpec) -> Container:
        sandbox_id = secrets.token_hex(ID_BYTES)
        launch = Launch(
            sandbox_id,
            self.state,
            self._payload,
            kind.rootfs,
            kind.network,
            kind.interpreter,
            kind.binds,
            kind.limits,
        )
        paths.check_socket_path(str(launch.socket))
        # Written first: a host killed between here and the end of the start leaves nothing unknown.
        self._records.write(Record(sandbox_id, runtime.name, runtime.run_as, self._boot_id))
        launch.make_directories(runtime.run_as)
        container = Container(sandbox_id, runtime, spec, launch, kind.limits)
        self._all[sandbox_id] = container
        return container

    async def _hand_over(
        self, container: Container, spec: SandboxSpec, began: float, warm: bool = False
    ) -> SandboxInfo:
        """Make it the asker's own: files, environment, owner, lifetime. It is ended if that fails."""
        try:
            container.spec = spec
            container.deadline = now() + spec.max_lifetime_s
            container.put_files(spec.files)
            if spec.env:
                await self._ask(container, {"op": "setup", "env": spec.env})
            elif warm:  # it has to show that it is alive
                await self._ask(container, {"op": "ping"})
            await self.snapshots.restore(container)
            if container.is_over():
                raise SandboxStartError(f"sandbox {container.id} ended as soon as it was ready")
            container.info = self._info_of(container, spec, began, warm)
            self._write_record(container)
            return container.info
        except BaseException:
            await self.release(container.id)
            raise

    def _info_of(self, container: Container, spec: SandboxSpec, began: float, warm: bool) -> SandboxInfo:
        runtime = container.runtime
        return SandboxInfo(
            id=container.id,
            socket=container.address.text(),
            runtime=runtime.name,
            node=socket.gethostname(),
            isolation_missing=self.equipment.missing(container),
            pid=container.pid,
            start_ms=round((time.monotonic() - began) * 1000, 1),
            workspace=runtime.places(container.launch).workspace,
            owner=spec.owner,
            warm=warm,
            limits={} if runtime.name == "local-unsafe" else container.limits.to_json(),
        )

    @staticmethod
    async def _ask(container: Container, request: dict[str, Any]) -> None:
        """One request to the server inside, before the sandbox is anybody's."""
        try:
            await connection.exchange(container.address, request, SETUP_TIMEOUT_S)
        except SandboxRequestError:
            raise
        except SandboxError as error:
            message = f"sandbox {container.id} did not answer to {request['op']!r}: {error}"
            raise SandboxStartError(message) from error

    # -- end ----------------------------------------------

    async def release(self, sandbox_id: str, wait: bool = True) -> bool:
        """End a sandbox and remove all of it, before it returns if `wait`. False = there is none such."""
        if (container := self._all.get(sandbox_id)) is None:
            return False
        ending = sum(other.ending is not None for other in self._all.values())
        await asyncio.wait([self._end_soon(container)], timeout=None if wait or ending >= MOST_ENDING else 0)
        return True

    async def release_owner(self, owner: str) -> int:
        """End all sandboxes of that owner; returns how many."""
        return await self._release_all(c.id for c in self._all.values() if c.spec.owner == owner)

    async def close(self) -> None:
        """End everything and leave only the host's log and lock in the state directory."""
        await self.pool.close()
        while self._all:
            await self._release_all(list(self._all))
        self.equipment.close()
        for name in ("records", "scratch", "payload", "template"):
            await self._remove(trees.remove, self.state / name)

    def end_for(self, container: Container, reason: str, kind: str) -> None:
        """End it against its owner's will; :meth:`fate` says why for a while. `kind`: see :class:`Fate`."""
        if container.ending is None:
            log.warning("sandbox %s of %r %s", container.id, container.spec.owner, reason)
            self.counts[kind] += 1
            self._fates[container.id] = Fate(kind, reason)
            while len(self._fates) > FATES_KEPT:
                self._fates.popitem(last=False)
            self._end_soon(container)

    def fate(self, sandbox_id: str) -> Fate | None:
        """How a sandbox ended that nobody had released; None when that is not known."""
        return self._fates.get(sandbox_id)

    async def _release_all(self, ids: Iterable[str]) -> int:
        return sum(await asyncio.gather(*(self.release(sandbox_id) for sandbox_id in ids)))

    def _end_soon(self, container: Container) -> asyncio.Task:
        if container.ending is None:
            container.ending = asyncio.create_task(self._end(container))
        return container.ending

    async def _end(self, container: Container) -> None:
        try:
            await container.kill()
            await self._remove(self._remove_traces, container.id)
        finally:
            self.counts["released"] += 1
            self._all.pop(container.id, None)
            container.close()
            for lease in container.leases:
                lease.release()

    async def _remove(self, function: Callable[..., None], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._removing, function, *args)

    def _remove_traces(self, sandbox_id: str) -> None:
        trees.remove(self.state / sandbox_id)
        trees.remove(self.state / "scratch" / sandbox_id)
        self._records.remove(sandbox_id)

    # -- keeping order ----------------------------------------------

    def reap(self) -> None:
        """Notice ended processes; to be called at SIGCHLD. A sandbox that ended by itself is cleaned up."""
        for container in list(self._all.values()):
            if not container.exited.is_set() and container.is_over() and container.ready:
                code = container.process.returncode if container.process else "unknown"
                words = container.tail.text() if container.tail else ""
                words = f"; it said: {words}" if words else ""
                self.end_for(container, f"ended by itself (exit code {code}){words}", "died")

    async def janitor(self) -> None:
        """For ever: end what outlived its time, notice adopted ones that ended, keep the pool in order."""
        guarding: asyncio.Task | None = None
        while True:
            await asyncio.sleep(JANITOR_PERIOD_S)
            try:
                self.reap()
                for container in list(self._all.values()):
                    if container.deadline is not None and now() >= container.deadline:
                        self.end_for(
                            container, f"outlived its {container.spec.max_lifetime_s:g} s", "expired"
                        )
                self.pool.tidy()
                self.snapshots.tidy()
            except Exception:
                log.exception("the janitor stumbled")  # and looks after the others all the same
            if guarding is None or guarding.done():
                guarding = asyncio.create_task(self._guard_equipment())

    async def _guard_equipment(self) -> None:
        """In a thread: it may wait for locks, and have much to remove."""
        for guard in (self.equipment.tidy, self.equipment.images.cache.guard):
            try:
                await asyncio.to_thread(guard)
            except Exception:
                log.exception("what sandboxes are started with could not be guarded")

    def claimed(self) -> list[Container]:
        """Those that somebody works with."""
        return [c for c in self._all.values() if c.info is not None and c.ending is None]

    # -- across hosts ----------------------------------------------

    async def take_over(self) -> None:
        """Adopt the sandboxes that an earlier host left running, end and remove everything else of it."""
        self.snapshots.open()
        ended = []
        for record in self._records.all():
            if record.may_be_adopted():
                self._adopt(record)
            else:
                ended.append(record)
        await asyncio.gather(*map(self._sweep, ended))
        for path in [*self.state.iterdir(), *(self.state / "scratch").glob("*")]:
            # By the form of its name: never what somebody else keeps here.
            if path.is_dir() and SANDBOX_ID.fullmatch(path.name) and path.name not in self._all:
                await self._remove(trees.remove, path)
        if not self._all:
            for path in {*self._payload.parent.iterdir()} - {self._payload}:  # what earlier hosts staged
                await self._remove(trees.remove, path)

    def _adopt(self, record: Record) -> None:
        own_python = None
        with contextlib.suppress(ImageError):  # it runs already
            own_python = self.equipment.interpreter(runtime_of(record), Path(record.rootfs or "/"))
        container = Container.revive(record, self.state, self._payload, own_python)
        self._all[record.id] = container
        for usage in reversed(processes.usages(record.pid) if record.pid else []):
            if container.file_system is None:  # one that is open to us; the agent may have closed all
                container.see_memory(usage.pid)
        try:
            self.equipment.hold_images(container)
        except ImageError as error:  # evicted while no host held it; what is open of it goes on working
            log.error("the image of sandbox %s is not in the cache any more: %s", record.id, error)
        self.snapshots.recover(container)
        self.counts["adopted"] += 1
        log.warning("adopted sandbox %s of %r from an earlier host", record.id, container.spec.owner)

    async def _sweep(self, record: Record) -> None:
        count = await end_strays(record)
        log.warning("swept sandbox %s of an earlier host (%d processes)", record.id, count)
        self.counts["swept"] += 1
        await self._remove(self._remove_traces, record.id)

    # -- looking ----------------------------------------------

    def list(self) -> list[dict[str, Any]]:
        """All claimed sandboxes: their info and the seconds left to them."""
        return [c.info.to_json() | {"seconds_left": round(c.deadline - now(), 1)} for c in self.claimed()]

    def stats(self) -> dict[str, Any]:
        """Counts since the start of the host, and what is going on."""
        going_on = {
            "claimed": len(self.claimed()),
            "warm": self.pool.ready(),
            "known": len(self._all),
            "waiting": self._waiting,
            "parallel_starts": PARALLEL_STARTS,
        }
        return self.counts | self.snapshots.stats() | going_on

    def _write_record(self, container: Container) -> None:
        self._records.write(container.record(self._boot_id))
