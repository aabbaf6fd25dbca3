"""`POST /v1/chat/completions`: text in, text out, as any provider has it.

It tells no token ids, so what it says can neither be trained on nor be continued exactly. It serves judges
and simulated users, and no agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.schema import Message
from services.engines.base import BrokenAnswer, Call, Completion, SampleRequest
from services.engines.checks import the_choice
from services.engines.wire import UNREADABLE, Engine


@dataclass(frozen=True)
class TextRequest(SampleRequest):
    """A call in words; its `prompt` is empty."""

    messages: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class TextCompletion(Completion):
    """Its answer, without ids."""

    message: Message = field(default_factory=lambda: Message(role="assistant"))
    tokens: int = 0
    """How many were sampled, where that is told."""


class Chat(Engine):
    """The wire format of chat completions."""

    def generate(self, request: SampleRequest, *, stream: bool = False) -> Call:
        if not isinstance(request, TextRequest):
            raise BrokenAnswer(f"backend {self._backend.id} is text only: it takes no token ids")
        sampling = request.sampling
        said = [{k: v for k, v in m.to_chat().items() if k != "reasoning_content"} for m in request.messages]
        body: dict[str, Any] = {"model": self._backend.model, "messages": said}
        body |= {"max_tokens": request.max_tokens}
        # What is as it is anyway is left out: some models refuse to be told.
        body |= {} if sampling.temperature == 1 else {"temperature": sampling.temperature}
        body |= {} if sampling.top_p == 1 else {"top_p": sampling.top_p}
        return Call("/v1/chat/completions", body if request.seed is None else body | {"seed": request.seed})

    def read(self, answer: Mapping[str, Any], request: SampleRequest) -> TextCompletion:
        try:
            choice = the_choice(answer)
            said, finish = choice["message"], choice["finish_reason"]
            text, thought = said.get("content"), said.get("reasoning_content")
            tokens = (answer.get("usage") or {}).get("completion_tokens")
        except UNREADABLE as error:
            raise self._unreadable(error) from error
        if finish not in ("stop", "length") or not isinstance(text, str | None):
            raise BrokenAnswer(f"backend {self._backend.id}: an answer of text ended with {finish!r:.100}")
        if not text and finish == "stop":
            raise BrokenAnswer(f"backend {self._backend.id}: the answer says nothing")
        thought = thought if isinstance(thought, str) and thought else None
        message = Message(role="assistant", content=text or "", reasoning=thought)
        known = tokens if type(tokens) is int and tokens >= 0 else 0
        return TextCompletion(request.call_id, [], [], finish, [], message=message, tokens=known)

    def score(self, token_ids: list[int]) -> Call:
        raise BrokenAnswer(f"backend {self._backend.id} is text only: it tells no log-probs")

    def _fields(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        raise ValueError("a text-only backend tells no token ids")

    def _scores(self, answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        raise ValueError("a text-only backend tells no log-probs")
