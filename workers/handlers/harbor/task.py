"""What a request's `task` says of a Harbor task: which bundle, and how it is to be read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class HarborTask(BaseModel):
    """One task directory, by its bundle."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    bundle: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the bundle that holds the directory."""
    name: str = Field("", max_length=500)
    """Name of the task, for people."""
    reward_key: str | None = None
    """Which of several rewards is the score; None = the only one, or `reward`."""
    timeout_multiplier: float = Field(1.0, gt=0, le=100)
    """What the task's time limits (agent, verifier) are multiplied by."""
    image: str | None = None
    """Image in the place of the task's own."""
    trust_system: bool = False
    """Verify with what the agent changed of the system, too, such as its programs."""
