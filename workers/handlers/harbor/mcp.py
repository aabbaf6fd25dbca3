"""The MCP servers of a task as tools of the model. `inside/mcp_bridge.py` speaks with them in the sandbox."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.schema import new_id
from sandbox.client import TRUSTED_PYTHON, SandboxClient
from sandbox.errors import SandboxRequestError
from workers.agent.tools import Observation, Tool, ToolContext
from workers.agent.tools.base import sandbox_of
from workers.errors import TaskError
from workers.handlers.harbor.ready import TAIL
from workers.handlers.harbor.trial import Trial

BRIDGE = Path(__file__).parent / "inside" / "mcp_bridge.py"
HOME = "/tmp/rollout-mcp"
START_S = 90.0
"""More than the bridge gives the servers."""
TAKEN_S = 2.0
"""After which a request that the bridge has not taken says that it is gone."""
MOST_BYTES = 1 << 20
MAX_TEXT = 30_000
"""Characters of an answer that the model reads."""
MAX_DESCRIPTION, MAX_SCHEMA = 4000, 20_000
PAUSES_S = (0.005, 0.1)
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
_SELF = "import json; print(json.dumps(open('/proc/self/cmdline').read().split(chr(0))[:-3]))"


async def install(box: SandboxClient, trial: Trial) -> None:
    """Put the bridge into the sandbox, before anything of the task's runs there: nothing is started yet."""
    servers = []
    for server in trial.directory.config.environment.mcp_servers:
        told = server.model_dump(include={"name", "transport", "url", "command", "args", "headers"})
        servers.append({**told, "headers": trial.resolved(server.headers, "mcp_servers.headers")})
    if not servers:
        return
    # The interpreter of the sandbox's server, which any image has, as the shell can start it, too.
    argv = json.loads((await box.exec([TRUSTED_PYTHON, "-c", _SELF])).stdout)
    await box.write_file(f"{HOME}/mcp_bridge.py", BRIDGE.read_text())
    await box.write_file(f"{HOME}/servers.json", json.dumps(servers))
    await box.write_file(f"{HOME}/start.sh", shlex.join([*argv, f"{HOME}/mcp_bridge.py"]))


async def tools_of(box: SandboxClient, trial: Trial) -> list[Tool]:
    """Start the servers, and have their tools.

    Raises:
        TaskError: One does not start, or tells no tools.
    """
    servers = trial.directory.config.environment.mcp_servers
    if not servers:
        return []
    try:
        told = json.loads(await _start(box))
    except (ValueError, RecursionError) as error:
        raise TaskError(f"environment.mcp_servers: they cannot be started: {error}") from error
    tools: dict[str, Tool] = {}
    for server in servers:
        answer = told.get(server.name, {})
        if not isinstance(answer.get("result"), list):
            why = str(answer.get("error"))[:TAIL]
            raise TaskError(f"environment.mcp_servers: {server.name}: it does not tell its tools: {why}")
        for tool in answer["result"]:
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                made = McpTool(server.name, tool)
                tools.setdefault(made.name, made)
    return list(tools.values())


async def _start(box: SandboxClient) -> str:
    return (await box.bash(f"bash {HOME}/start.sh", START_S, max_output_chars=8 * MOST_BYTES)).output


class McpTool(Tool):
    """One tool of a server, by the name `<server>__<tool>`."""

    name = description = ""

    def __init__(self, server: str, told: dict[str, Any]) -> None:
        """`told`: as `tools/list` has it; the server's word, and bounded here."""
        self._server, self._tool = server, told["name"]
        self.name = _NO_NAME.sub("_", f"{server}__{told['name']}")[:64]  # type: ignore[misc]
        self.description = str(told.get("description") or "")[:MAX_DESCRIPTION]  # type: ignore[misc]
        schema = told.get("inputSchema")
        fits = isinstance(schema, dict) and len(json.dumps(schema)) <= MAX_SCHEMA
        self._schema = schema if fits else {"type": "object", "properties": {}}

    def spec(self) -> dict[str, Any]:
        """The tool in function-calling form, with the server's own schema."""
        function = {"name": self.name, "description": self.description, "parameters": self._schema}
        return {"type": "function", "function": function}

    async def __call__(self, arguments: dict[str, Any], ctx: ToolContext) -> Observation:
        """Ask the server, which checks the arguments itself. Whatever it answers is text."""
        params = {"name": self._tool, "arguments": arguments}
        asked = {"server": self._server, "method": "tools/call", "params": params, "timeout": ctx.timeout_s}
        try:
            answer = await _ask(sandbox_of(ctx, self), asked, ctx.timeout_s)
        except (SandboxRequestError, TimeoutError, ValueError, RecursionError) as error:
            return Observation(f"Error: {self.name}: {str(error) or 'no answer in time'}")
        if "error" in answer:
            return Observation(f"Error: {self.name}: {str(answer['error'])[:MAX_TEXT]}")
        return Observation(_shown(answer.get("result")))

    async def call(self, args: Any, ctx: ToolContext) -> Observation:
        raise NotImplementedError


async def _ask(box: SandboxClient, asked: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """A request to the bridge and its answer; a bridge that was ended is started again, once.

    Raises:
        SandboxRequestError: The shell is busy, so that it cannot be started again; the answer is too long.
        TimeoutError, ValueError, RecursionError: No answer came, or none that can be read.
    """
    clock = asyncio.get_running_loop().time
    name, began, pause = new_id(), clock(), PAUSES_S[0]
    await box.write_file(f"{HOME}/in/{name}", json.dumps(asked))
    may_start = True
    async with asyncio.timeout(timeout_s + TAKEN_S):
        while (await box.stat(f"{HOME}/out/{name}")).kind != "file":
            late = may_start and clock() - began > TAKEN_S
            if late and (await box.stat(f"{HOME}/in/{name}")).kind is not None:
                may_start = False
                await _start(box)
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1])
        answer = json.loads(await box.read_file(f"{HOME}/out/{name}", MOST_BYTES))
    if not isinstance(answer, dict):
        raise ValueError("an answer that is none")
    return answer


def _shown(result: Any) -> str:
    """A result as the model reads it."""
    result = result if isinstance(result, dict) else {}
    content = result.get("content")
    parts = [_part(part) for part in content] if isinstance(content, list) else []
    if not parts and result.get("structuredContent") is not None:
        parts = [json.dumps(result["structuredContent"])]
    text = "\n".join(parts) or "[no output]"
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - MAX_TEXT} characters left out ...]\n{text[-half:]}"
    return f"Error: {text}" if result.get("isError") is True else text


def _part(part: Any) -> str:
    part = part if isinstance(part, dict) else {}
    resource = part.get("resource") if isinstance(part.get("resource"), dict) else {}
    for text in (part.get("text"), resource.get("text"), part.get("uri")):
        if isinstance(text, str):
            return text
    return f"[{str(part.get('type'))[:40]}: it is not shown, for this model reads text alone]"


def described(trial: Trial) -> Sequence[str]:
    """Lines for a program that speaks with MCP servers by itself."""
    lines = []
    for server in trial.directory.config.environment.mcp_servers:
        how = server.url or shlex.join([server.command or "", *server.args])
        lines.append(f"MCP server {server.name} ({server.transport}): {how}")
    return lines
