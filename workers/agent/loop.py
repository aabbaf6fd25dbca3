"""The agent loop: query the model, run the tools it called, until it ends or a limit does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from rollout.schema import Backend, RolloutRequest, new_id
from rollout.trajectory import FinishReason, Message, Trajectory
from sandbox.client import SandboxClient
from workers.agent.codec import CodecError, ParsedTurn, load_codec
from workers.agent.llm import Completion
from workers.agent.router import BackendRouter
from workers.agent.tokens import TokenBuffer
from workers.agent.tools import Observation, Tool, ToolContext, by_name
from workers.errors import InfrastructureError


class AgentLoop:
    """Drives one rollout and owns its trajectory, which is whole after every turn."""

    def __init__(
        self,
        request: RolloutRequest,
        index: int,
        router: BackendRouter,
        tools: Sequence[Tool] = (),
        advertise_tools: bool = True,
    ) -> None:
        self.trajectory = Trajectory()
        self.metrics: dict[str, float] = {}
        self._request = request
        self._index = index
        self._router = router
        self._tools = by_name(tools)
        self._advertised = [tool.spec() for tool in tools] if advertise_tools else []
        self._malformed_in_row = 0

    async def run(self, messages: list[Message], sandbox: SandboxClient | None = None) -> FinishReason:
        """Turns from the given messages to the end; answers why it ended."""
        await self.start(messages)
        for _ in range(self._request.limits.max_turns):
            budget = self._budget()
            if budget <= 0:
                return self._out_of_budget
            turn, completion = await self.query(budget)
            if completion.finish_reason == "length":
                # The turn has no end: nothing can be appended without inventing tokens.
                return self._out_of_budget if self._budget() <= 0 else FinishReason.LENGTH
            if not turn.message.tool_calls and not turn.malformed:
                return FinishReason.STOP
            observations = await self.act(turn, sandbox)
            if any(observation.finished for observation in observations):
                return FinishReason.STOP
            if self._malformed_in_row >= self._request.limits.max_malformed_calls:
                return FinishReason.MALFORMED_CALLS
            self.observe(turn, observations)
        return FinishReason.TURN_LIMIT

    async def start(self, messages: list[Message]) -> None:
        """Take a backend and render the prompt.

        Raises:
            InfrastructureError: There is no backend, or its tokenizer cannot be used here.
        """
        backend = await self._router.acquire()
        try:
            codec = await asyncio.to_thread(load_codec, backend.tokenizer)
        except CodecError as error:
            raise InfrastructureError(str(error)) from error
        self.trajectory.tokenizer = codec.digest
        self._stop_token_ids = codec.stop_token_ids
        self._cache_salt = backend.policy_version
        self._max_model_len = backend.max_model_len
        self._describe(backend)
        self._buffer = TokenBuffer(codec, self.trajectory)
        self._buffer.start(messages, self._advertised)

    async def query(self, max_tokens: int) -> tuple[ParsedTurn, Completion]:
        """One model call."""
        turn_number = self.trajectory.turns
        completion = await self._router.generate(
            self._buffer.ids,
            self._request.sampling,
            max_tokens=max_tokens,
            seed=self._seed(turn_number),
            stop_token_ids=self._stop_token_ids,
            call_id=new_id(),
            cache_salt=self._cache_salt,
            timeout_s=self._request.limits.call_timeout_s,
        )
        turn = self._buffer.add_sampled(completion)
        self._count("model_calls")
        self._count("sampled_tokens", len(completion.token_ids))
        if completion.cached_tokens is not None:
            self._count("cached_prompt_tokens", completion.cached_tokens)
        return turn, completion

    async def act(self, turn: ParsedTurn, sandbox: SandboxClient | None) -> list[Observation]:
        """Run the calls of a turn in order. What is malformed is answered, for the policy to learn."""
        self._malformed_in_row = self._malformed_in_row + 1 if turn.malformed else 0
        context = ToolContext(sandbox=sandbox, timeout_s=self._request.limits.tool_timeout_s)
        observations = []
        for call in turn.message.tool_calls:
            tool = self._tools.get(call.name)
            if tool is None:
                known = ", ".join(dict.fromkeys(tool.name for tool in self._tools.values())) or "none"
                observations.append(Observation(f"Error: no tool {call.name!r}; there are: {known}"))
                self._count("unknown_tool_calls")
                continue
            self._count("tool_calls")
            observations.append(await tool(call.arguments, context))
            if observations[-1].finished:
                break
        self._count("malformed_calls", len(turn.malformed))
        observations += [Observation(f"Error: malformed tool call ({line})") for line in turn.malformed]
        return observations

    def observe(self, turn: ParsedTurn, observations: list[Observation]) -> None:
        """Append what the tools answered."""
        calls = turn.message.tool_calls
        self._buffer.add_observations(
            [
                Message(
                    role="tool",
                    content=observation.text,
                    tool_call_id=calls[i].id if i < len(calls) else None,
                    name=calls[i].name if i < len(calls) else None,
                )
                for i, observation in enumerate(observations)
            ]
        )

    # -- budgets -----------------------------------------------------------------------------

    def _budget(self) -> int:
        """Ids the next call may sample. Computed here: engines clip or refuse, each in its way."""
        context = self._max_model_len - len(self._buffer.ids)
        self._out_of_budget = FinishReason.CONTEXT_LENGTH
        budget = context
        most = self._request.limits.max_response_tokens
        if most is not None and most - self.trajectory.sampled_tokens < context:
            self._out_of_budget = FinishReason.TOKEN_LIMIT
            budget = most - self.trajectory.sampled_tokens
        per_call = self._request.sampling.max_tokens
        return min(budget, per_call) if per_call is not None else budget

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

    def _describe(self, backend: Backend) -> None:
        trajectory, sampling = self.trajectory, self._request.sampling
        trajectory.model = backend.model
        trajectory.logprobs_mode = backend.logprobs_mode
        warnings = trajectory.warnings
        if backend.logprobs_mode == "raw_logprobs" and sampling.temperature != 1.0:
            warnings.append("raw log-probs ignore the temperature: start the engine with processed_logprobs")
        if sampling.top_p < 1.0 or sampling.top_k > 0:
            warnings.append(
                "top_p or top_k renormalise log-probs; a full-vocabulary trainer cannot match them"
            )
