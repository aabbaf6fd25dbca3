"""An endpoint of chat completions that says what a test wrote, for simulators of users and opponents."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ChatServer:
    """Where it is, and what it was asked."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def chat_server(replies: Sequence[str]) -> Iterator[ChatServer]:
    """Gives the replies in order; then it answers 500."""
    left = iter(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            server.headers.append(dict(self.headers))
            said = next(left, None)
            body = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            data = json.dumps(body).encode()
            self.send_response(500 if said is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = ChatServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            http.shutdown()
