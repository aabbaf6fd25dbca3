"""The image of a Harbor task: one that is here, or that is built here of a Dockerfile where that may be."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollout.image_names import is_below, is_path, local_name
from rollout.suites.harbor.config import EnvironmentConfig
from sandbox.errors import ImageError
from sandbox.images import ImageStore
from services.settings import settings
from workers.errors import TaskError
from workers.image_builds import build_for_task


async def image_of(environment: EnvironmentConfig, context: Path) -> str:
    """Name of the image of an `[environment]`, or of a `[verifier.environment]`.

    Args:
        context: Directory with the Dockerfile, for an environment that names no image.

    Raises:
        TaskError: It is not here, and may not or cannot be built.
    """
    if environment.docker_image is not None:
        image = local_name(environment.docker_image)
        # As the gateway refuses it in a request; else the worker would look at any place of its node.
        if is_path(image) and not is_below(image, settings().sandbox_image_roots):
            raise TaskError(
                f"environment.docker_image: {image!r} is a path; images have names here, or lie below "
                "ROLLOUT_SANDBOX_IMAGE_ROOTS"
            )
        try:
            await asyncio.to_thread(ImageStore().find, image)
        except ImageError as error:
            remedy = f"`rollout images build {image} docker://{environment.docker_image}`"
            raise TaskError(f"{error}; {remedy}, or of a tar of `docker save`") from error
        return image
    return await build_for_task(context, environment.build_timeout_sec)
