"""Harbor tasks, each written as a directory by a few lines; their image is the base image."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout.schema import Blame, Rollout, State
from rollout.suites.bundles import pack
from workers.agent.replay import Action, Call
from workers.bundles import keep

Play = Callable[..., Rollout]
"""Of the fixture `play`."""
NO_NETWORK = "[environment]\nnetwork_mode = 'no-network'\n"
BASE = '[environment]\ndocker_image = "base"\n'


def checks(condition: str) -> str:
    """A `tests/test.sh` that gives 1 where a command of the shell succeeds, else 0."""
    return f"if {condition}; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"


def write_task(
    root: Path,
    toml: str = "",
    *,
    instruction: str | None = "Make the file done.txt.",
    test: str | None = checks("test -f done.txt"),
    solution: str | None = "touch done.txt\n",
    files: Mapping[str, str] | None = None,
) -> Path:
    """A task directory.

    Args:
        toml: `task.toml` but for the image, which is the base image unless it names one.
        instruction, test, solution: `instruction.md`, `tests/test.sh`, `solution/solve.sh`; None = no file.
        files: Further ones, by their paths.
    """
    text = textwrap.dedent(toml)
    if "docker_image" not in text and not any(name.endswith("Dockerfile") for name in files or ()):
        text = text.replace("[environment]\n", BASE, 1) if "[environment]" in text else BASE + text
    named = {
        "task.toml": text,
        "instruction.md": instruction,
        "tests/test.sh": test,
        "solution/solve.sh": solution,
        **{name: textwrap.dedent(content) for name, content in (files or {}).items()},
    }
    for name, content in named.items():
        if content is not None:
            place = root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
    return root


def request(root: Path, **more: object) -> dict[str, object]:
    """The `task` of a request for a directory, whose bundle is kept in this process."""
    bundle = pack(root)
    keep(bundle)
    return {"bundle": bundle.digest, **more}


def calling(tool: str, **arguments: Any) -> Action:
    """A turn that calls a tool."""
    return Action(tool_calls=[Call(name=tool, arguments=arguments)])


def bash(command: str, **more: Any) -> Action:
    """A turn that gives the shell a command."""
    return calling("execute_bash", command=command, **more)


def said(rollout: Rollout) -> list[str]:
    """What the tools answered."""
    assert rollout.error is None, rollout.error
    return [message.text for message in rollout.trajectory.messages if message.role == "tool"]


def refused(rollout: Rollout) -> str:
    """Why a task is not worked on."""
    assert (rollout.state, rollout.reward, rollout.drop) == (State.FAILED, None, True)
    assert rollout.error.blame is Blame.TASK
    return rollout.error.message


MCP_SERVER = '''
import json, sys
TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
    {"name": "count", "inputSchema": {"type": "object"}},
    {"name": "odd.name", "inputSchema": "none"},
]
calls = 0

def answer(message):
    """The result of a request; None of a notification."""
    global calls
    if "id" not in message:
        return None
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "toy", "version": "1"}
    elif method == "tools/list":
        first = "cursor" not in params
        result = {"tools": TOOLS[:1], "nextCursor": "more"} if first else {"tools": TOOLS[1:]}
    elif params["name"] == "add":
        text = str(params["arguments"]["a"] + params["arguments"]["b"])
        result = {"content": [{"type": "text", "text": text}]}
    elif params["name"] == "count":
        calls += 1
        result = {"content": [], "structuredContent": {"calls": calls}}
    else:
        result = {"content": [{"type": "image", "data": "x"}], "isError": True}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}
'''
"""A server of three tools, but for how its messages travel."""

MCP_STDIO = (
    MCP_SERVER
    + """
print("what is no message is left out", flush=True)
for line in sys.stdin:
    if (said := answer(json.loads(line))) is not None:
        print(json.dumps(said), flush=True)
"""
)

MCP_HTTP = (
    MCP_SERVER
    + """
import queue, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
streams = {}

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        # the older way: a stream first
        assert self.headers["X-Key"] == "sesame"
        mine = streams["1"] = queue.Queue()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"event: endpoint\\ndata: /messages?session=1\\n\\n")
        while True:
            self.wfile.write(b"data: " + json.dumps(mine.get()).encode() + b"\\n\\n")
            self.wfile.flush()

    def do_POST(self):
        assert self.headers["X-Key"] == "sesame"
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = answer(message)
        if self.path.startswith("/messages"):
            if said is not None:
                streams["1"].put(said)
            said = None
        elif message["method"] != "initialize":
            assert self.headers["Mcp-Session-Id"] == "7"
        self.send_response(202 if said is None else 200)
        self.send_header("Mcp-Session-Id", "7")
        events = message["method"] == "tools/call"
        self.send_header("Content-Type", "text/event-stream" if events else "application/json")
        self.end_headers()
        if said is not None:
            text = json.dumps(said)
            form = ": a comment\\nevent: message\\ndata: %s\\n\\n" if events else "%s"
            self.wfile.write((form % text).encode())

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 8765), Handler)
server.daemon_threads = True
server.serve_forever()
"""
)
