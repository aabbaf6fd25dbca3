"""A stack as clients of ProRL-Agent-Server and of NeMo Gym find it, and what their tests share."""

from __future__ import annotations

import socket
from typing import Any

from rollout.schema import Rollout, State
from tests.helpers.keys import HEADER, metric
from tests.helpers.policy_script import Plans
from tests.helpers.stack import Stack, wait_until
from workers.agent.replay import Action, Call

PATIENCE_S = 120.0
SOLVED = (Action(tool_calls=[Call(name="calculator", arguments={"sum": "4 + 3"})]), r"It is \boxed{7}.")
"""A tool that there is not, answered with an error; then the answer. No sandbox is needed."""


class Service:
    """A stack whose only LLM server plays plans; it was registered by no one yet."""

    def __init__(self, stack: Stack, plans: Plans, engine_url: str) -> None:
        self.stack, self.url, self.client = stack, stack.url, stack.client
        self.address = f"{engine_url}/v1"
        self._plans = plans

    def asks(self, name: str, *actions: Action | str) -> str:
        """A question that the policy meets with these actions."""
        played = [Action(content=action) if isinstance(action, str) else action for action in actions]
        return f"What is 4 + 3? ({self._plans.add(name, played)})"


def hang_up(stack: Stack, body: str) -> None:
    """Send a `/process`, wait until it is parked, and go."""
    before = waiters(stack)
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        head = "POST /process HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + HEADER
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: waiters(stack) == before + 1, PATIENCE_S, "it to wait")
    wait_until(lambda: waiters(stack) == before, PATIENCE_S, "its place to be free")


def waiters(stack: Stack) -> float:
    return metric(stack.url, "rollout_gateway_waiters")


def rollouts_of(service: Service, instance_id: str, state: State | None = None) -> list[Rollout]:
    named = [
        rollout.id
        for rollout in service.client.list(limit=1000, state=state).rollouts
        if rollout.request.metadata.get("instance_id") == instance_id
    ]
    return [service.client.get(rollout_id) for rollout_id in named]


def solvable(service: Service, name: str, **more: Any) -> dict[str, Any]:
    asked = service.asks(name, *SOLVED)
    return {"data_source": "math", "instance_id": name, "problem": asked, "answer": "7"} | more


def too_long(service: Service, name: str) -> dict[str, Any]:
    """An instance whose prompt leaves the model no room."""
    return solvable(service, name) | {"problem": "1" * 70_000}
