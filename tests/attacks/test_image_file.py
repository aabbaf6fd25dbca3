"""An image file that an agent could have written: what is unpacked was hashed, and not by root's hands.

The control does as the code before did.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox import paths, trees
from sandbox.errors import SandboxError
from sandbox.images import ImageStore, squashfs
from sandbox.images.store import ImagePolicy
from tests.attacks import attack
from tests.attacks.conftest import CONTROL
from tests.helpers.sandboxes import new_state

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="about what root does")


@dataclass
class Unpacking:
    """A cache of images, and a place where image files lie."""

    control: bool
    ground: Path
    place: str = "service"

    @property
    def store(self) -> ImageStore:
        policy = None if self.control else ImagePolicy(roots=(self.ground,))
        return ImageStore(self.ground / "cache", policy=policy)

    def image(self, name: str, *options: str) -> Path:
        """An image whose file `/usr/said` holds its name."""
        tree, file = self.ground / f"{name}-tree", self.ground / f"{name}.sif"
        (tree / "usr").mkdir(parents=True)
        (tree / "usr/said").write_text(name)
        program = shutil.which("mksquashfs", path=paths.tool_path())
        command = [program, tree, file, "-quiet", "-no-progress", "-all-root", *options]
        subprocess.run(command, check=True, capture_output=True)
        file.chmod(0o644)
        return file


@pytest.fixture(params=["service", CONTROL])
def target(request) -> Iterator[Unpacking]:
    ground = new_state()
    ground.chmod(0o755)
    yield Unpacking(request.param == CONTROL, ground)
    trees.remove(ground)


@attack(stopped_by="hash and content are read from one open file")
def test_have_another_image_s_content_cached_under_a_trusted_image_s_hash(target, monkeypatch) -> bool:
    """By another file under the name, between the hash and the unpacking; then the first one is put back."""
    trusted, hostile = target.image("trusted"), target.image("hostile")
    store, aside = target.store, target.ground / "aside.sif"
    whole_size = squashfs.unpacked_bytes

    def swap(path: Path, *rest: object) -> int:
        trusted.rename(aside)
        hostile.rename(trusted)
        return whole_size(aside)

    monkeypatch.setattr(squashfs, "unpacked_bytes", swap)
    if target.control:
        store.cache.make()
        key = store.content_hash(trusted)
        need = squashfs.unpacked_bytes(trusted)
        store.cache.fill(key, trusted, need, lambda tree, lock: squashfs.unpack(trusted, tree, lock))
    else:
        with contextlib.suppress(SandboxError):
            store.rootfs(str(trusted))
        key = store.content_hash(aside)
    file = store.cache.tree(key) / "usr/said"
    return file.exists() and file.read_text() == "hostile"


@needs_root
@attack(stopped_by="the sandboxes' user unpacks, not root")
def test_have_root_make_a_program_that_makes_root_of_whoever_runs_it(target) -> bool:
    image = target.image("setuid", "-action", "chmod(u+s)@name(said)")
    user = paths.sandbox_user()
    if target.control:
        squashfs.unpack(image, tree := target.ground / "tree")
    else:
        tree = target.store.rootfs(str(image), user)
    info = (tree / "usr/said").stat()
    return info.st_uid == 0 and bool(info.st_mode & 0o4000)


@needs_root
@attack(stopped_by="a file of the sandboxes' user is no image for root")
def test_have_root_unpack_a_file_that_a_sandbox_owns(target) -> bool:
    image = target.image("own")
    os.chown(image, paths.sandbox_user(), paths.sandbox_user())
    return _unpacks(target, image)


@attack(stopped_by="what everybody may write to is no image")
def test_have_a_file_unpacked_that_everybody_may_write_to(target) -> bool:
    image = target.image("open")
    image.chmod(0o666)
    return _unpacks(target, image)


def _unpacks(target: Unpacking, image: Path) -> bool:
    try:
        tree = target.store.rootfs(str(image), paths.sandbox_user())
    except SandboxError:
        return False
    return (tree / "usr/said").exists()
