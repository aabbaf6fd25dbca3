"""The sockets of the host and of other sandboxes are of no use inside, even where one was shown to an agent.

Here one is: hard links of them, open to everybody, lie in a directory that sandboxes may bind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox import paths
from sandbox.connection import Address
from sandbox.errors import SandboxError
from sandbox.spec import BindSpec, SandboxInfo, SandboxSpec
from tests.attacks import attack
from tests.attacks.conftest import CONTROL, PATIENCE_S
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, private_host, sandbox_of
from tests.helpers.sandboxes import new_state
from tests.sandbox.conftest import why_not

GOT = "the attacker got it"
CALL = """
import glob, json, socket, struct, sys

def call(path, *frames):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(20)
        s.connect(path)
        for frame in frames:
            data = json.dumps(frame).encode()
            s.sendall(struct.pack(">I", len(data)) + data)
        size = struct.unpack(">I", s.recv(4, socket.MSG_WAITALL))[0]
        return json.loads(s.recv(size, socket.MSG_WAITALL))

shared, state = sys.argv[1:]
host = shared + "/host.sock"
GOT = " ".join(("the", "attacker", "got", "it"))  # not in a traceback
"""


@dataclass
class Insider:
    """An agent in a sandbox that shows the directory with the sockets."""

    place: str
    control: bool
    runtime: str
    host: SyncHostClient
    shared: Path
    client: SyncSandboxClient

    def gets(self, code: str) -> bool:
        """Whether a script inside prints `GOT`; it has `call`, `host`, `shared` and `state`."""
        self.client.write_file("attack.py", CALL + code)
        shared = self.shared if self.control else "/shared"
        command = f"python3 attack.py {shared} {self.host.state}"
        return GOT in self.client.bash(command, PATIENCE_S).output

    def shows(self, source: Path, read_only: bool = True) -> bool:
        """Whether something is seen of a place of the machine that a request wants bound."""
        bind = BindSpec(str(source), "/data", read_only)
        binds = () if self.control else (bind,)
        try:
            with sandbox_of(self.host, runtime=self.runtime, binds=binds) as (_, client):
                listing = client.bash(f"ls -A {source if self.control else '/data'}", PATIENCE_S)
        except SandboxError:
            return False
        return listing.exit_code == 0 and bool(listing.output)

    def victim(self) -> SandboxInfo:
        """Somebody else's sandbox, its socket shown as `victim.sock`."""
        info = self.host.start(SandboxSpec(runtime=self.runtime))
        expose(Path(Address.parse(info.socket).path), self.shared / "victim.sock")
        return info


def expose(path: Path, name: Path) -> None:
    """Show a socket under another name, open to everybody."""
    name.unlink(missing_ok=True)
    os.link(path, name)
    name.chmod(0o666)


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[SyncHostClient, Path]]:
    """A host whose operator is careless: what holds its directory may be bound, and the image cache."""
    ground = new_state()
    ground.chmod(0o755)
    shared = ground / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with private_host(ground / "s", ROLLOUT_SANDBOX_BINDS=f"{ground}:rw,{paths.image_cache()}:rw") as host:
        expose(host.state / "host.sock", shared / "host.sock")
        yield host, shared
    shutil.rmtree(ground)


@pytest.fixture(params=["apptainer", "bubblewrap", CONTROL])
def target(request, node) -> Iterator[Insider]:
    """The control is an agent without walls, in the host's own namespaces."""
    host, shared = node
    control = request.param == CONTROL
    runtime = "local-unsafe" if control else request.param
    if not control and (reason := why_not(runtime)):
        pytest.skip(reason)
    binds = () if control else (BindSpec(str(shared), "/shared", read_only=False),)
    with sandbox_of(host, runtime=runtime, binds=binds) as (_, client):
        yield Insider(request.param, control, runtime, host, shared, client)


@attack(stopped_by="the host looks at its caller's namespaces")
def test_start_a_sandbox_without_walls_through_the_host_s_socket(target) -> bool:
    return target.gets(
        """
reply = call(host, {"op": "start", "spec": {"runtime": "local-unsafe"}})
if reply["ok"]:
    print(GOT)
    call(host, {"op": "release", "id": reply["result"]["id"]})
"""
    )


@attack(stopped_by="the host looks at its caller's namespaces")
def test_end_another_s_sandbox_through_the_host_s_socket(target) -> bool:
    victim = target.victim()
    target.gets(f'call(host, {{"op": "release", "id": "{victim.id}"}})')
    return not target.host.release(victim.id)


@attack(stopped_by="the host looks at its caller's namespaces")
def test_learn_the_keys_of_all_sandboxes_from_the_host(target) -> bool:
    return target.gets('print(call(host, {"op": "list"})["ok"] and GOT)')


@attack(stopped_by="a server answers to its key alone")
def test_run_a_command_in_another_sandbox_through_its_socket(target) -> bool:
    victim = target.victim()
    try:
        target.gets(
            """
keys = [None, "0" * 32]
for path in glob.glob(state + "/records/*.json"):
    info = json.load(open(path))["info"] or {}
    keys.append(info.get("socket", "").partition("#")[2])
for key in keys:
    greeting = [{"key": key}] if key else []
    try:
        call(shared + "/victim.sock", *greeting, {"op": "bash", "command": "touch got", "timeout": 10})
    except (OSError, struct.error):
        pass
"""
        )
        with SyncSandboxClient(victim.socket) as client:
            return client.bash("ls got").exit_code == 0
    finally:
        target.host.release(victim.id)


@attack(stopped_by="the host's own places are never bound")
def test_have_the_host_s_directory_bound(target) -> bool:
    return target.shows(target.host.state)


@attack(stopped_by="nor is what holds them")
def test_have_the_directory_above_the_host_s_bound(target) -> bool:
    return target.shows(target.host.state.parent)


@attack(stopped_by="nor is what lies in them")
def test_have_another_sandbox_s_files_bound(target) -> bool:
    victim = target.victim()
    with SyncSandboxClient(victim.socket) as client:
        client.bash("touch mine")
    shown = target.shows(target.host.state / "scratch" / victim.id / "workspace")
    target.host.release(victim.id)
    return shown


@attack(stopped_by="links are followed before a place is judged")
def test_have_the_host_s_directory_bound_by_a_link(target) -> bool:
    link = target.shared / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(target.host.state)
    return target.shows(link / ".")


@attack(stopped_by="the image cache is never bound")
def test_have_everybody_s_images_bound_for_writing(target) -> bool:
    return target.shows(paths.image_cache(), read_only=False)


@attack(stopped_by="only directories and plain files are bound")
def test_have_the_host_s_socket_itself_bound(target) -> bool:
    return target.shows(target.shared / "host.sock")
