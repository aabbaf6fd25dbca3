"""A model that plays a script over Chat Completions and Responses, not streamed; and takes rewards."""

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
ROUTES = CHAT, RESPONSES, REWARD = "/v1/chat/completions", "/v1/responses", "/v1/reward"


class ScriptedChat:
    """What it says next depends on how many turns it has said in the conversation that it is sent."""

    def __init__(self, url: str, turns: list[Said]) -> None:
        self.url, self.turns = url, turns
        self.calls: list[dict[str, Any]] = []
        """Bodies, each with the `path` and the `key` of its call."""
        self.rewards: list[tuple[str, dict[str, Any]]] = []

    def answer(self, path: str, body: dict[str, Any], key: str) -> dict[str, Any]:
        if path == REWARD:
            self.rewards.append((key, body))
            return {}
        self.calls.append({**body, "path": path, "key": key})
        chat = path == CHAT
        ours = (
            [message for message in body["messages"] if message["role"] == "assistant"]
            if chat
            else [item for item in items(body) if item.get("type") == "function_call"]
        )
        said, name = self.turns[len(ours)], f"call_{len(ours)}"
        return (completion if chat else response)(body["model"], said, name)


def items(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body["input"] if isinstance(body["input"], list) else []


def completion(model: str, said: Said, name: str) -> dict[str, Any]:
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


def response(model: str, said: Said, name: str) -> dict[str, Any]:
    if isinstance(said, str):
        part = {"type": "output_text", "text": said, "annotations": []}
        item = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}
    else:
        item = {"type": "function_call", "id": f"fc_{name}", "call_id": name, "name": said[0]}
        item["arguments"] = json.dumps(said[1])
    usage = {
        **{"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        **{
            "id": f"resp_{name}",
            "object": "response",
            "created_at": 1,
            "model": model,
            "status": "completed",
        },
        "output": [{**item, "status": "completed"}],
        **{"usage": usage, "parallel_tool_calls": False, "tool_choice": "auto", "tools": []},
    }


@contextmanager
def scripted_chat(*turns: Said) -> Iterator[ScriptedChat]:
    """A server of that model on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = (self.headers["Authorization"] or "").removeprefix("Bearer ")
            served = self.path in ROUTES
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
