"""What another user of a cluster wants: to be taken for the head of the service while it is away.

Its port is no privileged one, so whoever is on that machine may listen there meanwhile, and nodes connect
again and again. In the control Redis is without TLS.
"""

from __future__ import annotations

import socketserver
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.launch.redis import choose, ping
from services.launch.slurm.head import make_certificate
from services.launch.slurm.rundir import UP, Head, RunDir
from tests.attacks import attack


@dataclass
class Cluster:
    """A run directory whose head is away, and a stranger at its port."""

    place: str
    control: bool
    run: RunDir
    head: Head
    heard: list[bytes]

    def is_told(self, secret: str) -> bool:
        """Whether the stranger heard it when a node looked for its head."""
        ping(self.run.redis_url(self.head))
        return any(secret.encode() in data for data in self.heard)


def stranger(heard: list[bytes], certificate: tuple[Path, Path] | None) -> socketserver.ThreadingTCPServer:
    """Listens on any port, with a certificate of its own, and agrees to everything."""

    class Listener(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connection = self.request
            try:
                if certificate is not None:
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(*certificate)
                    connection = context.wrap_socket(connection, server_side=True)
                while data := connection.recv(65536):
                    heard.append(data)
                    connection.sendall(b"+OK\r\n")
            except OSError:
                return

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Listener)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture(params=["tls", "plain", "control"])
def target(request, tmp_path) -> Iterator[Cluster]:
    """`tls` and `plain` are what the stranger speaks."""
    control = request.param == "control"
    run = RunDir(tmp_path / "run")
    run.make()
    run.redis.mkdir()
    binary = choose({"PATH": "/usr/bin:/bin:/usr/local/bin"}).binary
    assert make_certificate(run.redis, "127.0.0.1", binary) is not None
    own = tmp_path / "stranger"
    own.mkdir()
    certificate = make_certificate(own, "127.0.0.1", binary) if request.param == "tls" else None
    heard: list[bytes] = []
    with stranger(heard, certificate) as server:
        port = server.server_address[1]
        head = Head("1", "n1", "127.0.0.1", UP, "http://127.0.0.1:1", "", port, redis_tls=not control)
        yield Cluster("service", control, run, head, heard)
        server.shutdown()


@attack(stopped_by="TLS: a stranger has not the key of the run directory's certificate")
def test_be_told_the_password_of_redis_at_the_heads_port(target):
    return target.is_told(target.run.redis_password())
