"""A model that plays a script over Chat Completions, not streamed; and takes rewards. It is no capture."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.helpers.http_server import Server

Said = str | tuple[str, dict[str, Any]]
"""A turn of the model: a text, or the call of a tool with its arguments."""
CHAT, REWARD, FINISH = "/v1/chat/completions", "/v1/reward", "/v1/finish"


class ScriptedChat:
    """What it says next depends on how many turns it has said in the conversation that it is sent."""

    def __init__(self, url: str, turns: list[Said]) -> None:
        self.url, self.turns = url, turns
        self.calls: list[dict[str, Any]] = []
        """Bodies, each with the `key` of its call."""
        self.done: list[tuple[str, str, Any]] = []
        """Path, key and body of each program that was said to be done."""

    def answer(self, path: str, body: Any, key: str) -> dict[str, Any]:
        if path != CHAT:
            self.done.append((path, key, body))
            return {"accepted": True}
        self.calls.append({**body, "key": key})
        at = sum(message["role"] == "assistant" for message in body["messages"])
        return completion(body["model"], self.turns[at], f"call_{at}")


def completion(model: str, said: Said, name: str) -> dict[str, Any]:
    """The answer that says so."""
    message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
    if not isinstance(said, str):
        function = {"name": said[0], "arguments": json.dumps(said[1])}
        message |= {"content": None, "tool_calls": [{"id": name, "type": "function", "function": function}]}
    reason = "stop" if isinstance(said, str) else "tool_calls"
    return {
        **{"id": f"chatcmpl-{name}", "object": "chat.completion", "created": 1, "model": model},
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


@contextmanager
def scripted_chat(*turns: Said) -> Iterator[ScriptedChat]:
    """A server of that model on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
            key = (self.headers["Authorization"] or "").removeprefix("Bearer ")
            served = self.path in (CHAT, REWARD, FINISH)
            answer = model.answer(self.path, body, key) if served else {"error": {"message": "no such route"}}
            text = json.dumps(answer).encode()
            self.send_response(200 if served else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = Server(Handler)
    model = ScriptedChat(f"http://127.0.0.1:{server.server_port}", list(turns))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
