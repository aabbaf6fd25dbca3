"""A proxy in front of an LLM server that writes down every generate call and its answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx

from tests.helpers.http_server import Server


@dataclass
class Call:
    path: str
    request: dict[str, Any]
    answer: dict[str, Any]


@dataclass
class Recorder:
    url: str
    calls: list[Call] = field(default_factory=list)


@contextmanager
def recorder(target: str) -> Iterator[Recorder]:
    """Serve on a free loopback port until the block ends."""
    upstream = httpx.Client(base_url=target, timeout=240)
    state = Recorder("")

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self, body: bytes | None) -> None:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            answer = upstream.request(self.command, self.path, content=body, headers=headers)
            if body and answer.status_code == 200:
                state.calls.append(Call(self.path, json.loads(body), answer.json()))
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("content-type", "text/plain"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def do_GET(self) -> None:
            self._forward(None)

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = Server(Proxy)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
        upstream.close()
