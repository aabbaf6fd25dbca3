"""What a node has to start sandboxes with, runtimes and images, and what of it a request gets."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from sandbox import binds, paths, payload
from sandbox.config import HostConfig
from sandbox.container import Container
from sandbox.errors import ImageError, NotAllowed, SandboxRequestError
from sandbox.images import ImageStore
from sandbox.images.store import ImagePolicy
from sandbox.pool import Kind
from sandbox.runtimes import AUTO, RUNTIMES, Runtime, select_runtime
from sandbox.spec import SandboxSpec

UNPACKING_THREADS = 16  # most of them wait for the lock of an image that another one unpacks
HOST_ROOT_NOTE = "files (no image here: the machine's own /usr is visible read-only)"
SOFT_LIMITS_NOTE = "hard memory and CPU limits (no cgroup of its own: rlimits and a watchdog serve)"
SOFT_CPU_NOTE = "hard CPU limit (its processes are nice)"
ROOT_LIMITS_NOTE = "process limit (the machine's root is exempt from it)"


class Equipment:
    """That of one host. Used from its event loop."""

    def __init__(self, state: Path, config: HostConfig) -> None:
        self._state = state
        self._config = config
        closed = (state, paths.image_cache(), paths.snapshot_dir() or state, *config.closed)
        self._closed = tuple(place.resolve() for place in closed)
        writable = tuple(place.path for place in config.binds if place.writable)
        self.images = ImageStore(policy=ImagePolicy(config.image_roots, self._closed, writable))
        self._runtimes: dict[str, Runtime] = {}
        self._interpreters: dict[Path, Path] = {}
        self._probing = asyncio.Lock()
        # Threads of their own, so that what takes long delays nothing but its like.
        self._unpacking = ThreadPoolExecutor(UNPACKING_THREADS, "unpacking")

    async def kind_of(self, spec: SandboxSpec) -> tuple[Kind, Runtime]:
        """Resolve and check a request; equal kinds can serve each other's requests."""
        if spec.network not in self._config.networks:
            choice = " or ".join(self._config.networks)
            raise SandboxRequestError(f"network {spec.network!r} is not given on this node; choose {choice}")
        if not 0 < spec.max_lifetime_s < float("inf"):
            raise SandboxRequestError(f"max_lifetime_s={spec.max_lifetime_s} must be above 0 and finite")
        limits = self._config.limits(spec.limits)
        self._check_runtime(spec.runtime)
        bound = binds.check(spec.binds, self._config.binds, self._closed)
        runtime = await self.runtime(spec.runtime)
        if bound and runtime.name == "local-unsafe":
            raise SandboxRequestError("binds need a container; local-unsafe has none")
        roots = await asyncio.get_running_loop().run_in_executor(
            self._unpacking, self._roots, spec.image, runtime
        )
        return Kind(spec.image, spec.runtime, *roots, spec.network, limits, bound, spec.ipython), runtime

    def _check_runtime(self, name: str) -> None:
        """Which runtimes there are is the deployment's choice. Raises NotAllowed."""
        allowed = self._config.runtimes
        known = name in RUNTIMES or name == "auto"
        if not known or name in allowed or (name == "auto" and set(AUTO) & set(allowed)):
            return
        raise NotAllowed(
            f"runtime {name!r} is not among ROLLOUT_SANDBOX_RUNTIMES={','.join(allowed)} of this node; set "
            "it where the sandbox host starts (`rollout sandbox-host stop` ends the one that runs)"
        )

    @staticmethod
    def missing(container: Container) -> list[str]:
        """What this node does not enforce for it, in words."""
        runtime = container.runtime
        missing = list(runtime.missing_isolation)
        if container.launch.network == "host" and "network" not in missing:
            missing.append("network")
        if container.launch.rootfs is None and runtime.needs_image:
            missing.append(HOST_ROOT_NOTE)
        if runtime.needs_image:
            missing.append(SOFT_CPU_NOTE if runtime.has_cgroups else SOFT_LIMITS_NOTE)
            if runtime.run_as is None and os.geteuid() == 0:
                missing.append(ROOT_LIMITS_NOTE)
        return missing

    async def runtime(self, name: str) -> Runtime:
        """Probed once in the life of the host, with the base image and never with a task's."""
        async with self._probing:
            if name not in self._runtimes:
                auto = [name for name in AUTO if name in self._config.runtimes]
                self._runtimes[name] = await asyncio.to_thread(
                    select_runtime, name, partial(self._rootfs, "base"), self._state, auto
                )
            return self._runtimes[name]

    def _rootfs(self, image: str, runtime: Runtime) -> Path | None:
        if not runtime.needs_image:
            return None
        try:
            return self.images.rootfs(image, runtime.run_as)
        except ImageError:
            if runtime.name == "bubblewrap" and image == "base":
                return None
            raise

    def _roots(self, image: str, runtime: Runtime) -> tuple[Path | None, Path | None]:
        rootfs = self._rootfs(image, runtime)
        return rootfs, self.interpreter(runtime, rootfs, rootfs if image == "base" else None)

    def interpreter(self, runtime: Runtime, rootfs: Path | None, base: Path | None = None) -> Path | None:
        """Our own Python for the server, from the base image (`base`, where that is known to be it); None
        where the machine's `usr` is shown.

        Raises ImageError where there is none: a task's image never takes its place.
        """
        if not runtime.needs_image or rootfs is None:
            return None
        base = base or self.images.rootfs("base", runtime.run_as)
        interpreter = self._interpreters.get(base)
        if interpreter is None or not os.path.exists(f"{interpreter}/bin/python3"):  # noqa: PTH110
            interpreter = payload.find_interpreter(base)
        if interpreter is None:
            raise ImageError(
                f"image 'base' ({base}) has no Python that could run the server; run deploy/setup/image.sh"
            )
        self._interpreters[base] = interpreter
        return interpreter

    def hold_images(self, container: Container) -> None:
        """Keep the images it runs from in the cache; the base image is among them for its interpreter."""
        roots = {container.launch.rootfs}
        if container.launch.interpreter is not None:
            roots.add(container.launch.interpreter.parent)
        for root in filter(None, roots):
            container.leases.append(self.images.hold(root))

    def tidy(self) -> None:
        """Let nothing stay of what has ended. Blocks."""
        for runtime in list(self._runtimes.values()):
            runtime.tidy()

    def close(self) -> None:
        """Let go of what the runtimes keep ready."""
        for runtime in self._runtimes.values():
            runtime.close()
