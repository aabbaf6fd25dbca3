"""A router whose model says what a test wrote: for tests of the loop alone, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rollout.schema import Backend, Limits, RolloutRequest, SamplingParams
from services.engines.base import Completion, SampleRequest
from tests.helpers.stack import CHECKPOINT
from workers.agent.loop import AgentLoop
from workers.agent.tools import Arguments, Finish, Observation, Tool, ToolContext


@dataclass
class Said:
    """One call's answer."""

    ids: list[int]
    finish: str = "stop"
    spans: list[tuple[str | None, int, int]] | None = None
    """None = all by version `v1`."""
    routed_experts: Any = None
    cached_tokens: int | None = None
    backend: Backend | None = None
    """The backend that takes the rollout over for this call; None = the same."""


def backend(**fields: Any) -> Backend:
    """A backend of the demo model."""
    defaults = {
        "id": "b",
        "url": "http://b",
        "model": "demo",
        "tokenizer": str(CHECKPOINT),
        "max_model_len": 2048,
    }
    return Backend(**{**defaults, "logprobs_mode": "processed_logprobs", "policy_version": "v1", **fields})


class ScriptedRouter:
    """Gives the answers in order, and keeps what it was asked.

    An answer longer than `max_tokens` is cut there, as an engine does.
    """

    def __init__(
        self, answers: Iterable[Said | Callable[[list[int]], Said]], at: Backend | None = None
    ) -> None:
        self._answers = iter(answers)
        self.backend: Backend | None = None
        self._first = at or backend()
        self.prompts: list[list[int]] = []
        self.calls: list[SampleRequest] = []
        self.timeouts_s: list[float] = []
        self.completions: list[Completion] = []

    async def acquire(self, *_: Any, **__: Any) -> Backend:
        self.backend = self._first
        return self._first

    async def generate(self, request: SampleRequest, timeout_s: float) -> Completion:
        answer = next(self._answers)
        answer = answer(request.prompt) if callable(answer) else answer
        self.backend = answer.backend or self.backend
        self.prompts.append(list(request.prompt))
        self.calls.append(request)
        self.timeouts_s.append(timeout_s)
        ids, finish = list(answer.ids), answer.finish
        if len(ids) > request.max_tokens:
            ids, finish = ids[: request.max_tokens], "length"
        number = len(self.prompts)
        completion = Completion(
            call_id=request.call_id,
            token_ids=ids,
            logprobs=[-number - i / 1000 for i in range(len(ids))],
            finish_reason=finish,
            spans=answer.spans or [("v1", 0, len(ids))],
            cached_tokens=answer.cached_tokens,
            routed_experts=answer.routed_experts,
        )
        self.completions.append(completion)
        return completion


class LookArgs(Arguments):
    text: str = ""
    times: int = 1


class Look(Tool):
    """Answers with the text it was given, as often as wished."""

    name = "look"
    description = "Look."
    Args = LookArgs

    async def call(self, args: LookArgs, ctx: ToolContext) -> Observation:
        return Observation(args.text * args.times)


def loop(
    router: ScriptedRouter, *, limits: dict[str, Any] | None = None, index: int = 0, **sampling: Any
) -> AgentLoop:
    """An agent loop with the tools `look` and `finish`, not advertised; `index` is that within its group."""
    request = RolloutRequest(
        handler="scripted", limits=Limits(**(limits or {})), sampling=SamplingParams(**sampling)
    )
    return AgentLoop(request, index, router, (Look(), Finish()), advertise_tools=False)
