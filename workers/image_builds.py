"""The image of a task's Dockerfile, built in INIT where the deployment permits that."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path

import structlog
from prometheus_client import Histogram

from sandbox import paths
from sandbox.errors import ImageError
from sandbox.images import ImageStore
from sandbox.images.dockerfile import build, image_name
from sandbox.images.dockerfile.steps import Watch
from services.settings import settings
from workers.errors import TaskError

log = structlog.get_logger("image_builds")

BUILD_SECONDS = Histogram(
    "rollout_worker_image_build_seconds",
    "Builds of images of tasks' Dockerfiles, from the node's turn on.",
    ["outcome"],
    buckets=(0.1, 1, 10, 60, 300, 1800),
    registry=None,
)


async def build_for_task(context: Path, timeout_s: float = 600.0) -> str:
    """The name of the image of the Dockerfile in a directory, built first where it is missing.

    A node builds one at a time. Cancelling ends the build and all its processes.

    Args:
        context: The directory; it is not to change meanwhile.
        timeout_s: Seconds for the build, waiting for its turn included.

    Raises:
        TaskError: It is missing and cannot be built, or the deployment does not permit builds.
    """
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(_build, context, timeout_s, cancelled)
    except ImageError as error:
        raise TaskError(f"environment: {error}") from error
    finally:
        cancelled.set()  # the thread ends what it has begun


def _build(context: Path, timeout_s: float, cancelled: threading.Event) -> str:
    name = image_name(context)
    store = ImageStore()
    try:
        store.find(name)
        return name
    except ImageError as error:
        permitted = settings().image_builds
        if permitted == "off":
            raise TaskError(
                f"{error}; `rollout tasks import PATH` builds it, or `rollout images build {name} "
                f"{context}`; with ROLLOUT_IMAGE_BUILDS=offline workers do so"
            ) from error
    watch = Watch(timeout_s, cancelled.is_set)
    store.cache.make()
    with watch.turn(paths.image_cache() / "builds.turn"):
        begun, outcome = time.monotonic(), "failed"
        with suppress(ImageError):  # another rollout of its group has had it built
            store.find(name)
            return name
        try:
            build(
                context,
                network=permitted == "network",
                output=lambda line: log.debug(line, image=name),
                timeout=watch.left,
                cancelled=cancelled.is_set,
            )
            outcome = "built"
        finally:
            seconds = time.monotonic() - begun
            BUILD_SECONDS.labels(outcome).observe(seconds)
            log.info(f"image of a Dockerfile {outcome} in {seconds:.1f} s", image=name, seconds=seconds)
    return name
