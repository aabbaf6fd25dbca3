"""The contract of programs that drive a rollout: where one elsewhere finds the model; what was captured."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class AgentAccess(BaseModel):
    """What a program that runs elsewhere needs to drive one attempt of a rollout.

    The keys end with the attempt. They are secrets: in no record, and not shown where the object is printed.
    """

    base_url: str
    """Of the model, without a path."""
    api_key: str = Field(repr=False)
    """For calls of the model."""
    reward_key: str = Field(repr=False)
    """For `POST <base_url>/v1/reward` and `/v1/finish`, which the program itself need not know."""
    attempt: int

    def environment(self) -> dict[str, str]:
        """The variables by which the SDKs of OpenAI, Anthropic and Google find the model."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "GOOGLE_GEMINI_BASE_URL": self.base_url,
            "GEMINI_API_KEY": self.api_key,
        }


class Asked(BaseModel):
    """What a program asked of sampling in some of its calls. It is told here alone: the request's holds."""

    parameters: dict[str, Any]
    """By their names in the program's dialect; empty = it asked for nothing."""
    calls: int


class CallRecord(BaseModel):
    """When a call of the model or of a tool was, and where: to be looked at, nothing is trained on it."""

    kind: Literal["model", "tool"]
    id: str
    """The `call_id` of its segments, or the id of the tool call."""
    name: str = ""
    """The tool's."""
    at: float
    """When it began, seconds since the epoch."""
    seconds: float
    """Until its answer; of the model with the wait for room on a backend."""
    backend: str | None = None
    """Which one answered."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Those of them that the engine had in its cache; None = it does not tell."""


class Receipt(BaseModel):
    """What was captured of a program's model calls, for who wants to check a trajectory."""

    harness: str
    engines: list[str]
    """`<engine> <backend id>` of all that answered, in order of first use."""
    model: str | None = None
    """As the first of them names it."""
    versions: list[str] = Field(default_factory=list)
    """Policy versions that sampled, in order of first use."""
    calls: int
    """Model calls that were answered from sampled tokens."""
    retries: int = 0
    """Repetitions of calls that were joined with the first one, not sampled again."""
    refused: int = 0
    """Calls that were answered without the model: past a limit, or with an error."""
    branches: int = 0
    """Calls that repeated no earlier conversation, and so began a chain of their own, the first included."""
    drift: int = 0
    """Attached calls whose prompt was not, id by id, what is stored of the conversation: always 0."""
    sampled_tokens: int = 0
    share_delivered: float = 1.0
    """Share of the sampled tokens that are in chains to be trained on."""
    asked: list[Asked] = Field(default_factory=list)
    """What the program asked of sampling, in order of first use; at most 32, further ones are left out."""
    reward_source: Literal["handler", "program"] = "handler"
    """Who scores the rollout: its handler, or the program from elsewhere that posted a reward."""
    digest: str = ""
    """SHA-256 chained over the calls in order: of the digest before, the ids sent and the ids sampled."""
