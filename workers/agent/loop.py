"""The agent loop: query the model, run the tools it called, until it ends or a limit does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from rollout.arrays import unpack_ids
from rollout.schema import Backend, RolloutRequest, new_id
from rollout.trajectory import FinishReason, Message, ToolCall, Trajectory
from sandbox.client import SandboxClient
from services.engines.base import Completion, SampleRequest
from services.state.turns.entries import Appended, Begun, Sampled, from_json
from workers.agent.cautions import logprob_warnings, takeover_warning
from workers.agent.codec import CodecError, load_codec, takeover_obstacle
from workers.agent.parsing import Malformed, ParsedTurn
from workers.agent.router import Router
from workers.agent.tokens import TokenBuffer, fit
from workers.agent.tools import Observation, Tool, ToolContext, by_name
from workers.agent.turns import RunDiverged, TurnLog

Compact = Callable[[Trajectory], Awaitable[list[Message] | None]]
"""Makes new messages of a history that fills the context; None = the rollout ends there."""

MAX_CHAINS = 8
"""Chains of one rollout, the first included: a compaction that never shortens must not go on for ever."""

TURN_SHARE = 8
MAX_TURN_ROOM = 1024
"""Ids kept free for the next turn when an observation is appended: one of `TURN_SHARE` of the context."""


class AgentLoop:
    """Drives one rollout and owns its trajectory, which is whole after every turn."""

    def __init__(
        self,
        request: RolloutRequest,
        index: int | str,
        router: Router,
        tools: Sequence[Tool] = (),
        advertise_tools: bool = True,
        log: TurnLog | None = None,
    ) -> None:
        """`log`: where turns are written, and read again that a former worker made; None = nowhere."""
        self.trajectory = Trajectory()
        self.metrics: dict[str, float] = {}
        self._request = request
        self._index = index
        self._router = router
        self._log = log or TurnLog()
        self.around_call: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        """Around each call of the model."""
        self.trajectory.calls = self._log.calls.records
        self._advertises = advertise_tools
        self._offer(tools)
        self._malformed_in_row = self._repeated = 0
        self._last_action: object = None

    async def run(
        self,
        messages: list[Message],
        sandbox: SandboxClient | None = None,
        compact: Compact | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> FinishReason:
        """Turns from the given messages to the end; answers why it ended. `tools`: as `start` has them."""
        await self.start(messages, tools)
        return await self.go_on(sandbox, compact)

    async def go_on(self, sandbox: SandboxClient | None, compact: Compact | None = None) -> FinishReason:
        """Turns from where the conversation is to the end; answers why it ended."""
        limits = self._request.limits
        while (number := self.trajectory.turns + 1) <= limits.max_turns:
            if self.budget <= 0 and (ended := await self._exhausted(compact)):
                return ended
            turn, completion = await self.query()
            if completion.finish_reason == "length":
                # The turn has no end: nothing can be appended to it without inventing tokens.
                if self.budget > 0:
                    return FinishReason.LENGTH
                if ended := await self._exhausted(compact if number < limits.max_turns else None):
                    return ended
                continue
            if not turn.attempts:
                return FinishReason.STOP
            observations = await self.act(turn, sandbox)
            answers = self.answers(turn, observations)
            # What no call will read is noted and not appended: see `TokenBuffer`.
            self.trajectory.unread = answers
            if observations[-1].finished:
                return FinishReason.STOP
            if self._malformed_in_row >= limits.max_malformed_calls:
                return FinishReason.MALFORMED_CALLS
            if self._repeats(turn, observations):
                return FinishReason.REPEATED_ACTIONS
            if number == limits.max_turns:
                break
            # What was done before is gone through as it was, whatever the room is now.
            full = self._log.peek(Begun) if self._log.repeats else not self._leaves_room(answers)
            if compact and full and await self._start_over(compact):
                continue
            if not self.append(answers):
                return FinishReason.CONTEXT_LENGTH
        return FinishReason.TURN_LIMIT

    async def place(self) -> Backend:
        """The rollout's backend, for turns that are driven elsewhere."""
        backend = await self._router.acquire()
        self.trajectory.model, self.trajectory.logprobs_mode = backend.model, backend.logprobs_mode
        self.trajectory.warnings += logprob_warnings(self._request.sampling, backend.logprobs_mode)
        return backend

    async def start(self, messages: list[Message], tools: Sequence[Tool] | None = None) -> None:
        """Take a backend and render the prompt. `tools`: of this task; None = the handler's.

        Raises:
            InfrastructureError: There is no backend, or it cannot go on with what a former one began.
            CodecError: Its model's tokenizer or chat format cannot be used, or not with these tools.
            ValueError: Two tools have one name.
        """
        if tools is not None:
            self._offer(tools)
        backend = await self._router.acquire()
        before = self._log.take(Begun)
        if before is not None:
            # The router asks, before the next call, whether the one that it has can take over from this one.
            backend = self._router.backend = Backend.model_validate_json(before.backend)
        try:
            self._codec = await asyncio.to_thread(load_codec, backend.tokenizer)
            if self._tools:
                await asyncio.to_thread(self._codec.check_tools, bool(self._advertised))
            if before is None:
                ids = self._codec.render(messages, self._advertised)
            else:
                messages, ids = from_json(before.messages), unpack_ids(before.ids)
        except CodecError as error:
            raise type(error)(f"backend {backend.id}, tokenizer {backend.tokenizer!r}: {error}") from error
        if before is None:
            described = backend.model_dump_json(exclude_defaults=True)
            self._log.add_begun(ids, messages, backend=described, tokenizer=self._codec.digest)
        elif before.tokenizer != self._codec.digest:
            raise RunDiverged(
                f"the turns so far are of tokenizer {before.tokenizer}, here is {self._codec.digest}"
            )
        self._backend, self._cache_salt = backend, backend.cache_salt
        self._max_model_len = backend.max_model_len
        trajectory = self.trajectory
        trajectory.tokenizer = self._codec.digest
        trajectory.model, trajectory.logprobs_mode = backend.model, backend.logprobs_mode
        trajectory.warnings += logprob_warnings(self._request.sampling, backend.logprobs_mode)
        # The router asks before it moves the rollout: ids are exact only on the same tokenizer.
        self._router.accepts = lambda other: asyncio.to_thread(takeover_obstacle, self._backend, other)
        self._buffer = TokenBuffer(self._codec, trajectory)
        self._buffer.start(messages, ids)

    def _offer(self, tools: Sequence[Tool]) -> None:
        self._tools = by_name(tools)
        self._advertised = [tool.spec() for tool in tools] if self._advertises else []

    async def query(self, max_tokens: int | None = None) -> tuple[ParsedTurn, Completion]:
        """One model call that samples at most `max_tokens` ids; None = what the budget leaves.

        Raises:
            ValueError: The budget is used up.
        """
        max_tokens = self.budget if max_tokens is None else max_tokens
        if max_tokens <= 0:
            raise ValueError(f"no room for a turn ({self._room()[1]}): look at `budget` before a query")
        if before := self._log.take(Sampled):
            completion = before.completion
            turn = ParsedTurn.of(Message.model_validate_json(before.message), before.malformed)
            if before.backend:
                self._router.backend = Backend.model_validate_json(before.backend)
            self._note_takeover()
        else:
            self._log.settle()
            await self._log.pause()
            async with self.around_call():
                completion = await self._sample(max_tokens)
                turn = self._codec.parse(self._buffer.ids, completion.token_ids)
                other = self._backend.model_dump_json(exclude_defaults=True) if self._note_takeover() else ""
                call = self._log.calls.model(completion, self._backend.id, len(self._buffer.ids))
                self._log.add_sampled(completion, turn, call, backend=other)
                # Before anybody acts on it.
                await self._log.flush()
        self._buffer.add_sampled(completion, turn)
        self._count("model_calls")
        self._count("sampled_tokens", len(completion.token_ids))
        if completion.cached_tokens is not None:
            self._count("cached_prompt_tokens", completion.cached_tokens)
        return turn, completion

    async def _sample(self, max_tokens: int) -> Completion:
        request = SampleRequest(
            call_id=new_id(),
            prompt=self._buffer.ids,
            max_tokens=max_tokens,
            sampling=self._request.sampling,
            seed=self._seed(self.trajectory.turns),
            stop_token_ids=frozenset(self._codec.stop_token_ids),
            cache_salt=self._cache_salt,
            end_ids=self._codec.end_ids,
            vocab_size=self._codec.vocab_size,
        )
        # What the tools answered is written with the round trip in which the router asks for its place.
        writing = self._log.flush_soon()
        try:
            completion = await self._router.generate(request, self._request.limits.call_timeout_s)
        except BaseException:
            writing.cancel()
            raise
        await writing
        return completion

    async def act(self, turn: ParsedTurn, sandbox: SandboxClient | None) -> list[Observation]:
        """Run the calls of a turn in order; one observation each, up to the one that ends the rollout.

        What is malformed is answered, for the policy to learn the format.
        """
        any_fine = len(turn.malformed) < len(turn.attempts)
        self._malformed_in_row = 0 if any_fine else self._malformed_in_row + 1
        self._count("malformed_calls", len(turn.malformed))
        observations: list[Observation] = []
        for place, attempt in enumerate(turn.attempts):
            if isinstance(attempt, ToolCall):
                self._count("tool_calls" if attempt.name in self._tools else "unknown_tool_calls")
            observation = self._log.take_answer(place)
            if observation is None:
                with self._log.call():
                    observation = await self._answer(attempt, sandbox)
                self._log.add_answer(observation, attempt)
            observations.append(observation)
            if observation.finished:
                break
        return observations

    async def _answer(self, attempt: ToolCall | Malformed, sandbox: SandboxClient | None) -> Observation:
        if isinstance(attempt, Malformed):
            return Observation(f"Error: malformed tool call ({attempt.reason})")
        tool = self._tools.get(attempt.name)
        if tool is None:
            known = ", ".join(dict.fromkeys(tool.name for tool in self._tools.values())) or "none"
            return Observation(f"Error: no tool {attempt.name!r}; there are: {known}")
        timeout_s = self._request.limits.tool_timeout_s
        return await tool(attempt.arguments, ToolContext(sandbox, timeout_s, attempt.id))

    def _repeats(self, turn: ParsedTurn, observations: list[Observation]) -> bool:
        """Whether the agent is stuck: the same calls and the same answers, too often in a row."""
        calls = [(call.name, call.arguments) for call in turn.message.tool_calls]
        action = (calls, turn.places, [observation.text for observation in observations])
        self._repeated = self._repeated + 1 if action == self._last_action else 1
        self._last_action = action
        most = self._request.limits.max_repeated_actions
        return most is not None and self._repeated >= most

    def answers(self, turn: ParsedTurn, observations: list[Observation]) -> list[Message]:
        """Observations as messages, each for its own call, in the order of the calls."""
        calls = [attempt if isinstance(attempt, ToolCall) else None for attempt in turn.attempts]
        named = [{"tool_call_id": call.id, "name": call.name} if call else {} for call in calls]
        return [
            Message(role="tool", content=observation.text, **names)
            for names, observation in zip(named, observations, strict=False)
        ]

    def observe(self, turn: ParsedTurn, observations: list[Observation]) -> bool:
        """Append what the tools answered; False: the context has no room for it."""
        return self.append(self.answers(turn, observations))

    def append(self, messages: list[Message]) -> bool:
        """Append the environment's messages behind the last turn: tools' answers, a user's next words.

        What would leave no room for a turn is cut in its middle, with a note that says so. False:
        even so there is no room. The messages are then in `trajectory.unread`, and the chain ends
        with what was sampled.

        Raises:
            CodecError: The chat format cannot take them without rewriting what is there.
        """
        if before := self._log.take(Appended):
            messages, ids, cut = from_json(before.messages), unpack_ids(before.ids), before.cut
        else:
            messages, ids, cut = self._fitting(messages)
            self._log.add_appended(ids, messages, cut)
        if not ids:
            self.trajectory.unread = messages
            return False
        if cut:
            self._count("truncated_observations")
        self._buffer.add_observations(messages, ids)
        return True

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int], bool]:
        """Messages and ids for which the context has room, and whether they are cut; no ids: it has none."""
        room = self._max_model_len - len(self._buffer.ids)
        ids = self._buffer.bridge(messages)
        free = min(self._turn_room, room // 2)
        if len(ids) > room - free and (cut := fit(messages, self._buffer.bridge, room - free)):
            return *cut, True
        return messages, ids if len(ids) < room else [], False

    # -- a new chain -------------------------------------------------------------------------

    async def _exhausted(self, compact: Compact | None) -> FinishReason | None:
        """Why a rollout ends that may not sample any more; None: it goes on in a new chain."""
        reason = self._room()[1]
        if compact and reason is FinishReason.CONTEXT_LENGTH and await self._start_over(compact):
            return None
        return reason

    async def _start_over(self, compact: Compact) -> bool:
        """Go on from what the handler makes of the history, in a new chain; False: there is none."""
        trajectory = self.trajectory
        if self._log.repeats:
            before = self._log.peek(Begun) and self._log.take(Begun)
            if before:
                self._buffer.start(from_json(before.messages), unpack_ids(before.ids))
                self._count("compactions")
            return before is not None
        if len(trajectory.chains) >= MAX_CHAINS:
            self._warn(f"the context was compacted {MAX_CHAINS - 1} times, which is the limit")
            return False
        messages = await compact(trajectory)
        if not messages:
            return False
        ids = self._codec.render(messages, self._advertised)
        if len(ids) + self._turn_room > self._max_model_len:
            self._warn(
                f"compaction left {len(ids)} ids, too many for a context of {self._max_model_len} "
                f"with {self._turn_room} free for a turn"
            )
            return False
        self._log.add_begun(ids, messages)
        self._buffer.start(messages, ids)
        self._count("compactions")
        return True

    # -- budgets -----------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Ids the next call may sample. Computed here: engines clip or refuse, each in its way."""
        room = self._room()[0]
        return min(room, self._request.sampling.max_tokens or room)

    def _room(self) -> tuple[int, FinishReason]:
        """Ids that may be sampled before the rollout ends, and the reason for which it then does."""
        context = self._max_model_len - len(self._buffer.ids)
        most = self._request.limits.max_response_tokens
        if most is not None and most - self.trajectory.sampled_tokens < context:
            return most - self.trajectory.sampled_tokens, FinishReason.TOKEN_LIMIT
        return context, FinishReason.CONTEXT_LENGTH

    @property
    def _turn_room(self) -> int:
        """Ids that a turn should find free."""
        room = max(1, min(MAX_TURN_ROOM, self._max_model_len // TURN_SHARE))
        return min(room, self._request.sampling.max_tokens or room)

    def _leaves_room(self, messages: list[Message]) -> bool:
        """Whether a turn finds room behind these messages."""
        used = len(self._buffer.ids) + len(self._buffer.bridge(messages))
        return used + self._turn_room <= self._max_model_len

    def _seed(self, turn: int) -> int | None:
        """Another seed for each rollout of a group and each turn, all from the request's one."""
        seed = self._request.sampling.seed
        if seed is None:
            return None
        digest = hashlib.sha256(f"{seed}/{self._index}/{turn}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    # -- notes -------------------------------------------------------------------------------

    def _count(self, name: str, by: float = 1) -> None:
        self.metrics[name] = self.metrics.get(name, 0) + by

    def _warn(self, line: str) -> None:
        if line not in self.trajectory.warnings:
            self.trajectory.warnings.append(line)

    def _note_takeover(self) -> bool:
        """Whether another backend has answered than the one before."""
        backend = self._router.backend
        if backend is None or backend.id == self._backend.id:
            return False
        if line := takeover_warning(self._backend, backend, self.trajectory.turns + 1):
            self._warn(line)
        self._backend, self._max_model_len = backend, backend.max_model_len
        return True
