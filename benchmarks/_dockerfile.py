"""Building the image of a Dockerfile: a measure of `benchmarks.harbor`, with the time of a first build."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import harness
from sandbox.images import ImageStore
from sandbox.images.dockerfile import build

DOCKERFILE = """\
FROM base
ENV APP=/app
WORKDIR $APP
COPY . .
RUN python3 -m compileall -q $APP && useradd -m agent
RUN git init -q $APP && git -C $APP add -A
"""
FILES = 200
"""Of the context, of 2 kB each."""
CACHED = 10
"""Builds with nothing changed, for each first one."""


def builds(options: harness.Options, directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """`build_cached_ms`: a build when nothing has changed; beside it `build_first_s`, from nothing but the
    unpacked base image, the image's file included. Medians.
    """
    images, context = directory / "images", directory / "context"
    images.mkdir()
    context.mkdir()
    for file in range(FILES):
        (context / f"module_{file}.py").write_text(f"VALUE = {file}\n" * 150)
    (images / "base.sif").symlink_to(ImageStore().find("base"))
    first, cached = [], []
    with patch.dict("os.environ", {"ROLLOUT_IMAGES": str(images)}):
        (context / "Dockerfile").write_text(DOCKERFILE)
        for number in range(options.rounds):
            begun = time.perf_counter()
            build(context, f"bench-{number}", force=True)
            first.append(time.perf_counter() - begun)
            for _ in range(CACHED):
                begun = time.perf_counter()
                build(context, f"bench-{number}")
                cached.append(1000 * (time.perf_counter() - begun))
            (images / f"bench-{number}.sif").unlink()
    again, anew = harness.summary(cached), harness.summary(first)
    figures = {"build_first_s": anew, "build_cached_ms": again}
    return {name: figure["median"] for name, figure in figures.items()}, figures
