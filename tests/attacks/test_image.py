"""An image is what its operator made one: not any directory of the node, nor what an agent prepared.

The control is a host that takes all these places for images, or, where no setting takes the wall down, a
sandbox without any.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.errors import SandboxError
from sandbox.spec import SandboxInfo
from tests.attacks import attack
from tests.attacks.conftest import CONTROL, PATIENCE_S
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, private_host, sandbox_of
from tests.helpers.sandboxes import new_state
from tests.sandbox.conftest import why_not
from workers.handlers.swe.images import local_name
from workers.handlers.swe.rows import SweTask

SECRET = "s3cret-of-the-node"
NOBODY = 65534


@dataclass
class Node:
    """A host, and places of its node."""

    place: str
    control: bool
    runtime: str
    host: SyncHostClient
    ground: Path

    @property
    def allowed(self) -> Path:
        """Below it, images may be paths; the host's own directory lies there, too."""
        return self.ground / "allowed"

    @property
    def private(self) -> Path:
        """A directory with the file `key`, which only the service's own user may read."""
        return self.ground / "private"

    def sandbox(
        self, image: object = "base"
    ) -> contextlib.AbstractContextManager[tuple[SandboxInfo, SyncSandboxClient]]:
        """Raises SandboxError where there is none of that image."""
        return sandbox_of(self.host, image=str(image), runtime=self.runtime)

    def says(self, image: object, command: str) -> str:
        """What a command says in a sandbox of that image; "" where there is none."""
        try:
            with self.sandbox(image) as (_, client):
                return client.bash(command, PATIENCE_S).output
        except SandboxError:
            return ""


def reads(*paths: object) -> str:
    """A command that shows the first lines of files, without any program: an image may have none."""
    return f"for path in {' '.join(map(str, paths))}; do read -r line <$path; echo $line; done"


def without_walls(attempt: Callable[..., bool]) -> Callable[..., bool]:
    """The control of this attack is a sandbox that isolates nothing."""
    attempt.without_walls = True
    return attempt


def plant(ground: Path) -> None:
    """The places of the node, as the tests want them."""
    ground.chmod(0o755)
    for name in ("allowed/fine/usr/bin", "allowed/shared/mine/usr/bin", "private/usr/bin"):
        (ground / name).mkdir(parents=True)
    (ground / "allowed/link").symlink_to(ground / "private")
    (ground / "allowed/fine/var").symlink_to(ground / "private")
    (ground / "allowed/shared/mine/said").write_text(SECRET)  # by an agent, before
    (ground / "private" / "key").write_text(SECRET)
    # Root's sandboxes are nobody's and a plain user's the user's own: in either case this is who may read it.
    for path, mode in ((ground / "private", 0o700), (ground / "private/key", 0o600)):
        path.chmod(mode)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)


