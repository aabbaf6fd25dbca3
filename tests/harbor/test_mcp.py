"""MCP servers inside of a task's sandbox, as tools of the model."""

from __future__ import annotations

import json
from typing import Any

from rollout.schema import Limits
from tests.helpers.harbor_tasks import MCP_STDIO, NO_NETWORK, Play, bash, calling, refused, said


def server(name: str, transport: str, **more: Any) -> str:
    """A table of a server; strings of JSON are strings of TOML."""
    fields = {"name": name, "transport": transport, **more}
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items() if key != "headers"]
    lines += [f"headers = {{ X-Key = {json.dumps(more['headers'])} }}"] if "headers" in more else []
    return "\n".join(["[[environment.mcp_servers]]", *lines, ""])


def test_servers_of_a_task_are_tools_of_the_model(play: Play):
    toml = NO_NETWORK + server("toy", "stdio", command="python3", args=["-c", MCP_STDIO])
    done = play(
        calling("toy__add", a=2, b=40),
        calling("toy__count"),
        calling("toy__count"),
        calling("toy__odd_name"),
        bash("sleep 0.5", timeout=0.05),
        calling("toy__count"),
        bash("touch /done.txt", reset=True),
        calling("toy__count"),
        calling("toy__add", a=2),
        calling("toy__add", a=1, b=1),
        calling("toy__none"),
        toml=toml,
    )
    first, *counts, odd = said(done)[:4]
    assert (first, counts) == ("42", ['{"calls": 1}', '{"calls": 2}'])
    assert odd.startswith("Error: [image: it is not shown")
    assert said(done)[5] == '{"calls": 3}', "also while a command is running"
    # What the agent has ended is started again, and so is a server that fell over what it was asked.
    assert said(done)[7] == '{"calls": 1}'
    assert said(done)[8:10] == ["Error: toy__add: the server has ended", "2"]
    assert "there are: execute_bash" in said(done)[10] and done.reward == 1.0


def test_an_agent_that_breaks_its_servers_keeps_its_score(play: Play):
    toml = NO_NETWORK + server("toy", "stdio", command="python3", args=["-c", MCP_STDIO])
    toml += "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n"
    files = {f"steps/{name}/instruction.md": "Add." for name in ("one", "two")}
    broken = bash("touch done.txt; rm -rf /tmp/rollout-mcp; touch /tmp/rollout-mcp")
    done = play(broken, "Done.", calling("toy__count"), toml=toml, files=files)
    assert done.reward == 1.0 and said(done)[1].startswith("Error: toy__count: ")


HOSTILE = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    name = message.get("params", {}).get("name")
    tools = [{"name": one, "description": "x" * 9000} for one in ("huge", "deep", "silent", "odd", "fine")]
    result = json.dumps({"tools": [*tools, 7, {"name": None}, {"name": "huge"}]})
    if name == "silent":
        continue
    elif name == "huge":
        result = json.dumps({"content": [{"type": "text", "text": "y" * (2 << 20)}]})
    elif name == "deep":
        result = '{"content": ' + "[" * 100000 + "]" * 100000 + "}"
    elif name == "odd":
        print(json.dumps({"jsonrpc": "2.0", "id": 77, "method": "sampling/createMessage"}), flush=True)
        assert json.loads(sys.stdin.readline())["error"]["code"] == -32601
        result = '{"content": [1, {"type": "text", "text": 5}, {"resource": {"text": "kept"}}]}'
    elif name == "fine":
        result = json.dumps({"content": [{"type": "text", "text": "z" * 40000}]})
    print('{"jsonrpc": "2.0", "id": %s, "result": %s}' % (json.dumps(message["id"]), result), flush=True)
"""


def test_whatever_a_server_answers_is_text_in_bounds(play: Play):
    toml = NO_NETWORK + server("bad", "stdio", command="python3", args=["-c", HOSTILE])
    calls = [calling(f"bad__{name}") for name in ("huge", "deep", "silent", "odd", "fine")]
    done = play(*calls, toml=toml, limits=Limits(tool_timeout_s=2))
    huge, deep, silent, odd, fine = said(done)
    assert "too long" in huge
    assert deep.startswith("Error: bad__deep: ") and silent.startswith("Error: bad__silent: no answer")
    shown = "it is not shown, for this model reads text alone]"
    assert odd == f"[None: {shown}\n[text: {shown}\nkept"
    assert 30_000 < len(fine) < 30_100 and "characters left out" in fine
    assert len(done.trajectory.chain.segments[0].token_ids) < 30_000


def test_a_server_that_tells_no_tools_is_the_tasks_fault(play: Play):
    toml = NO_NETWORK + server("gone", "streamable-http", url="http://localhost:1/mcp")
    toml += server("none", "stdio", command="no-such-program")
    why = refused_in_run(play(toml=toml))
    assert "mcp_servers: gone: it does not tell its tools" in why and "Connection refused" in why


def refused_in_run(done: Any) -> str:
    assert done.drop and done.error.stage == "run"
    return refused(done)
