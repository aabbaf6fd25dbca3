"""A sandbox after an agent, and a fresh one to which it was carried: the same files, whatever it did."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from sandbox.client import TRUSTED_PYTHON, SandboxClient
from sandbox.host_client import HostClient
from sandbox.layer import Layer
from sandbox.spec import SandboxSpec
from workers.handlers.harbor import carry

PLACES = (
    "/srv",
    "/opt",
    "/workspace",
    "/tmp",
    "/etc/ssl",
    "/usr/share/perl5",
    "/usr/lib/git-core",
    "/var/lib",
)
LISTING = """
import hashlib, json, os, stat, sys
told = {}
for place in json.load(sys.stdin):
    for directory, directories, files in os.walk(place):
        for name in directories + files:
            path = os.path.join(directory, name)
            info = os.lstat(path)
            what = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
            if stat.S_ISREG(info.st_mode) and info.st_mode & 0o400:
                what = hashlib.sha256(open(path, "rb").read()).hexdigest()
            if not path.startswith("/tmp/."):
                told[path] = [info.st_mode, what]
json.dump(told, sys.stdout)
"""
PREPARED = "mkdir -p /srv/given && touch /etc/ssl/given /usr/share/perl5/given"
"""What INIT does: directories of the image are in the layer before an agent comes."""
AGENT = """
import os, random, shutil, sys
draw = random.Random(int(sys.argv[1]))
places = sys.argv[2:]
def under(kinds):
    found = []
    for place in places:
        for directory, directories, files in os.walk(place):
            for name in directories + files:
                path = os.path.join(directory, name)
                kind = "link" if os.path.islink(path) else "directory" if os.path.isdir(path) else "file"
                if kind in kinds:
                    found.append(path)
    return sorted(found)
def any_of(*kinds):
    return draw.choice(under(kinds) or places)
def new():
    return os.path.join(draw.choice(places + under(["directory"])), "new-%d" % draw.randrange(6))
def write(path):
    with open(path, "w") as file:
        file.write(str(draw.random()))
def away(path):
    if path not in places:
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
def again(path):
    away(path)
    os.mkdir(path)
    write(path + "/inside")
def to_directory(path):
    away(path)
    os.mkdir(path)
def to_file(path):
    away(path)
    write(path)
acts = [
    lambda: write(new()), lambda: write(any_of("file")), lambda: os.mkdir(new()),
    lambda: away(any_of("file")), lambda: away(any_of("directory")), lambda: again(any_of("directory")),
    lambda: shutil.move(any_of("directory", "file"), new()), lambda: os.symlink(any_of("file"), new()),
    lambda: os.chmod(any_of("file"), draw.choice([0o600, 0o755, 0o444, 0o000])),
    lambda: os.chmod(any_of("directory"), draw.choice([0o700, 0o555, 0o755, 0])),
    lambda: to_directory(any_of("file", "link")), lambda: to_file(any_of("directory", "link")),
    lambda: os.link(any_of("file"), new()), lambda: os.utime(any_of("file"), (1, 1)),
]
for _ in range(40):
    try:
        draw.choice(acts)()
    except OSError:
        pass
"""


async def listing(box: SandboxClient) -> dict[str, list]:
    done = await box.exec(
        [TRUSTED_PYTHON, "-c", LISTING], 60, stdin=json.dumps(PLACES), max_output_chars=1 << 24
    )
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


async def carried(spec: SandboxSpec, seed: int, by_walk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, boxes = HostClient(), []
    if by_walk:
        monkeypatch.setattr(Layer, "there", False)
    try:
        for _ in range(2):
            info = await hosts.start(spec)
            boxes.append((info.id, SandboxClient(info.socket)))
        agent, fresh = boxes[0][1], boxes[1][1]
        assert Layer(agent.address).there is not by_walk
        for box in (agent, fresh):
            await box.exec(["bash", "-c", PREPARED])
        await carry.note(agent)
        done = await agent.exec([TRUSTED_PYTHON, "-c", AGENT, str(seed), *PLACES], 60)
        assert done.exit_code == 0, done.stderr
        told = await listing(agent)
        async with carry.changed(agent) as luggage:
            withheld = await carry.place(fresh, luggage, (), "/workspace", (), {}, trust=True)
        after = await listing(fresh)
        wrong = {path for path in told.keys() | after.keys() if told.get(path) != after.get(path)}
        assert not wrong, (
            seed,
            withheld,
            [(path, told.get(path), after.get(path)) for path in sorted(wrong)][:5],
        )
    finally:
        for sandbox_id, client in boxes:
            await client.close()
            await hosts.release(sandbox_id)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_an_agent_does_to_files_is_so_in_the_fresh_sandbox(host, seed, monkeypatch):
    asyncio.run(carried(SandboxSpec(), random.Random(seed).randrange(1 << 30), False, monkeypatch))


def test_it_is_so_without_a_layer_too(host, monkeypatch):
    asyncio.run(carried(SandboxSpec(), 7, True, monkeypatch))


def test_a_directory_of_the_image_that_init_wrote_to_is_gone_where_an_agent_replaced_it(host, monkeypatch):
    replaced = "import shutil, os\nfor place in ('/etc/ssl', '/usr/share/perl5'):\n    shutil.rmtree(place)\n"
    monkeypatch.setitem(
        carried.__globals__, "AGENT", replaced + "    os.mkdir(place)\n    os.chmod(place, 0o755)\n"
    )
    asyncio.run(carried(SandboxSpec(), 0, False, monkeypatch))