@pytest.fixture(scope="module")
def ground() -> Iterator[Path]:
    path = new_state()
    plant(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def hosts(ground) -> Iterator[dict[bool, SyncHostClient]]:
    """The host under attack, and the one of the controls, for which all the ground is images."""
    allowed = ground / "allowed"
    binds = f"{allowed}/shared:rw"
    with (
        private_host(allowed / "s", ROLLOUT_SANDBOX_IMAGE_ROOTS=allowed, ROLLOUT_SANDBOX_BINDS=binds) as host,
        private_host(ROLLOUT_SANDBOX_IMAGE_ROOTS=ground) as careless,
    ):
        yield {False: host, True: careless}


@pytest.fixture(params=["apptainer", "bubblewrap", CONTROL])
def target(request, hosts, ground) -> Node:
    """The node as an agent, or who submits its task, meets it."""
    control = request.param == CONTROL
    runtime = "apptainer" if control else request.param
    if control and hasattr(request.function, "without_walls"):
        runtime = "local-unsafe"
    elif reason := why_not(runtime):
        pytest.skip(reason)
    return Node(request.param, control, runtime, hosts[control], ground)


@attack(stopped_by="paths are images below roots alone")
def test_read_a_secret_of_the_node_in_a_directory_named_as_image(target) -> bool:
    return SECRET in target.says(target.private, reads("/key"))


@attack(stopped_by="paths are images below roots alone")
@without_walls
def test_see_the_machine_with_its_root_directory_as_image(target) -> bool:
    return SECRET in target.says("/", reads(f"{target.private}/key"))


@attack(stopped_by="paths are resolved before they are compared")
def test_leave_the_allowed_root_by_two_dots(target) -> bool:
    return SECRET in target.says(f"{target.allowed}/fine/../../private", reads("/key"))


@attack(stopped_by="links are resolved before paths are compared")
def test_leave_the_allowed_root_by_a_link(target) -> bool:
    return SECRET in target.says(target.allowed / "link", reads("/key"))


@attack(stopped_by="paths are images below roots alone")
def test_name_a_directory_in_the_docker_image_field_of_a_swe_row(target) -> bool:
    row = {
        "problem_statement": "?",
        "repo_name": "x",
        "docker_image": str(target.private),
        "commit_hash": "0" * 40,
        "expected_output_json": {"test": "PASSED"},
        "execution_result_content": {"test_file_names": ["test_1.py"], "test_file_codes": [""]},
    }
    image = local_name(SweTask.model_validate(row).instance().image)
    return SECRET in target.says(image, reads("/key"))


@attack(stopped_by="the host's own places are never images")
@without_walls
def test_have_the_machine_mounted_by_a_link_in_ones_own_workspace(target) -> bool:
    with target.sandbox() as (info, client):
        client.bash(f"mkdir -p root/usr/bin && ln -s {target.private} root/var")
        own = target.host.state / "scratch" / info.id / "workspace" / "root"
        return SECRET in target.says(own, reads("/var/key", f"{target.private}/key"))


@attack(stopped_by="links of an image are links inside, never followed")
@without_walls
def test_have_the_machine_mounted_by_a_link_of_an_image(target) -> bool:
    return SECRET in target.says(target.allowed / "fine", reads("/var/key", f"{target.private}/key"))


@attack(stopped_by="the host's own places are never images")
@without_walls
def test_read_another_sandbox_s_files_with_the_host_s_directory_as_image(target) -> bool:
    state = target.host.state
    with target.sandbox() as (info, client):
        client.bash(f"echo {SECRET} >mine; chmod 644 mine")
        place = f"scratch/{info.id}/workspace/mine"
        return SECRET in target.says(state, reads(f"/{place}", f"{state}/{place}"))


@attack(stopped_by="nor is what holds them")
@without_walls
def test_read_another_sandbox_s_files_with_what_holds_the_host_s_directory_as_image(target) -> bool:
    state = target.host.state
    with target.sandbox() as (info, client):
        client.bash(f"echo {SECRET} >mine; chmod 644 mine")
        place = f"scratch/{info.id}/workspace/mine"
        return SECRET in target.says(state.parent, reads(f"/{state.name}/{place}", f"{state}/{place}"))


@attack(stopped_by="what sandboxes write is never an image")
def test_have_others_start_from_an_image_that_an_agent_wrote(target) -> bool:
    return SECRET in target.says(target.allowed / "shared" / "mine", reads("/said"))


CALL = """
import socket, sys
for path in ("/srv/s", sys.argv[1]):
    s = socket.socket(socket.AF_UNIX)
    try: s.connect(path)
    except OSError: continue
    print(s.recv(100).decode())
"""
PYTHON = """
p=/sbx-python
[ -d $p ] && run="$(echo $p/lib/*/ld-linux*.so.*) --library-path $(echo $p/lib/*-linux-gnu) $p/bin/python3"
"""


@attack(stopped_by="a directory that holds a socket is no image")
@without_walls
def test_talk_to_a_program_of_the_machine_through_a_socket_in_an_image(target) -> bool:
    image = target.allowed / f"socket-{target.place}"
    for name in ("usr/bin", "srv"):
        (image / name).mkdir(parents=True)
    path = image / "srv" / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen(8)
        threading.Thread(target=_tell, args=(listener,), daemon=True).start()
        command = f"{PYTHON} ${{run:-python3}} -c '{CALL}' {path}"
        try:
            return SECRET in target.says(image, command)
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _tell(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(SECRET.encode())
