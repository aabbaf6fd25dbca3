"""The image of a Harbor task: one that is here, or that is built here of a Dockerfile where that may be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from weakref import WeakValueDictionary

from rollout.image_names import local_name
from rollout.suites.harbor.config import EnvironmentConfig
from sandbox.errors import ImageError
from sandbox.images import ImageStore
from sandbox.images.dockerfile import image_name
from services.settings import settings
from workers.errors import TaskError

_building: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""Rollouts of a group want the same image at once; one of them builds it."""


async def image_of(environment: EnvironmentConfig, context: Path) -> str:
    """Name of the image of an `[environment]`, or of a `[verifier.environment]`.

    Args:
        context: Directory with the Dockerfile, for an environment that names no image.

    Raises:
        TaskError: It is not here, and may not or cannot be built.
    """
    if environment.docker_image is not None:
        image = local_name(environment.docker_image)
        try:
            await asyncio.to_thread(ImageStore().find, image)
        except ImageError as error:
            remedy = f"`rollout images build {image} docker://{environment.docker_image}`"
            raise TaskError(f"{error}; {remedy}, or of a tar of `docker save`") from error
        return image
    try:
        image = await asyncio.to_thread(image_name, context)
        lock = _building.setdefault(image, asyncio.Lock())
        async with lock:
            await asyncio.to_thread(_find_or_build, image, context, environment.build_timeout_sec)
    except ImageError as error:
        raise TaskError(f"environment: {error}") from error
    return image


def _find_or_build(image: str, context: Path, timeout_s: float) -> None:
    try:
        ImageStore().find(image)
    except ImageError as error:
        builds = settings().image_builds
        if builds == "off":
            remedy = "`rollout tasks import PATH` builds it; ROLLOUT_IMAGE_BUILDS lets workers do so"
            raise TaskError(f"{error}; {remedy}") from error
        from sandbox.images.dockerfile import build

        build(context, image, network=builds == "network", timeout=timeout_s)
