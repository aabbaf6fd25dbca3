"""OpenEnv servers: one WebSocket an episode, with `reset`, `step` and the tools of those that have some."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from pydantic import Field

from rollout.trajectory import Message, ToolCall
from workers.agent.parsing import ParsedTurn
from workers.handlers.base import RunContext
from workers.handlers.environments import servers
from workers.handlers.environments.base import (
    EnvironmentFault,
    EnvironmentHandler,
    EnvironmentLost,
    EnvironmentTask,
    Opening,
    Step,
    ToolEnvironment,
)

ACT = "act"
"""Name of the one tool whose arguments are the action, where that is no single text."""
BUSY = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Codes of errors that another attempt may not meet."""


class OpenEnvTask(EnvironmentTask):
    """An episode at an OpenEnv server."""

    server: str = "openenv"
    """Its name among `ROLLOUT_ENVIRONMENT_SERVERS`."""
    prompt: str = ""
    """A system message before what the environment says."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Passed to its `reset`, beside the seed."""
    field: str | None = None
    """Field of the action that takes what the model says; None = the only one that has to be given, if that
    is a text; else the model calls a tool."""


class _Session(ToolEnvironment):
    """An episode of one rollout."""

    def __init__(self, ctx: RunContext[OpenEnvTask]) -> None:
        super().__init__()
        self._url = servers.address(ctx.task.server)
        self._step_s = ctx.limits.tool_timeout_s
        self._http = servers.session(max(self._step_s, 120.0))
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._field: str | None = None
        self._has_tools = False

    async def reset(self, task: OpenEnvTask, seed: int) -> Opening:
        schema = (await servers.asked(self._http, "GET", f"{self._url}/schema")).get("action")
        if not isinstance(schema, dict) or not isinstance(fields := schema.get("properties", {}), dict):
            raise EnvironmentFault(f"{self._url}/schema tells of no action")
        try:
            self._socket = await self._http.ws_connect(
                f"{self._url}/ws", max_msg_size=servers.MAX_ANSWER_BYTES
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EnvironmentLost(f"{self._url}/ws: {type(error).__name__}: {error}") from error
        begun = await self._ask("reset", {"seed": seed, **task.reset}, max(self._step_s, 120.0))
        messages = [Message(role="system", content=task.prompt)] if task.prompt else []
        if text := _text(begun.get("observation")):
            messages.append(Message(role="user", content=text))
        if begun.get("done"):
            raise EnvironmentFault(f"{self._url}: the episode is over before the agent had a turn")
        if {"tool_name", "arguments"} <= fields.keys():
            return Opening(messages, await self._list_tools())
        needed = [name for name in schema.get("required", []) if name != "metadata"]
        only = needed[0] if len(needed) == 1 and fields.get(needed[0], {}).get("type") == "string" else None
        self._field = task.field or only
        if self._field:
            return Opening(messages)
        shown = {name: value for name, value in fields.items() if name != "metadata"}
        about = {
            "name": ACT,
            "description": "Act on the environment.",
            "parameters": schema | {"properties": shown},
        }
        return Opening(messages, [{"type": "function", "function": about}])

    async def _list_tools(self) -> list[dict[str, Any]]:
        self._has_tools = True
        listed = (await self._ask("step", {"type": "list_tools"}, self._step_s)).get("observation")
        tools = listed.get("tools") if isinstance(listed, dict) else None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvironmentFault(f"{self._url} lists its tools as {tools!r:.200}")
        return [
            {"function": tool | {"parameters": tool.get("input_schema") or {"type": "object"}}}
            for tool in tools
        ]

    async def step(self, turn: ParsedTurn) -> Step:
        if self._field is None:
            return await super().step(turn)
        return await self._act({self._field: turn.message.text}, "user")

    async def call(self, call: ToolCall) -> Step:
        if self._has_tools:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            return await self._act(action, "tool")
        if call.name != ACT:
            return Step([Message(role="tool", content=f"Error: no tool {call.name!r}; there is: {ACT}")])
        return await self._act(call.arguments, "tool")

    async def _act(self, action: dict[str, Any], role: str) -> Step:
        said = await self._ask("step", action, self._step_s, mistakes=True)
        # Its protocol has rewards that are true or false.
        reward = float(reward) if isinstance(reward := said.get("reward"), bool) else reward
        text = _text(said.get("observation"))
        return Step([Message(role=role, content=text or "[nothing]")], reward, said.get("done", False))

    async def _ask(
        self, kind: str, data: dict[str, Any], timeout_s: float, mistakes: bool = False
    ) -> dict[str, Any]:
        """What it observes. `mistakes`: an action that it cannot read is told to the model."""
        assert self._socket is not None
        try:
            await self._socket.send_json({"type": kind, "data": data})
            reply = await self._socket.receive(timeout_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EnvironmentLost(f"{self._url}: {kind}: {type(error).__name__}: {error}") from error
        if reply.type is aiohttp.WSMsgType.ERROR and isinstance(reply.data, aiohttp.WebSocketError):
            raise EnvironmentFault(f"{self._url}: {kind}: {reply.data}")
        if reply.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentLost(f"{self._url}: {kind}: the connection ended ({reply.type.name})")
        answer = servers.object_of(reply.data, self._url)
        told = answer.get("data")
        if answer.get("type") == "observation" and isinstance(told, dict):
            return told
        code = told.get("code") if isinstance(told, dict) else None
        if mistakes and code == "VALIDATION_ERROR":
            return {"observation": {"error": f"Error: {json.dumps(told.get('errors') or told)[:2000]}"}}
        fault = EnvironmentLost if code in BUSY else EnvironmentFault
        raise fault(f"{self._url}: {kind}: {str(answer)[:1000]}")

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.close()
        await self._http.close()


def _text(observation: Any) -> str:
    """An observation for the model: its one text, or all that it has as JSON."""
    if not isinstance(observation, dict):
        return "" if observation is None else str(observation)
    held = {k: v for k, v in observation.items() if k != "metadata" and v is not None and v != ""}
    texts = list(held.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps(held, ensure_ascii=False) if held else ""


class OpenEnv(EnvironmentHandler[OpenEnvTask]):
    """Plays an episode at an OpenEnv server; each step's reward is summed."""

    name = "openenv"
    Task = OpenEnvTask

    async def make(self, ctx: RunContext[OpenEnvTask]) -> _Session:
        return _Session(ctx)
