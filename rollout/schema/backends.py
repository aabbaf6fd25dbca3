"""The contract of LLM backends: how they are registered, and what is known of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, computed_field

from rollout.schema.base import DEFAULT_POLICY, MAX_INT53, Identifier, Name, PolicyName, Strict

EngineName = Literal["vllm", "sglang", "embedded"]
EngineApi = Literal["generate", "completions", "sglang", "chat"]


class BackendRequest(Strict):
    """Registers an LLM server."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=512)]
    id: Identifier | None = None
    """None = derived from the URL, so that registering twice is harmless."""
    model: Name | None = None
    """Name to send with each call; None = the first of the server's `/v1/models`."""
    policies: dict[PolicyName, Name | None] | None = Field(default=None, min_length=1, max_length=64)
    """Each policy that it serves, with the model under which it does: an adapter's, or None = `model`. None =
    as before, or `default`."""
    text_only: bool = False
    """True: any server with `/v1/chat/completions`, such as a provider's. It tells no token ids, so it can
    serve judges and users, and no agent."""
    key: Identifier | None = None
    """Name of a file in the deployment's directory of engine keys, with what each call to it is to carry."""
    tokenizer: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Path or hub name; None = the model root that the server names."""
    logprobs_mode: Annotated[str, Field(pattern=r"^(raw|processed)_logprobs$")] | None = None
    """What the server was started with, if it does not say so itself."""
    capacity_tokens: int | None = Field(default=None, ge=1, le=MAX_INT53)
    """Tokens its key-value cache holds; None = as the server says."""
    max_rollouts: int | None = Field(default=None, ge=1, le=MAX_INT53)
    """Most rollouts on it at once; None = as many as its cache has room for."""
    drain: bool = False
    """True: it takes no new rollouts before its draining is ended; False = as before, if it is known."""


class DrainRequest(Strict):
    """Whether a backend takes new rollouts."""

    drain: bool = True
    """False: it takes some again."""


class BackendStats(BaseModel):
    """What an engine says of itself. None = it does not say."""

    at: float
    """Time of the probe, seconds since the epoch."""
    running: int | None = None
    """Calls being worked on."""
    waiting: int | None = None
    """Calls in the engine's own queue."""
    kv_usage: float | None = None
    """Share of the key-value cache in use, 0 to 1."""
    prompt_tokens: int | None = None
    """Prompt tokens looked up in the prefix cache since the engine started."""
    cached_tokens: int | None = None
    """Those of them that were found there."""
    generation_tokens: int | None = None
    """Tokens sampled since the engine started."""
    requests: int | None = None
    """Calls that ended since the engine started."""
    request_seconds: float | None = None
    """Seconds that they took in the engine, from arrival to end, added up."""

    @computed_field
    @property
    def cached_ratio(self) -> float | None:
        """Share of prompt tokens that came from the prefix cache."""
        if not self.prompt_tokens or self.cached_tokens is None:
            return None
        return self.cached_tokens / self.prompt_tokens


class Backend(BaseModel):
    """An LLM server, what is known of its health, and its present load."""

    id: str
    url: str
    model: str
    tokenizer: str
    max_model_len: int
    """Context of the model in tokens."""
    engine: EngineName = "vllm"
    api: EngineApi = "generate"
    """`generate` (`/inference/v1/generate`), `completions` (`/v1/completions`), `sglang` (`/generate`), or
    `chat` (`/v1/chat/completions`), which is text only."""
    logprobs_mode: str | None = None
    routed_experts: bool = False
    """True: it was started to return the expert choices of a mixture-of-experts model, if asked to."""
    capacity_tokens: int | None = None
    """Tokens its key-value cache holds; None = unknown, so it counts as never full."""
    max_rollouts: int | None = None
    key: str | None = None
    """Name of the file with what calls carry. What is in it is nowhere kept."""
    policies: dict[str, str] = Field(default_factory=dict)
    """Each policy that it serves, with its model there; empty in what earlier releases wrote: `default`."""
    policy: str = DEFAULT_POLICY
    """The one that `model` and `policy_version` are about: the first, or that of the rollout placed on it."""
    policy_version: str | None = None
    """Label of the weights it serves now."""
    versions: dict[str, str] = Field(default_factory=dict)
    """The same of each policy, where it is known."""
    rejected: dict[str, str] = Field(default_factory=dict)
    """Policies that nothing may be sampled from here, and why."""

    healthy: bool = True
    reachable: bool = True
    """False: it fails its health probes. It may be reachable and yet not healthy: its weights are wrong."""
    error: str | None = None
    """Why it is not healthy, or why its last weight update failed."""
    draining: bool = False
    """True: it takes no new rollouts; those on it go on."""
    paused: bool = False
    """True while its weights are exchanged: it takes no new rollouts, calls under way wait or end."""
    live_rollouts: int = 0
    load: float = 0.0
    """Score in the heap: reserved context tokens of its rollouts, or their number."""
    stats: BackendStats | None = None
    """What its own metrics said at the last probe."""

    @property
    def served(self) -> dict[str, str]:
        """Each policy that it serves, with its model there."""
        return self.policies or {DEFAULT_POLICY: self.model}

    @property
    def cache_salt(self) -> str | None:
        """What keeps an engine's cached prefixes apart: those of other weights, and of other policies."""
        if self.policy == DEFAULT_POLICY or self.policy_version is None:
            return self.policy_version
        return f"{self.policy}={self.policy_version}"

    def of(self, policy: str) -> Backend:
        """The backend as it serves a policy.

        Raises:
            KeyError: It does not serve that one.
        """
        about = {"model": self.served[policy], "policy": policy, "policy_version": self.versions.get(policy)}
        if self.reachable:
            about |= {"healthy": policy not in self.rejected, "error": self.rejected.get(policy)}
        return self.model_copy(update=about)
