"""What is mounted inside stays what it is and where it is: our own code, and what a request has bound."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox import paths
from sandbox.client import TRUSTED_PYTHON
from sandbox.config import HostConfig
from sandbox.containers import Containers
from sandbox.errors import SandboxStartError
from sandbox.runtimes import apptainer
from sandbox.spec import BindSpec, SandboxSpec
from tests.attacks import attack
from tests.attacks.conftest import CONTROL, PATIENCE_S
from tests.attacks.test_image import PYTHON
from tests.helpers.blocking import SyncSandboxClient
from tests.helpers.sandboxes import leftovers, new_state
from tests.sandbox.conftest import why_not

FORGED = "an agent wrote this"


@dataclass
class Node:
    """A host in this process, and a place of its that may be bound."""

    place: str
    control: bool
    runtime: str
    containers: Containers
    allowed: Path
    shown: str
    """Where it is seen inside."""
    before_the_mount: Callable[[], None] = lambda: None
    """Called once a request was checked, before anything is mounted."""

    def says(
        self, command: str, use: Callable[[SyncSandboxClient], str] | None = None, image: str = "base"
    ) -> str:
        """What a command says in a sandbox that shows the place; what `use` then says."""
        bind = BindSpec(str(self.allowed / "data"), self.shown)
        spec = SandboxSpec(image=image, runtime=self.runtime, binds=(bind,))

        def work(socket: str) -> str:
            with SyncSandboxClient(socket) as client:
                output = client.bash(command, PATIENCE_S).output
                return use(client) if use else output

        async def scenario() -> str:
            try:
                info = await self.containers.start(spec)
                return await asyncio.to_thread(work, info.socket)
            finally:
                await self.containers.close()

        return asyncio.run(scenario())


@pytest.fixture(params=["apptainer", "bubblewrap", CONTROL])
def target(request, monkeypatch) -> Iterator[Node]:
    """The control: mounted below a directory that is no mount, and nothing remembered of what was checked."""
    control = request.param == CONTROL
    runtime = "apptainer" if control else request.param
    if reason := why_not(runtime):
        pytest.skip(reason)
    state, ground = new_state(), new_state()
    for path, mode in ((state, 0o711), (ground, 0o755)):
        path.chmod(mode)
    monkeypatch.setenv("ROLLOUT_SANDBOX_BINDS", f"{ground / 'allowed'}:ro")
    monkeypatch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(ground / "images"))
    monkeypatch.setenv("ROLLOUT_SANDBOX_WARM", "0")
    for name in ("allowed/data", "secret"):
        (ground / name).mkdir(parents=True)
    (ground / "secret" / "said").write_text(FORGED)
    containers = Containers(state, HostConfig.from_environment())
    shown = "/above/bound" if control else "/bound"
    node = Node(request.param, control, runtime, containers, ground / "allowed", shown)
    prepare = containers._prepare

    def prepare_late(kind, *rest):
        node.before_the_mount()
        if control:
            binds = tuple(dataclasses.replace(bind, identity=None) for bind in kind.binds)
            kind = dataclasses.replace(kind, binds=binds)
        return prepare(kind, *rest)

    monkeypatch.setattr(containers, "_prepare", prepare_late)
    yield node
    assert leftovers(state) == []
    for path in (state, ground):
        shutil.rmtree(path)


@attack(stopped_by="it is mounted right below the root, which cannot be moved, nor can a mount")
def test_have_a_check_run_by_a_python_of_one_s_own(target) -> bool:
    tree = target.shown if target.control else "/sbx-python"
    loader = target.allowed / "data" / "ld-linux.so.2"
    loader.write_text("#!/bin/sh\n")
    loader.chmod(0o755)

    def check(client: SyncSandboxClient) -> str:
        program = [f"{tree}/{loader.name}"] if target.control else [TRUSTED_PYTHON]
        return client.exec([*program, "-c", "print(1)"]).stdout

    move = f"""cd /
    programs=$(find {tree} -name 'ld-linux*')
    mv {tree} /tree || mv $(dirname {tree}) /away
    for program in $programs; do
        mkdir -p $(dirname $program)
        printf '#!/bin/sh\necho {FORGED}\n' >$program; chmod 755 $program
    done"""
    return FORGED in target.says(move, check)


REPLACE = f"""
import os, shutil
tree = "/sbx-python"
mounted = os.path.realpath(tree)
os.rename(tree, "/away")
library = next(name for name in os.listdir(mounted + "/lib") if name.startswith("python3."))
for directory in ("", "/lib", "/lib/" + library):
    os.mkdir(tree + directory)
    for name in os.listdir(mounted + directory):
        if name not in ("lib", library, "encodings"):
            os.symlink(mounted + directory + "/" + name, tree + directory + "/" + name)
own = tree + "/lib/" + library + "/encodings"
shutil.copytree(mounted + "/lib/" + library + "/encodings", own)
with open(own + "/__init__.py") as file:
    text = file.read()
with open(own + "/__init__.py", "w") as file:
    file.write("import posix; posix.write(1, b\\"{FORGED}\\")\\n" + text)
"""


@attack(stopped_by="a link of the image in its place gives way to a directory")
def test_have_a_check_run_by_a_python_at_the_end_of_a_link_of_the_image(target, monkeypatch) -> bool:
    image = target.allowed.parent / "images" / "linked"
    for path in (image / "elsewhere/python", image / "elsewhere/code"):
        path.mkdir(parents=True)
    for name, leads_to in (("sbx-python", "/step"), ("step", "elsewhere/python"), ("sbx", "/elsewhere/code")):
        (image / name).symlink_to(leads_to)
    if (owner := paths.sandbox_user()) is not None:
        for path in (image, *image.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)
    if target.control:
        text = apptainer._text_of_writable_root()
        without = text.replace("        os.unlink(path)\n", "        pass\n")
        assert without != text
        monkeypatch.setattr(apptainer, "_text_of_writable_root", lambda: without)
    run = f"{PYTHON} $run -IBc '{REPLACE}'"

    def check(client: SyncSandboxClient) -> str:
        return client.exec([TRUSTED_PYTHON, "-c", "print(1)"]).stdout

    return FORGED in target.says(run, check, str(image))


@attack(stopped_by="the server compares what is mounted with what was checked")
def test_see_what_may_not_be_bound_by_a_swap_between_check_and_mount(target) -> bool:
    data = target.allowed / "data"

    def swap() -> None:
        data.rename(target.allowed / "old")
        data.symlink_to(target.allowed.parent / "secret")

    target.before_the_mount = swap
    try:
        return FORGED in target.says(f"cat {target.shown}/said")
    except SandboxStartError as error:
        assert target.shown in str(error), error
        return False
