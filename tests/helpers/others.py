"""Other policies than the agent's, for handlers in one process: they say what a test wrote, or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from rollout.schema import Backend, Limits, Rollout, RolloutRequest
from rollout.trajectory import Message
from services.engines.base import Completion, SampleRequest
from services.engines.chat import TextCompletion, TextRequest
from services.settings import Settings
from services.state.rollouts.store import Claim
from workers.agent.codec import load_codec
from workers.agent.replay import Action, ReplayRouter
from workers.handlers.base import AgentHandler
from workers.inprocess import Actions, InProcess, demo_tokenizer


def said(*texts: str) -> list[Message]:
    """Messages of a user."""
    return [Message(role="user", content=text) for text in texts]


async def broken() -> None:
    """For `Source`: an error of the service's own, in which no code of a handler takes part."""
    raise KeyError("of the service's own")


class Source:
    """A policy's backend; a `workers.inprocess.Model`."""

    def __init__(
        self,
        *texts: str,
        say: Callable[[str], str] | None = None,
        fails: Callable[[], Awaitable[None]] | None = None,
        api: str = "generate",
        context: int = 100_000,
    ) -> None:
        """
        Args:
            texts: What it says in each conversation, in order.
            say: In their place, what it says to all that it was told.
            fails: Called in each call.
            api: `chat` = it is text only.
        """
        self.texts, self.say, self.fails, self.api, self.context = texts, say, fails, api, context
        self.asked: list[SampleRequest] = []
        self.held = self.released = 0

    def router(self, claim: Claim, http: aiohttp.ClientSession) -> Router:
        self.held += 1
        return Router(self)


class Router(ReplayRouter):
    """The way of one conversation to a source."""

    def __init__(self, source: Source) -> None:
        super().__init__([Action(content=text) for text in source.texts], demo_tokenizer())
        self._source = source

    async def acquire(self, tokens: int = 1) -> Backend:
        source, backend = self._source, await super().acquire(tokens)
        self.backend = backend.model_copy(update={"api": source.api, "max_model_len": source.context})
        return self.backend

    async def generate(self, request: SampleRequest, timeout_s: float) -> Completion:
        source = self._source
        source.asked.append(request)
        if source.fails:
            await source.fails()
        if source.say:
            self._actions = iter([Action(content=source.say(told(request)))])
        if not isinstance(request, TextRequest):
            return await super().generate(request, timeout_s)
        message = Message(role="assistant", content=next(self._actions).content)
        return TextCompletion(request.call_id, [], [], "stop", [], message=message, tokens=7)

    async def release(self) -> None:
        self._source.released += 1


def told(request: SampleRequest) -> str:
    """All that a call tells."""
    if isinstance(request, TextRequest):
        return "\n".join(message.text for message in request.messages)
    return load_codec(demo_tokenizer())._guard._tokenizer.decode(request.prompt)


def played(
    handler: AgentHandler[Any],
    sources: dict[str, Source],
    *,
    agent: str = "2",
    task: dict[str, Any] | None = None,
    **request: Any,
) -> Rollout:
    """A rollout whose agent says one thing."""
    model = Actions([Action(content=agent)], demo_tokenizer())
    runner = InProcess(handler, model, Settings(retry_delay_s=0.01), sources)
    request = {"limits": Limits(max_attempts=2)} | request
    asked = RolloutRequest(handler=handler.name, task=task or {}, **request)
    rollouts: Sequence[Rollout] = asyncio.run(runner.run(asked))
    return rollouts[0]
