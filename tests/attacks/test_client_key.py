"""The key of a service that the client finds by itself: who else gets it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from rollout import account
from rollout.client import KEY_VARIABLE, Client
from rollout.errors import RolloutError
from tests.attacks import attack
from tests.attacks.conftest import CONTROL
from tests.helpers.http_server import Server
from tests.helpers.stack import free_port


@dataclass
class Target:
    place: str
    control: bool


@pytest.fixture(params=["service", CONTROL])
def target(request) -> Target:
    return Target("service", request.param == CONTROL)


class Catcher:
    """A server of the attacker's that keeps the keys it is sent; it may send callers on to another one."""

    def __init__(self, onward: str | None = None) -> None:
        self.caught: list[str] = []
        catcher = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if onward is None and (key := self.headers.get("Authorization")):
                    catcher.caught.append(key)
                self.send_response(302 if onward else 200)
                if onward:
                    self.send_header("Location", onward + self.path)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = Server(Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Catcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def home(monkeypatch, tmp_path) -> Path:
    """The state directory of an account that runs a service, and has no key in its environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv("ROLLOUT_URL", raising=False)
    return tmp_path


def announced(url: str) -> Path:
    return account.announce("stack", account.Service(url, "rlt_victim", account.boot(), time.time()))


@attack(stopped_by="no redirect is followed, and a key has one address")
def test_have_the_client_sent_on_with_its_key(target, home):
    with Catcher() as attacker, Catcher(onward=attacker.url) as service:
        announced(service.url)
        with suppress(RolloutError), Client(retry_for=0.0) as client:
            if target.control:  # a client that follows, and repeats its headers
                headers = {"Authorization": f"Bearer {account.key_for(client.base_url)}"}
                urllib.request.urlopen(
                    urllib.request.Request(f"{client.base_url}/v1/status", headers=headers)
                )
            else:
                client.status()
        return bool(attacker.caught)


@attack(stopped_by="a file must be ours, and nobody else's to read")
def test_have_the_client_believe_a_file_of_the_attacker_s(target, home, monkeypatch):
    with Catcher() as attacker:
        path = announced(attacker.url)
        path.chmod(0o666)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        if target.control:
            monkeypatch.setattr(account, "read_private", Path.read_text)
        with suppress(RolloutError), Client(retry_for=0.0) as client:
            client.status()
        return bool(attacker.caught)


LISTENS_AS_NOBODY = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    while True:
        with server.accept()[0] as one:
            print(one.recv(65536), flush=True)
            one.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{}")
"""


@attack(stopped_by="the key goes only where we ourselves listen")
@pytest.mark.parametrize("key", ["found", "of the environment"])
def test_receive_the_key_at_the_port_of_a_service_that_died(target, home, monkeypatch, key):
    port, url = free_port(), None
    announced(f"http://127.0.0.1:{port}")
    if key == "found":
        url = f"http://127.0.0.1:{port}"
    else:  # the service of this checkout, which its caller does not name
        monkeypatch.setenv(KEY_VARIABLE, "rlt_victim")
        monkeypatch.setattr("rollout.account.find", lambda: (f"http://127.0.0.1:{port}", "that died"))
    if target.control:
        monkeypatch.setattr(account.Owned, "require", lambda self: None)
    elif os.geteuid() != 0:  # nobody else's program can be started: say that it is
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    command = [sys.executable, "-c", LISTENS_AS_NOBODY, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as attacker:
        try:
            assert attacker.stdout.readline() == "ready\n"
            with suppress(RolloutError), Client(url, retry_for=0.0) as client:
                client.status()
        finally:
            attacker.kill()
        return "rlt_victim" in attacker.stdout.read()
