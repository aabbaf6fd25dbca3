"""`Environment`: a world that answers each turn, and the handler that plays a rollout in one.

A reward is only ever what the environment gave: one that fails, hangs or answers with what is none raises,
and its sample is dropped. It lives in RUN alone, and what it gave goes to EVAL among the rollout's numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rollout.schema import Stage
from rollout.trajectory import FinishReason, Message, ToolCall, Trajectory
from workers.agent.parsing import Malformed, ParsedTurn
from workers.agent.tools import Arguments, Observation, Tool, ToolContext
from workers.errors import HandlerError, InfrastructureError, TaskError
from workers.handlers.base import AgentHandler, EvalContext, Reward, RunContext

MAX_TEXT = 1 << 20
"""Characters that an environment may answer to a turn; a context holds fewer."""
MAX_MESSAGES = 1000
MAX_TOOLS = 512
SCORE_MARGIN_S = 60.0
"""Before RUN's own limit, or a tenth of it, the turns end, so that there is time to score them."""
REWARD, PART = "env_reward", "env_part_"
"""Names of the reward, and beginnings of those of its parts, among the rollout's numbers."""


class EnvironmentFault(TaskError):
    """An environment cannot be made of the task, or answered with what no sample can be made of."""


class EnvironmentLost(InfrastructureError):
    """An environment hangs, died or cannot be reached: another attempt may go better."""


@dataclass
class Opening:
    """How an episode begins."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """In the function-calling form; none: the environment reads the text of each turn."""


@dataclass
class Step:
    """What an environment answers to one turn."""

    messages: list[Message] = field(default_factory=list)
    """Of the roles `user` and `tool`; none where the episode is over and there is nothing to say."""
    reward: float | None = None
    """None = this step gave none."""
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """For the log."""


class Environment(ABC):
    """One episode of one rollout, which owns it: nothing is shared, and each method is awaited alone."""

    parts: dict[str, Any]
    """Parts of the reward by name, for dashboards: numbers, which are checked where they are noted."""

    def __init__(self) -> None:
        self.parts = {}

    def noted(self, reward: object) -> dict[str, float]:
        """The reward and its parts as numbers of the rollout.

        Raises:
            EnvironmentFault: One of them is none.
        """
        parts = {PART + str(name)[:100]: checked_reward(part, name) for name, part in self.parts.items()}
        return {REWARD: checked_reward(reward, "the episode"), **parts}

    @abstractmethod
    async def reset(self, task: Any, seed: int) -> Opening:
        """Begin the episode.

        Raises:
            EnvironmentFault: There is none for this task.
            EnvironmentLost: It did not come about; another attempt may do.
        """

    @abstractmethod
    async def step(self, turn: ParsedTurn) -> Step:
        """Answer a turn of the model."""

    async def score(self, trajectory: Trajectory) -> float | None:
        """The reward, whoever ended the episode. None (the default): the sum of the steps'."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """End all that the episode holds; also called where `reset` failed or the rollout is cancelled."""


class ToolEnvironment(Environment):
    """An environment that is acted on by calls of its tools; a turn without any is the agent's last word."""

    @abstractmethod
    async def call(self, call: ToolCall) -> Step:
        """Answer one call; the text of the messages is what the tool says."""

    async def said(self, turn: ParsedTurn) -> Step:
        """Answer a turn without a call. Default: the episode is over."""
        return Step(done=True)

    async def step(self, turn: ParsedTurn) -> Step:
        """All calls of a turn in their order, up to the one that ends the episode."""
        if not turn.attempts:
            return await self.said(turn)
        total = Step()
        for attempt in turn.attempts:
            if isinstance(attempt, Malformed):
                total.messages.append(
                    Message(role="tool", content=f"Error: malformed tool call ({attempt.reason})")
                )
                continue
            step = await self.call(attempt)
            text = "\n".join(message.text for message in step.messages)
            total.messages.append(
                Message(role="tool", content=text, tool_call_id=attempt.id, name=attempt.name)
            )
            total.reward = _added(total.reward, step.reward)
            total.info |= step.info
            total.done = step.done
            if step.done is not False:  # what is no answer to that is judged by the loop
                break
        return total


def _added(total: float | None, more: float | None) -> float | None:
    return total if more is None else checked_reward(more, "a step") + (total or 0.0)


