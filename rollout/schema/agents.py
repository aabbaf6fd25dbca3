"""The contract of programs that drive a rollout from elsewhere: where they find the model, and their keys."""

from __future__ import annotations

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
