"""Dockerfiles of tasks: built from the command line, for a tree of tasks, and in INIT where permitted."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollout import cli
from sandbox import image_commands, paths, processes
from sandbox.images import image_config
from sandbox.images.dockerfile import image_name
from services.settings import settings
from tests.helpers.sandboxes import small_image
from tests.sandbox.test_images import docker_archive
from workers.errors import TaskError
from workers.image_builds import BUILD_SECONDS, build_for_task

MARK = "rollout-init-build-test"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Images and cache of one's own, with one image that has a shell."""
    directory = Path(tempfile.mkdtemp(prefix="imgb-", dir="/tmp"))
    directory.chmod(0o755)
    monkeypatch.setenv("ROLLOUT_IMAGES", str(directory / "images"))
    monkeypatch.setenv("ROLLOUT_IMAGE_CACHE", str(directory / "cache"))
    monkeypatch.setenv("TMPDIR", str(directory / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (directory / "tmp").mkdir()
    (directory / "tmp").chmod(0o1777)
    small_image(directory / "images/small", paths.sandbox_user() or os.getuid())
    settings.cache_clear()
    yield directory
    settings.cache_clear()
    subprocess.run(["chmod", "-R", "u+rwx", directory], check=False, capture_output=True)
    shutil.rmtree(directory, ignore_errors=True)


def environment(home: Path, task: str, dockerfile: str) -> Path:
    directory = home / "tasks" / task / "environment"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "Dockerfile").write_text(dockerfile)
    return directory


def images(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["images", *map(str, arguments)])


def allow(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ROLLOUT_IMAGE_BUILDS", value)
    settings.cache_clear()


def running() -> list[int]:
    found = []
    for pid in processes.all_pids():
        try:
            if MARK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_the_command_builds_a_dockerfile_and_leaves_what_has_not_changed(home):
    directory = environment(home, "one", "FROM small\nARG WHO=nobody\nRUN touch /usr/$WHO\nWORKDIR /app\n")
    result = images("build", "mine", directory, "--build-arg", "WHO=me")
    assert result.exit_code == 0, result.output
    image = home / "images/mine.sif"
    assert image_config(image).workdir == "/app"
    listed = subprocess.run(["unsquashfs", "-l", image], capture_output=True, text=True, check=True).stdout
    assert "squashfs-root/usr/me" in listed
    before = image.stat().st_mtime_ns
    again = images("build", "mine", directory / "Dockerfile", "--build-arg", "WHO=me")
    assert "built of the same already" in again.output and image.stat().st_mtime_ns == before
    other = images("build", "mine", directory)
    assert other.exit_code == 1 and "--force" in other.output
    assert images("build", "mine", directory, "--force", "-q").exit_code == 0
    assert "for Dockerfiles" in images("build", "x", home / "images/small", "--network").output
    assert images("build", "bad", environment(home, "bad", "FROM small\nONBUILD RUN x\n")).exit_code == 1
    details = images("inspect", "mine", "--json")
    assert details.exit_code == 0, details.output


def test_an_archive_of_docker_beside_a_dockerfile_becomes_the_image_that_it_starts_from(home):
    directory = environment(home, "one", "FROM other:1 AS start\nRUN echo $COLOUR in $PWD\nFROM start\n")
    docker_archive(home, home / "images/small").rename(directory / "other-1.tar")
    result = images("build", "mine", directory)
    assert result.exit_code == 0, result.output
    assert "blue in /app" in result.output.splitlines()
    own, other = image_config(home / "images/mine.sif"), image_config(home / "images/other-1.sif")
    assert (own.env, own.workdir, own.shell) == (other.env, "/app", ("/bin/dash", "-c"))


def test_all_environments_of_a_tree_of_tasks_are_built_once(home, monkeypatch):
    readers = {
        "harbor": "workers.handlers.harbor.needs:images_of",
        "swe": "workers.handlers.swe.images:images_of",
    }
    points = [EntryPoint(name, place, "") for name, place in readers.items()]
    monkeypatch.setattr(image_commands, "entry_points", lambda group: points)
    first = environment(home, "a", "FROM small\nRUN touch /usr/a\n")
    second = environment(home, "b", "FROM small\n# as the other\nRUN touch /usr/a\n")
    for task in (first.parent, second.parent):
        (task / "task.toml").write_text('schema_version = "1.4"\n')
        (task / "instruction.md").write_text("Do it.\n")
        (task / "tests").mkdir()
        (task / "tests/test.sh").write_text("true\n")
    result = images("build", "--dataset", home / "tasks", "-q")
    assert result.exit_code == 0, result.output
    assert "1 built, 0 there already, 0 failed" in result.output
    assert (home / "images" / f"{image_name(second)}.sif").is_file()


def test_a_missing_image_is_built_in_init_if_the_deployment_permits(home, monkeypatch):
    asyncio.run(_built_if_permitted(home, monkeypatch))


async def _built_if_permitted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = environment(home, "one", "FROM small\nRUN touch /usr/one\n")
    with pytest.raises(TaskError, match=r"ROLLOUT_IMAGE_BUILDS=offline"):
        await build_for_task(directory)
    allow(monkeypatch, "offline")
    names = await asyncio.gather(*(build_for_task(directory) for _ in range(3)))
    assert set(names) == {image_name(directory)}
    assert (home / "images" / f"{names[0]}.sif").is_file()
    with pytest.raises(TaskError, match=r"Dockerfile:1: FROM: there is no image 'gone'"):
        await build_for_task(environment(home, "gone", "FROM gone\n"))
    with pytest.raises(TaskError, match=r"Dockerfile:2: RUN: it ended with status 3; it said: why"):
        await build_for_task(environment(home, "bad", "FROM small\nRUN echo why; exit 3\n"))
    (counted,) = BUILD_SECONDS.collect()
    outcomes = {s.labels["outcome"]: s.value for s in counted.samples if s.name.endswith("_count")}
    assert outcomes == {"built": 1.0, "failed": 2.0}


def test_a_build_in_init_blocks_nobody_waits_its_turn_and_ends_when_it_is_cancelled(home, monkeypatch):
    asyncio.run(_cancelled(home, monkeypatch))


async def _cancelled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, "offline")
    slow = environment(home, "slow", f"FROM small\nRUN : {MARK}; read x < /dev/zero\n")
    building = asyncio.create_task(build_for_task(slow))
    deadline = time.monotonic() + 30
    while not running() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert running()
    waiting = environment(home, "waiting", "FROM small\nRUN touch /usr/waiting\n")
    with pytest.raises(TaskError, match=r"took longer than 0\.5 s"):
        await build_for_task(waiting, timeout_s=0.5)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    while running() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not running()
    assert await build_for_task(waiting) == image_name(waiting)