def checked_reward(value: object, what: str) -> float:
    """A reward as a number.

    Raises:
        EnvironmentFault: It is none, or is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvironmentFault(f"the reward of {what} is {value!r:.200}, which is no finite number")
    return float(value)


class _Offered(Tool):
    """A tool that an environment describes. The environment answers its calls."""

    Args = Arguments

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self.name = spec["function"]["name"]  # type: ignore[misc]
        self.description = spec["function"].get("description") or ""  # type: ignore[misc]

    async def call(self, args: Any, ctx: ToolContext) -> Observation:
        raise HandlerError(f"{self.name}: a tool of an environment is not called by the loop")

    def spec(self) -> dict[str, Any]:
        return self._spec


def offered(specs: Sequence[dict[str, Any]]) -> list[Tool]:
    """Tools as the loop offers them to the model.

    Raises:
        EnvironmentFault: One is not of the function-calling form, or two have one name.
    """
    if len(specs) > MAX_TOOLS:
        raise EnvironmentFault(f"the environment has {len(specs)} tools; at most {MAX_TOOLS} are offered")
    tools: dict[str, Tool] = {}
    for spec in specs:
        function = spec.get("function") if isinstance(spec, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(function.get("parameters", {}), dict):
            raise EnvironmentFault(f"the environment describes a tool in no known form: {spec!r:.200}")
        if name in tools:
            raise EnvironmentFault(f"the environment has two tools named {name!r}")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        shown = {
            "name": name,
            "description": str(function.get("description") or ""),
            "parameters": parameters,
        }
        tools[name] = _Offered({"type": "function", "function": shown})
    return list(tools.values())


class EnvironmentTask(BaseModel):
    """What the tasks of all environments have."""

    model_config = ConfigDict(extra="forbid")
    seed: int | None = Field(default=None, ge=0, lt=1 << 31)
    """Of the episode; None = made of the request's seed, or else of the group: all of one meet one world."""


TaskT = TypeVar("TaskT", bound=EnvironmentTask)


