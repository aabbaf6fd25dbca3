"""Building the image of a Dockerfile, for `benchmarks.harbor`: first, and again with nothing changed."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

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


def measure(rounds: int) -> Mapping[str, float]:
    """`build_first_s`: from nothing but the unpacked base image, file included; `build_cached_ms`: the
    same call when nothing has changed, the median of ten a round.
    """
    directory = Path(tempfile.mkdtemp(prefix="bench-dockerfile-", dir="/tmp"))
    directory.chmod(0o755)
    first: list[float] = []
    cached: list[float] = []
    try:
        for number in range(rounds):
            for name in ("images", "context"):
                (directory / f"{name}{number}").mkdir()
            base = ImageStore().find("base")
            (directory / f"images{number}/base.sif").symlink_to(base)
            context = directory / f"context{number}"
            (context / "Dockerfile").write_text(DOCKERFILE)
            for file in range(FILES):
                (context / f"module_{file}.py").write_text(f"VALUE = {file}\n" * 150)
            environment = {
                "ROLLOUT_IMAGES": str(directory / f"images{number}"),
                "ROLLOUT_IMAGE_CACHE": str(directory / "cache"),
            }
            with patch.dict("os.environ", environment):
                if number == 0:
                    (context / "Dockerfile").write_text("FROM base\n")
                    build(context, "unpacked")  # so that the base image lies unpacked in the cache
                    (context / "Dockerfile").write_text(DOCKERFILE)
                begun = time.perf_counter()
                build(context, f"bench-{number}", force=True)
                first.append(time.perf_counter() - begun)
                for _ in range(10):
                    begun = time.perf_counter()
                    build(context, f"bench-{number}")
                    cached.append(1000 * (time.perf_counter() - begun))
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", directory], check=False, capture_output=True)
        shutil.rmtree(directory, ignore_errors=True)
    return {"build_first_s": statistics.median(first), "build_cached_ms": statistics.median(cached)}


if __name__ == "__main__":
    print(measure(1))
