"""A server that only says what it is: the descriptive routes of an engine that cannot run here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.helpers.http_server import Server

SGLANG = {
    "GET /v1/models": {
        "object": "list",
        "data": [{"id": "org/model", "owned_by": "sglang", "root": "org/model", "max_model_len": 4096}],
    },
    "GET /server_info": {
        "model_path": "org/model",
        "tokenizer_path": "/models/tokenizer",
        "dp_size": 2,
        "context_length": None,
        "enable_return_routed_experts": True,
        "max_total_num_tokens": 50_000,
        "weight_version": "default",
        "internal_states": [{}],
        "version": "0.5.9",
    },
    "GET /model_info": {"model_path": "org/model", "is_generation": True, "weight_version": "step-3"},
    "GET /health": "",
    "GET /metrics": 'sglang:num_running_reqs{model_name="org/model"} 2.0\n',
}
"""As `http_server.py` of SGLang answers; in older ones the two paths with `_info` begin with `get_`."""


@contextmanager
def describing(routes: dict[str, Any], calls: list[tuple[str, Any]] | None = None) -> Iterator[str]:
    """Serves `"METHOD /path" → JSON, text, status or (status, JSON)`, or what returns such; all else is 404.
    Gives the URL.

    Args:
        calls: Where the path and the JSON of each request are noted.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            path = self.path.partition("?")[0]
            if calls is not None:
                calls.append((path, json.loads(sent or b"null")))
            status, reply = 200, routes.get(f"{self.command} {path}", (404, {"detail": "no such route"}))
            if callable(reply):
                reply = reply()
            if isinstance(reply, int):
                status, reply = reply, ""
            elif isinstance(reply, tuple):
                status, reply = reply
            body = reply if isinstance(reply, str) else json.dumps(reply)
            self.send_response(status)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer

    server = Server(Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