class EnvironmentHandler(AgentHandler[TaskT]):
    """Plays a rollout in an environment. A kind of them is a subclass with `name`, `Task` and `make`."""

    repeatable = (Stage.INIT, Stage.EVAL)
    """A lost worker's world is lost with it: RUN begins another attempt."""
    needs_reward: ClassVar[bool] = True
    """Whether an episode that is over and gave no reward at all is a fault, or worth 0."""

    @abstractmethod
    async def make(self, ctx: RunContext[TaskT]) -> Environment:
        """The environment of a rollout, not yet reset."""

    async def opening(self, ctx: RunContext[TaskT]) -> list[Message]:
        """Raises:
        TaskError: A program asks to drive the turns, which an environment has to answer.
        """
        raise TaskError(f"agent: {self.name} answers each turn itself, no program can drive a rollout in it")

    def seed(self, ctx: RunContext[TaskT]) -> int:
        """Seed of the episode, the same for all rollouts of a group and all their attempts."""
        if ctx.task.seed is not None:
            return ctx.task.seed
        given = ctx.request.sampling.seed
        digest = hashlib.sha256(str(ctx.group_id if given is None else given).encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    async def run(self, ctx: RunContext[TaskT]) -> FinishReason:
        """RUN: turns until the environment says done or a limit ends them, and the reward of it."""
        limit = ctx.limits.run_timeout_s
        left_s = limit - ctx.spent_s - min(SCORE_MARGIN_S, limit / 10)
        episode = _Episode(ctx, await self.make(ctx), self.name)
        try:
            try:
                async with asyncio.timeout(left_s) as scope:
                    opening = await episode.reset(self.seed(ctx))
                    reason = await episode.turns(opening)
            except TimeoutError:
                if not scope.expired():
                    raise
                reason = FinishReason.TIME_LIMIT
            if episode.begun:
                ctx.metrics |= await episode.reward(self.needs_reward)
        finally:
            # Also where this is cancelled: nobody else knows of its processes and connections.
            await asyncio.shield(episode.close())
        return reason

    async def evaluate(self, ctx: EvalContext[TaskT]) -> Reward:
        """EVAL: what the environment gave.

        Raises:
            InfrastructureError: RUN ended before it had given anything.
        """
        if REWARD not in ctx.metrics:
            raise EnvironmentLost(
                f"{self.name}: RUN ended with {ctx.finish_reason} before there was a reward"
            )
        parts = {
            name.removeprefix(PART): value for name, value in ctx.metrics.items() if name.startswith(PART)
        }
        return Reward(ctx.metrics[REWARD], parts)


class _Episode:
    """One rollout in its environment: the loop, its limits and its numbers."""

    def __init__(self, ctx: RunContext[Any], environment: Environment, kind: str) -> None:
        self._ctx, self._environment, self._kind = ctx, environment, kind
        self.begun = False
        self._total: float | None = None
        self._done = False
        self._malformed_in_row = self._repeated = 0
        self._last: object = None

    async def reset(self, seed: int) -> Opening:
        self._ctx.metrics |= {"env_seed": seed, "env_steps": 0, "env_s": 0.0}
        opening = await self._timed("reset", self._environment.reset(self._ctx.task, seed))
        if not isinstance(opening, Opening) or not opening.messages:
            raise EnvironmentFault(f"{self._kind}: the episode begins without a message")
        check_messages(opening.messages, ("system", "user", "assistant", "tool"))
        self.begun = True
        return opening

    async def turns(self, opening: Opening) -> FinishReason:
        """The loop: query, step, append, until one of them is the end."""
        agent, limits = self._ctx.agent, self._ctx.limits
        await agent.start(opening.messages, offered(opening.tools))
        for number in range(1, limits.max_turns + 1):
            if agent.budget <= 0:
                return self._exhausted()
            turn, completion = await agent.query()
            if completion.finish_reason == "length":
                # It has no end, so it is no action.
                return FinishReason.LENGTH if agent.budget > 0 else self._exhausted()
            step = await self._step(turn)
            agent.trajectory.unread = step.messages
            if step.done:
                return FinishReason.STOP
            if self._malformed_in_row >= limits.max_malformed_calls:
                return FinishReason.MALFORMED_CALLS
            if self._repeats(turn, step):
                return FinishReason.REPEATED_ACTIONS
            if number < limits.max_turns and not agent.append(step.messages):
                return FinishReason.CONTEXT_LENGTH
        return FinishReason.TURN_LIMIT

    async def _step(self, turn: ParsedTurn) -> Step:
        metrics = self._ctx.metrics
        step = await self._timed("step", self._environment.step(turn))
        if not isinstance(step, Step) or not isinstance(step.done, bool):
            raise EnvironmentFault(f"{self._kind}: a step answered {step!r:.200}")
        check_messages(step.messages, ("user", "tool"))
        if not step.done and not step.messages:
            raise EnvironmentFault(f"{self._kind}: a step says nothing, though the episode goes on")
        self._total, self._done = _added(self._total, step.reward), step.done
        metrics["env_steps"] += 1
        calls = len(turn.message.tool_calls)
        metrics["tool_calls"] = metrics.get("tool_calls", 0) + calls
        metrics["malformed_calls"] = metrics.get("malformed_calls", 0) + len(turn.malformed)
        self._malformed_in_row = self._malformed_in_row + 1 if turn.malformed and not calls else 0
        self._ctx.log.debug(
            "environment step",
            kind=self._kind,
            reward=step.reward,
            done=step.done,
            info=repr(step.info)[:500],
        )
        return step

    async def _timed(self, what: str, call: Any) -> Any:
        began = time.monotonic()
        try:
            return await call
        finally:
            self._ctx.metrics["env_s"] += time.monotonic() - began

    def _exhausted(self) -> FinishReason:
        most, used = self._ctx.limits.max_response_tokens, self._ctx.agent.trajectory.sampled_tokens
        return FinishReason.TOKEN_LIMIT if most is not None and used >= most else FinishReason.CONTEXT_LENGTH

    def _repeats(self, turn: ParsedTurn, step: Step) -> bool:
        """Whether the agent is stuck: the same action and the same answer, too often in a row."""
        calls = [(call.name, call.arguments) for call in turn.message.tool_calls]
        action = (turn.message.text, calls, turn.places, [message.text for message in step.messages])
        self._repeated = self._repeated + 1 if action == self._last else 1
        self._last = action
        most = self._ctx.limits.max_repeated_actions
        return most is not None and self._repeated >= most

    async def reward(self, needed: bool) -> dict[str, float]:
        """What the episode is worth, and parts of it."""
        value = await self._timed("score", self._environment.score(self._ctx.agent.trajectory))
        value = self._total if value is None else value
        if value is None and self._done and needed:
            raise EnvironmentFault(f"{self._kind}: the episode is over, and gave no reward")
        # One that the agent did not bring to its end gave what its steps did.
        return self._environment.noted(0.0 if value is None else value)

    async def close(self) -> None:
        try:
            await self._environment.close()
        except Exception as error:
            self._ctx.log.warning("an environment did not close", kind=self._kind, error=repr(error))


def check_messages(messages: object, roles: Sequence[str]) -> None:
    """Refuse what a record or a context could not hold.

    Raises:
        EnvironmentFault: They are no messages of these roles, or too many, or too long.
    """
    if not isinstance(messages, list) or not all(isinstance(message, Message) for message in messages):
        raise EnvironmentFault(f"an environment answers with messages, not {messages!r:.200}")
    wrong = {message.role for message in messages} - set(roles)
    if wrong:
        raise EnvironmentFault(f"an environment's messages are of {', '.join(roles)}; got {', '.join(wrong)}")
    size = sum(len(message.text) for message in messages)
    if size > MAX_TEXT or len(messages) > MAX_MESSAGES:
        raise EnvironmentFault(
            f"an environment answered {len(messages)} messages of {size} characters; at most {MAX_MESSAGES} "
            f"and {MAX_TEXT} are read"
        )
