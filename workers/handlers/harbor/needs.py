"""Which images the tasks of a suite need, for `rollout images build --dataset` and `rollout plan`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollout.image_names import local_name
from rollout.suites import SuiteError
from rollout.suites.harbor.dataset import sources
from rollout.suites.harbor.directory import TaskDirectory, load
from sandbox.errors import ImageError
from sandbox.images.dockerfile import image_name


def images_of(dataset: Path) -> Iterator[tuple[str, str]]:
    """Name and source of each image, verifiers' own included; a source is a reference or a directory.

    Raises:
        ImageError: A task cannot be read, or its Dockerfile not be built.
    """
    seen: set[str] = set()
    try:
        for source in sources(dataset):
            for image, context in _environments(load(source.path)):
                name = local_name(image) if image else image_name(context)
                if name not in seen:
                    seen.add(name)
                    yield name, (image if "://" in image else f"docker://{image}") if image else str(context)
    except SuiteError as error:
        raise ImageError(str(error)) from error


def _environments(task: TaskDirectory) -> Iterator[tuple[str | None, Path]]:
    yield task.config.environment.docker_image, task.environment
    for step in task.steps:
        own = step.verifier.environment
        if step.verifier.separate and own is not None and own.docker_image:
            yield own.docker_image, task.environment
        elif tests := task.tests_with_dockerfile(step):
            yield None, tests
