"""A model of a few turns in four dialects and the program that talks to it, in one place without a network.

`python3 scripted_model.py JOB.json` runs inside a sandbox, with the standard library alone: it listens on
loopback, starts the program and prints what happened as JSON. The first call that offers a shell has it
called; what has the tool's output is answered with a text, as is every other call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

COMMAND = "echo hello > out.txt && cat out.txt"
FINAL = "The file is written."
SHELLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": COMMAND, "description": "Write a file"},
    "bash": {"command": COMMAND, "description": "Write a file"},
    "run_shell_command": {"command": COMMAND, "description": "Write a file", "is_background": False},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-lc", COMMAND]},
    "terminal": {"command": COMMAND},
    "execute_bash": {"command": COMMAND},
}
"""What shells are called, and with which arguments."""
ENDS: dict[str, dict[str, Any]] = {"bash": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}
"""How a program is told that it is done, where a text is not enough; by the name of its shell."""
NUMBERS = count(1)


class Call:
    """A request, as far as an answer depends on it."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path = path.partition("?")[0]
        if "contents" in body:
            self.dialect, self.stream = "gemini", ":stream" in path
            declared = [f for tool in body.get("tools", []) for f in tool.get("functionDeclarations", [])]
            schemas = [(f["name"], f.get("parametersJsonSchema") or f.get("parameters")) for f in declared]
            self.turns = json.dumps(body["contents"])
            results = self.turns.count('"functionResponse"')
        else:
            self.stream = bool(body.get("stream"))
            if self.path.endswith("/messages"):
                self.dialect, key, mark = "anthropic", "input_schema", '"tool_result"'
            elif self.path.endswith("/responses"):
                self.dialect, key, mark = "responses", "parameters", '_call_output"'
            else:
                self.dialect, key, mark = "chat", "parameters", '"role": "tool"'
            tools = [tool.get("function", tool) for tool in body.get("tools") or []]
            schemas = [(tool.get("name", tool.get("type")), tool.get(key)) for tool in tools]
            self.turns = json.dumps(body.get("messages") or body.get("input"))
            results = self.turns.count(mark)
        self.model = body.get("model") or self.path.rpartition("/")[2].partition(":")[0]
        self.tools = {name: schema or {} for name, schema in schemas}
        self.shell = next((name for name in SHELLS if name in self.tools), None)
        self.calls_shell = self.shell is not None and not results
        self.number = next(NUMBERS)

    def told(self) -> dict[str, Any]:
        """What a test reads of it."""
        schema = self.tools.get(self.shell or "", {})
        return {
            "path": self.path,
            "dialect": self.dialect,
            "stream": self.stream,
            "model": self.model,
            "tools": sorted(map(str, self.tools)),
            "shell": [self.shell, list(schema.get("properties", {})), schema.get("required")],
            "acted": self.calls_shell,
            "turns": self.turns,
        }

    def answer(self, ends_by_shell: bool = False) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
        """The JSON of an answer, and the events of a streamed one."""
        arguments: dict[str, Any] | None = None
        if self.calls_shell or (self.shell and ends_by_shell):
            known = self.tools[self.shell or ""].get("properties", {})
            command = SHELLS[self.shell or ""] if self.calls_shell else ENDS["bash"]
            arguments = {name: value for name, value in command.items() if name in known}
        return getattr(self, f"_{self.dialect}")(arguments)

    def _chat(self, arguments: dict[str, Any] | None) -> tuple[dict, list]:
        message: dict[str, Any] = {"role": "assistant", "content": None if arguments else FINAL}
        if arguments:
            function = {"name": self.shell, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": f"call_{self.number}", "type": "function", "function": function}]
        reason = "tool_calls" if arguments else "stop"
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        head = {"id": f"chatcmpl-{self.number}", "created": 1, "model": self.model}
        whole = {**head, "object": "chat.completion", "usage": usage}
        whole["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        delta = {**message, "tool_calls": [{**c, "index": 0} for c in message.get("tool_calls", [])]}
        chunk = {**head, "object": "chat.completion.chunk"}
        first = {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        last = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        return whole, [("", first), ("", last), ("", {**chunk, "choices": [], "usage": usage})]

    def _anthropic(self, arguments: dict[str, Any] | None) -> tuple[dict, list]:
        block: dict[str, Any] = {"type": "text", "text": FINAL}
        empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": FINAL}
        if arguments:
            block = {"type": "tool_use", "id": f"toolu_{self.number}", "name": self.shell, "input": arguments}
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
        reason = "tool_use" if arguments else "end_turn"
        head = {"id": f"msg_{self.number}", "type": "message", "role": "assistant", "model": self.model}
        usage = {"input_tokens": 100, "output_tokens": 10}
        whole = {**head, "content": [block], "stop_reason": reason, "stop_sequence": None, "usage": usage}
        opened = {**whole, "content": [], "stop_reason": None}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": opened},
            {"type": "content_block_start", "index": 0, "content_block": empty},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage},
            {"type": "message_stop"},
        ]
        return whole, [(event["type"], event) for event in events]

    def _responses(self, arguments: dict[str, Any] | None) -> tuple[dict, list]:
        text = {"type": "output_text", "text": FINAL, "annotations": []}
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": [text]}
        if arguments:
            item = {"type": "function_call", "call_id": f"call_{self.number}", "name": self.shell}
            item["arguments"] = json.dumps(arguments)
        item = {**item, "id": f"item_{self.number}", "status": "completed"}
        usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
        head = {"id": f"resp_{self.number}", "object": "response", "model": self.model, "created_at": 1}
        whole = {**head, "status": "completed", "output": [item], "usage": usage}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": {**head, "status": "in_progress", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        ]
        return whole, [(event["type"], event) for event in events]

    def _gemini(self, arguments: dict[str, Any] | None) -> tuple[dict, list]:
        part = {"functionCall": {"name": self.shell, "args": arguments}} if arguments else {"text": FINAL}
        candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
        usage = {"promptTokenCount": 100, "candidatesTokenCount": 10, "totalTokenCount": 110}
        whole = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": self.model}
        return whole, [("", whole)]


def serve(port: int, ends_by_shell: bool) -> tuple[ThreadingHTTPServer, list[dict[str, Any]]]:
    """The model on loopback, and the list that its calls come into."""
    calls: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _send(self, kind: str, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _other(self) -> None:
            calls.append({"path": self.path, "method": self.command, "dialect": None})
            self._send("application/json", b'{"error": {"message": "there is no such route"}}', 404)

        do_GET = do_HEAD = do_CONNECT = _other

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            if not any(body.get(key) for key in ("messages", "input", "contents")):
                return self._other()
            call = Call(self.path, body)
            key = self.headers["x-api-key"] or self.headers["x-goog-api-key"] or self.headers["Authorization"]
            calls.append({**call.told(), "key": (key or "").removeprefix("Bearer ")})
            if self.path.partition("?")[0].endswith(("count_tokens", ":countTokens")):
                return self._send("application/json", b'{"input_tokens": 100, "totalTokens": 100}')
            whole, events = call.answer(ends_by_shell)
            if not call.stream:
                return self._send("application/json", json.dumps(whole).encode())
            named = [(f"event: {name}\n" if name else "", json.dumps(event)) for name, event in events]
            lines = [f"{name}data: {event}\n\n" for name, event in named]
            if call.dialect == "chat":
                lines.append("data: [DONE]\n\n")
            return self._send("text/event-stream", "".join(lines).encode())

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, calls


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    server, calls = serve(job["port"], job["ends_by_shell"])
    home = Path(job["env"]["HOME"])
    home.mkdir(parents=True, exist_ok=True)
    for name, text in job["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    try:
        done = subprocess.run(
            job["argv"],
            env={**os.environ, **job["env"]},
            cwd=job["workspace"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=job["timeout_s"],
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, out, err = None, error.stdout or b"", error.stderr or b""
    server.shutdown()
    told = {"code": code, "out": out.decode()[-20000:], "err": err.decode()[-5000:], "calls": calls}
    print(json.dumps({**told, "written": sorted(str(path) for path in home.rglob("*") if path.is_file())}))


if __name__ == "__main__":
    main()
