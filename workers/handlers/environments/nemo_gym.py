"""Resource servers of NeMo Gym: `/seed_session`, a tool each, and `/verify`, which gives the reward."""

from __future__ import annotations

import re
import time
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from rollout.adapters.nemo_gym import TOKENS, output_items
from rollout.trajectory import Message, ToolCall, Trajectory
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
    checked_reward,
)

RESERVED = {"verify", "seed_session", "close_session", "aggregate_metrics", "mcp"}
_ROLES = {"developer": "system"}


class NemoGymTask(EnvironmentTask):
    """A row of a NeMo Gym data set; what its verifier reads stays as it is."""

    model_config = ConfigDict(extra="allow")
    server: str = "nemo_gym"
    """Name of the resource server among `ROLLOUT_ENVIRONMENT_SERVERS`."""
    responses_create_params: dict[str, Any] = Field(min_length=1)
    """`input`, `tools` … as in the row."""


class _ResourceServer(ToolEnvironment):
    """A session of one rollout at a resource server."""

    def __init__(self, ctx: RunContext[NemoGymTask]) -> None:
        super().__init__()
        self._url = servers.address(ctx.task.server)
        # A seed that the row has may be one that its verifier reads.
        self._row = ctx.task.model_dump(exclude={"server", *(("seed",) if ctx.task.seed is None else ())})
        self._id, self._step_s = ctx.rollout_id, ctx.limits.tool_timeout_s
        self._http = servers.session(max(self._step_s, 120.0))
        self._tools: list[dict[str, Any]] = []

    async def reset(self, task: NemoGymTask, seed: int) -> Opening:
        params = task.responses_create_params
        messages = _messages(params)
        tools = params.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvironmentFault("task.responses_create_params.tools is no list of objects")
        self._tools = [tool for tool in tools if tool.get("type", "function") == "function"]
        await servers.asked(self._http, "POST", f"{self._url}/seed_session", self._row)
        return Opening(messages, [{"type": "function", "function": tool} for tool in self._tools])

    async def call(self, call: ToolCall) -> Step:
        known = [tool.get("name") for tool in self._tools]
        if call.name not in known or call.name in RESERVED or not re.fullmatch(r"[\w-]+", call.name):
            text = f"Error: no tool {call.name!r}; there are: {', '.join(map(str, known)) or 'none'}"
        else:
            # Whatever the status: servers tell a model of its mistakes by any.
            url = f"{self._url}/{call.name}"
            _, body = await servers.request(self._http, "POST", url, call.arguments, self._step_s)
            text = body.decode(errors="replace")
        return Step([Message(role="tool", content=text)])

    async def score(self, trajectory: Trajectory) -> float:
        chain = trajectory.chain
        items = output_items(chain, self._id, trajectory.unread)
        params = self._row["responses_create_params"]
        response = {
            "id": f"resp_{self._id}",
            "created_at": int(time.time()),
            "model": trajectory.model or "",
            "object": "response",
            # A verifier reads what was said, not in which ids.
            "output": [{key: item[key] for key in item.keys() - TOKENS} for item in items],
            "parallel_tool_calls": True,
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": params.get("tools") or [],
        }
        verdict = await servers.asked(
            self._http, "POST", f"{self._url}/verify", self._row | {"response": response}
        )
        if verdict.get("mask_sample"):
            raise EnvironmentLost(f"/verify masks the sample: {verdict.get('failure_reason')!r:.500}")
        if isinstance(parts := verdict.get("reward_components"), dict):
            self.parts = parts
        return checked_reward(verdict.get("reward"), "/verify")

    async def close(self) -> None:
        await self._http.close()


def _messages(params: dict[str, Any]) -> list[Message]:
    """The input of a row as messages."""
    given = params.get("input")
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    lead = params.get("instructions")
    messages = [Message(role="system", content=lead)] if isinstance(lead, str) and lead else []
    try:
        for item in given:
            content = item["content"]
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            messages.append(Message(role=_ROLES.get(item["role"], item["role"]), content=text))
    except (KeyError, TypeError, ValidationError) as error:
        raise EnvironmentFault(
            f"task.responses_create_params.input cannot be read: {error!r:.500}"
        ) from error
    return messages


class NemoGym(EnvironmentHandler[NemoGymTask]):
    """Works with the tools of a NeMo Gym resource server, whose verifier gives the reward."""

    name = "nemo_gym"
    Task = NemoGymTask

    async def make(self, ctx: RunContext[NemoGymTask]) -> _ResourceServer:
        return _ResourceServer(ctx)
