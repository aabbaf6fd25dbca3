"""Bundles on a node: each is fetched once, and unpacked into a directory that all workers of the node share.

Below the cache's directory lie TENANT/DIGEST, a tree that is complete from the moment it has this name and
whose time of change is its last use, and TENANT/DIGEST.bytes, what it takes. `keep` has a place of its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import structlog

from rollout.suites import SuiteError
from rollout.suites.bundles import DIGEST, Bundle, unpack
from sandbox.errors import SandboxError
from sandbox.paths import own_directory, rollout_home
from services.settings import Settings, settings
from services.state import keys
from services.state.bundles import KEEP_S, BundleStore
from services.state.redis import connect
from workers.errors import InfrastructureError, TaskError
from workers.patience import ask

log = structlog.get_logger("bundles")

KEPT = "_kept"
"""No tenant has this name."""
FETCHES = 2
"""That a worker does at once."""
IN_USE_S = 6 * 3600.0
"""After its last use a tree may still be read by a stage."""
OWN_IN_USE_S = 3600.0
"""The same, where its own tenant fills the whole cache: few bytes unpack to many."""


class BundleCache:
    """The unpacked bundles of this node; blocking."""

    def __init__(self, config: Settings) -> None:
        self.directory = Path(config.bundle_cache or rollout_home() / "bundles" / config.node)
        self._quota = config.bundle_cache_mb << 20
        self._redis = connect(config.redis_url, max_connections=4)
        self._store = BundleStore(self._redis, config)
        self._kept: set[str] = set()
        self._lock = threading.Lock()

    def keep(self, bundle: Bundle) -> Path:
        """Unpack a bundle for the rollouts of this process.

        Raises:
            SuiteError: It is no bundle.
            InfrastructureError: The directory cannot be written.
        """
        with self._lock:
            path = self._used(KEPT, bundle.digest) or self._unpack(KEPT, bundle.digest, bundle.content)
            self._kept.add(bundle.digest)
            return path

    def unpacked(self, digest: str, rollout_id: str) -> Path:
        """The tree of a bundle that the rollout's tenant has sent.

        Raises:
            TaskError: It is nowhere.
            InfrastructureError: The directory cannot be written.
            redis.RedisError: Redis is away.
        """
        with self._lock:  # a group's rollouts begin together, and one of them fetches
            if path := self.here(digest, rollout_id):
                return path
            tenant = self._redis.hget(keys.record(rollout_id), "tenant")
            if not tenant:
                raise _absent(digest)
            began = time.monotonic()
            content = self._store.fetch(tenant, digest)
            if content is None:
                raise _absent(digest)
            try:
                path = self._unpack(tenant, digest, content)
            except SuiteError as error:
                log.error("a bundle is damaged", rollout_id=rollout_id, digest=digest, error=str(error))
                raise _absent(digest) from error
            ms = round(1000 * (time.monotonic() - began))
            log.info("bundle unpacked", rollout_id=rollout_id, digest=digest, bytes=len(content), ms=ms)
            return path

    def here(self, digest: str, rollout_id: str) -> Path | None:
        """The tree, if this node has it for the rollout's tenant. Raises as `unpacked`."""
        if not DIGEST.fullmatch(digest):
            raise TaskError(f"{digest!r} is no digest of a bundle")
        if digest in self._kept and (path := self._used(KEPT, digest)):
            return path
        tenant = self._redis.hget(keys.record(rollout_id), "tenant")
        return self._used(tenant, digest) if tenant else None

    def _used(self, tenant: str, digest: str) -> Path | None:
        """The tree, if it is here whole; it counts as used now."""
        path = self.directory / tenant / digest
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def _unpack(self, tenant: str, digest: str, content: bytes) -> Path:
        path = self.directory / tenant / digest
        part = path.with_name(f".{digest}.{secrets.token_hex(8)}")
        try:
            own_directory(self.directory, 0o700)
            path.parent.mkdir(exist_ok=True)
            unpack(content, digest, part)
            size = sum(found.lstat().st_blocks * 512 for found in part.rglob("*"))
            self._make_room(tenant, size)
            _note(path).write_text(str(size))
            try:
                part.rename(path)
            except OSError:
                if not path.is_dir():  # else another process was quicker
                    raise
        except (OSError, SandboxError) as error:
            raise InfrastructureError(f"bundle {digest} cannot be unpacked: {error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return path

    def _make_room(self, tenant: str, size: int) -> None:
        """Remove what was used longest ago, and what killed processes have left.

        Raises:
            InfrastructureError: The tenant's own trees fill the cache, and all were used lately.
        """
        now, trees = time.time(), []
        for path in self.directory.glob("*/*"):
            with suppress(OSError, ValueError):
                used = path.stat().st_mtime
                if path.name.startswith(".") and now - used > IN_USE_S:
                    shutil.rmtree(path, ignore_errors=True)
                elif DIGEST.fullmatch(path.name):
                    trees.append((used, int(_note(path).read_text()), path))
        if tenant != KEPT:
            own = sorted(tree for tree in trees if tree[2].parent.name == tenant)
            over = sum(taken for _, taken, _ in own) + size - self._quota
            for tree in own:
                if over > 0 and now - tree[0] > OWN_IN_USE_S:
                    _remove(tree[2])
                    trees.remove(tree)
                    over -= tree[1]
            if over > 0:
                raise InfrastructureError(
                    f"tenant {tenant!r} has unpacked more bundles in an hour than ROLLOUT_BUNDLE_CACHE_MB "
                    f"({self._quota >> 20}) holds: raise it, or put what is large into images"
                )
        rest = sum(taken for _, taken, _ in trees) + size - self._quota
        for used, taken, path in sorted(trees):
            if rest <= 0 or now - used < IN_USE_S:
                break
            _remove(path)
            rest -= taken
        if rest > 0:
            log.warning("bundles in use take more than ROLLOUT_BUNDLE_CACHE_MB", over=rest)


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.bytes")


def _remove(path: Path) -> None:
    """Take a tree away at once, whoever looks."""
    gone = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(OSError):
        path.rename(gone)
        _note(path).unlink(missing_ok=True)
        shutil.rmtree(gone, ignore_errors=True)


def _absent(digest: str) -> TaskError:
    days = KEEP_S // 86400
    return TaskError(
        f"bundle {digest} is neither on this node nor in Redis, which keeps one for {days} days after its "
        "last use: send it again, with `rollout submit` or client.put_bundle"
    )


@lru_cache(maxsize=1)
def _cache() -> BundleCache:
    return BundleCache(settings())


async def unpacked(digest: str, rollout_id: str) -> Path:
    """The directory of a bundle on this node; read it, and do not write. Ask for it again in each stage.

    Raises:
        TaskError: The rollout's tenant has sent no such bundle, or it is kept no more.
        InfrastructureError: The node has no room for it, or Redis is away.
    """
    path = await ask(_cache().here, digest, rollout_id)
    if path is None:
        # Few at once: all others of a group would wait on threads, and these are those of all that use Redis.
        async with _turns():
            path = await ask(_cache().unpacked, digest, rollout_id)
    return path


_waiting: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def _turns() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _waiting:
        _waiting.clear()  # a loop has ended, or there was none
        _waiting[loop] = asyncio.Semaphore(FETCHES)
    return _waiting[loop]


def keep(bundle: Bundle) -> Path:
    """Have a bundle here without a service: for rollouts that run in this process. Raises as the cache."""
    return _cache().keep(bundle)
