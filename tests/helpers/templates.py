"""A node's template of sandboxes, and what it takes to look at it."""

from __future__ import annotations

import marshal
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import paths, payload, processes, trees
from sandbox.images import ImageStore
from sandbox.runtimes import Launch, template
from sandbox.runtimes.apptainer import Apptainer
from sandbox.runtimes.template import Clone
from tests.helpers.sandboxes import new_state, small_image
from tests.helpers.stack import wait_until

CONFIG = marshal.dumps({"walls": True, "binds": []}, 2)
END_S = 20.0


def processes_of(state: Path) -> list[int]:
    """The templates that belong to a host's directory, and their clones."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if re.match(rb"/proc/self/fd/\d+/lib/", command[0]) and f"{state}/".encode() in command:
                pids.append(int(entry.name))
    return pids


def template_of(state: Path) -> int:
    (pid,) = [pid for pid in processes_of(state) if not processes.is_init(pid)]
    return pid


class Node:
    """What starts containers on a node, with a payload of its own that a test may change."""

    def __init__(self, state: Path) -> None:
        state.chmod(0o711)
        self.runtime = Apptainer()
        self.runtime.run_as = paths.sandbox_user()
        self.rootfs = ImageStore().rootfs("base", self.runtime.run_as)
        self.payload = payload.stage(state)
        self.state, self._number = state, 0
        self.images: list[Path] = []

    def change(self, old: str, new: str) -> None:
        """Have the template do something else."""
        program = self.payload / "template.py"
        text = program.read_text()
        assert old in text
        program.write_text(text.replace(old, new))

    def image(self) -> Path:
        """An image in the cache with nothing but a shell and a few programs."""
        place = Path(tempfile.mkdtemp(prefix="of-a-test-", dir=self.rootfs.parent))
        self.images.append(place)
        place.chmod(0o755)
        return self.own(small_image(place, os.getuid()))

    def own(self, image: Path) -> Path:
        """Give all of it to the sandboxes' user."""
        owner = os.getuid() if self.runtime.run_as is None else self.runtime.run_as
        subprocess.run(["chown", "-hR", f"{owner}:{owner}", image], check=True)
        return image

    def launch(self, rootfs: Path | None = None) -> Launch:
        """One that would wait for its listening socket."""
        self._number += 1
        launch = Launch(
            f"{self._number:08x}",
            self.state,
            self.payload,
            rootfs or self.rootfs,
            interpreter=self.rootfs / "usr",
        )
        launch.make_directories(self.runtime.run_as)
        return launch

    def clone(self, launch: Launch | None = None) -> tuple[Clone, socket.socket]:
        """A process that waits for its listening socket, and the socket over which it would come."""
        launch = launch or self.launch()
        template = self.runtime._template_of(launch)
        assert template is not None
        return template.clone(self.runtime._request(launch, CONFIG))


def fresh_node(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Node]:
    """A fixture: nothing may be left of it, zombies included. With the parameter "1" the kernel seems to let
    Apptainer alone make user namespaces.
    """
    (tmp_path / "restricted").write_text(f"{getattr(request, 'param', 0)}\n")
    monkeypatch.setattr(template, "RESTRICTED", tmp_path / "restricted")
    before = set(processes.children(os.getpid()))
    state = new_state()
    node = Node(state)

    def is_clean() -> bool:
        node.runtime.tidy()
        return not processes_of(state) and set(processes.children(os.getpid())) <= before

    try:
        yield node
        node.runtime.close()
        wait_until(is_clean, END_S, "the end of all")
    finally:
        for place in (state, *node.images):
            trees.remove(place)


def ends(process: Clone) -> bool:
    wait_until(lambda: process.poll() is not None, END_S, "its end")
    process.stdout.close()
    process.stderr.close()
    return True


def mounts_of(pid: int) -> list[tuple[str, str]]:
    """Where something is mounted inside, and the number of that mount."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [(line.split()[4], line.split()[0]) for line in lines]


def places_of(process: Clone) -> list[str]:
    """Where something is mounted inside."""
    return [place for place, _ in mounts_of(process.pid)]


def trees_of(pid: int) -> list[str]:
    """The numbers of the mounts from which it has directories open."""
    open_files = [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_dir()]
    notes = [Path(f"/proc/{pid}/fdinfo/{path.name}").read_text() for path in open_files]
    return sorted(note.partition("mnt_id:")[2].split()[0] for note in notes)
