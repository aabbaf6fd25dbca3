"""One rollout of a task, in this process, with words that are given in the place of a model's.

The stages are the service's own, and so is the handler. No engine and no tokenizer takes part: the trajectory
has messages and no ids.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.schema import Rollout, RolloutRequest, new_id
from rollout.trajectory import Chain, FinishReason, Message, Segment
from services.engines.base import Completion
from services.settings import Settings
from workers.agent.loop import AgentLoop
from workers.agent.parsing import ParsedTurn
from workers.agent.replay import ReplayRouter
from workers.handlers.base import AgentHandler, RunContext
from workers.handlers.oracle import Knows, NoOracle, Says, Solves
from workers.inprocess import InProcess
from workers.task_checks.leaks import Searched, search

NOTHING = "done."
NOTHING_TURNS = 2
"""Turns of doing nothing: an environment would go on asking."""
SEED = 0
"""Of the rollouts, so that an environment that is made anew for each is the same."""


class Reciter(AgentLoop):
    """Says what it was given, turn by turn, and its last words again where it is asked once more."""

    def __init__(self, ctx: RunContext[Any], handler: AgentHandler[Any], words: Sequence[str]) -> None:
        super().__init__(ctx.request, ctx.index, ReplayRouter([], ""), handler.tools)
        self.trajectory, self.metrics = ctx.agent.trajectory, ctx.metrics
        self._words = self._spoken(words)

    @staticmethod
    def _spoken(words: Sequence[str]) -> Iterator[str]:
        yield from words
        while True:
            yield words[-1]

    @property
    def budget(self) -> int:
        return 1

    async def start(self, messages: list[Message], tools: Any = None) -> None:
        self.trajectory.chains.append(Chain())
        self.append(messages)

    async def query(self, max_tokens: int | None = None) -> tuple[ParsedTurn, Completion]:
        message, call_id = Message(role="assistant", content=next(self._words)), new_id()
        said = Segment(role="assistant", token_ids=[], sampled=True, logprobs=[], call_id=call_id)
        self.trajectory.chain.segments.append(said.model_copy(update={"messages": [message]}))
        return ParsedTurn(message), Completion(call_id, [], [], "stop", [])

    def append(self, messages: list[Message]) -> bool:
        self.trajectory.chain.segments.append(Segment(role="user", token_ids=[], messages=messages))
        return True


@dataclass
class Played:
    """What came of a rollout."""

    rollout: Rollout = None  # type: ignore[assignment]
    """Ended."""
    no_oracle: str | None = None
    """Why nothing was played that solves the task."""
    searched: Searched | None = None
    """How the sandbox was looked through; None = it was not."""

    @property
    def seconds(self) -> float:
        return sum(self.rollout.stage_seconds.get(stage, 0.0) for stage in ("init", "run", "eval"))


def has_oracle(handler: AgentHandler[Any]) -> bool:
    """Whether tasks of a handler can say how they are solved."""
    return isinstance(handler, Solves | Says)


async def play_oracle(handler: AgentHandler[Any], request: RolloutRequest, settings: Settings) -> Played:
    """Play what solves the task."""
    played = Played()

    async def run(ctx: RunContext[Any]) -> FinishReason:
        try:
            if isinstance(handler, Solves):
                ctx.agent = Reciter(ctx, handler, [NOTHING])
                await ctx.agent.start([])
                return await handler.solve(ctx)
            said = handler.solution(ctx.task) if isinstance(handler, Says) else None
            said = await said if inspect.isawaitable(said) else said
            if said is None:
                raise NoOracle("the task brings no solution")
        except NoOracle as error:
            played.no_oracle = str(error)
            raise
        ctx.agent = Reciter(ctx, handler, [said] if isinstance(said, str) else said)
        return await handler.run(ctx)

    return await _play(handler, request, settings, run, played)


async def play_nothing(
    handler: AgentHandler[Any], request: RolloutRequest, settings: Settings, *, look: bool, thorough: bool
) -> Played:
    """Play an agent that says that it is done, and `look` through its sandbox for what is hidden."""
    played = Played()

    async def run(ctx: RunContext[Any]) -> FinishReason:
        ctx.agent = Reciter(ctx, handler, [NOTHING])
        if isinstance(handler, Knows):
            ctx.task = handler.known(ctx.task)
        reason = await handler.run(ctx)
        if look and ctx.sandbox is not None:
            # Behind the turns: it ends what runs in the sandbox, which a task may need.
            played.searched = await search(ctx.sandbox, handler, ctx.task, thorough)
        return reason

    turns = min(NOTHING_TURNS, request.limits.max_turns)
    limits = request.limits.model_copy(update={"max_turns": turns})
    return await _play(handler, request.model_copy(update={"limits": limits}), settings, run, played)


async def _play(
    handler: AgentHandler[Any], request: RolloutRequest, settings: Settings, run: Any, played: Played
) -> Played:
    # Of the instance, and so of no other rollout that this process has.
    player = copy.copy(handler)
    player.run = run  # type: ignore[method-assign]
    player.uses_model = False  # type: ignore[misc]
    sampling = request.sampling.model_copy(update={"seed": SEED})
    one = request.model_copy(update={"n": 1, "sampling": sampling, "agent": None})
    (played.rollout,) = await InProcess(player, settings=settings).run(one)
    return played
