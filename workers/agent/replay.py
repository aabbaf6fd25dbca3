"""A fixed list of actions in the place of a model: for debugging handlers and scorers without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.schema import Backend
from services.engines.base import Completion, SampleRequest
from workers.agent.codec import Codec, load_codec
from workers.errors import TaskError

MAX_MODEL_LEN = 131072
LOGPROB = 0.0
"""The log-prob of every token: nothing was sampled, each was certain."""


class Call(BaseModel):
    """One tool call of an action."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Action(BaseModel):
    """One turn of the agent, as a person writes it."""

    model_config = ConfigDict(extra="forbid")

    content: str = ""
    """What it says before the calls; may itself be raw text of the model's format."""
    tool_calls: list[Call] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The turn in the Hermes form of tool calls, which Qwen and many others speak."""
        calls = (
            f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
            for call in self.tool_calls
        )
        return "\n".join(filter(None, (self.content, *calls)))


def read_actions(path: Path) -> list[Action]:
    """The actions in a file: one a line, as JSON objects (`{"content", "tool_calls"}`) or strings.

    Raises:
        TaskError: A line is neither; it is named.
    """
    actions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                data = json.loads(line)
                actions.append(Action(content=data) if isinstance(data, str) else Action.model_validate(data))
            except (ValueError, ValidationError) as error:
                raise TaskError(f"{path}, line {number}: {error}") from None
    return actions


def encode(action: Action, codec: Codec, prompt: Sequence[int]) -> list[int]:
    """The ids that a model would have sampled for this action, the stop id included.

    Raises:
        TaskError: The model's format reads something else in them.
    """
    ids = [*codec.encode(action.text), codec.stop_token_ids[0]]
    read = [(call.name, call.arguments) for call in codec.parse(list(prompt), ids).message.tool_calls]
    if action.tool_calls and read != [(call.name, call.arguments) for call in action.tool_calls]:
        raise TaskError(
            f"{codec.name} does not read these calls in {action.text!r}; write the turn as text of its format"
        )
    return ids


class ReplayRouter:
    """Plays actions in order, in the place of a `BackendRouter`; behind the last one it only ends turns."""

    def __init__(self, actions: Iterable[Action], tokenizer: str) -> None:
        self._actions = iter(actions)
        self._path = tokenizer
        self.backend: Backend | None = None
        self.metrics: dict[str, float] = {}
        self.accepts: Callable[[Backend], Awaitable[str | None]] | None = None

    async def acquire(self, tokens: int = 1) -> Backend:
        """A backend that stands for the file of actions."""
        self.backend = self.backend or Backend(
            id="actions",
            url="http://localhost",
            model="actions",
            tokenizer=self._path,
            max_model_len=MAX_MODEL_LEN,
            logprobs_mode="processed_logprobs",
            policy_version="actions",
        )
        return self.backend

    async def generate(self, request: SampleRequest, timeout_s: float) -> Completion:
        """The next action as a completion."""
        codec = await asyncio.to_thread(load_codec, self._path)
        ids = encode(next(self._actions, Action()), codec, request.prompt)
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return Completion(
            call_id=request.call_id,
            token_ids=ids,
            logprobs=[LOGPROB] * len(ids),
            finish_reason="length" if cut else "stop",
            spans=[("actions", 0, len(ids))],
        )

    async def release(self) -> None:
        """Nothing is held."""
