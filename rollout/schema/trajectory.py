"""The canonical record of what an engine read and sampled, in token ids.

Invariants, checked by the one mutator `Chain.append`:
every sampled id has exactly one finite log-prob; no other id has one; the concatenation of a
chain's segments is the prompt that the engine saw at the last call plus what it then sampled.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.schema.agents import CallRecord, Receipt
from rollout.schema.branches import Branch

SCHEMA_VERSION = 1
"""Version of the record; a reader refuses a newer one instead of misreading it."""

Role = Literal["system", "user", "assistant", "tool"]

OtherRole = Literal["judge", "user", "opponent", "reference"]
"""What another policy than the agent's does in a rollout."""
OTHER_ROLES = frozenset(get_args(OtherRole))
ChainRole = Literal["agent", "sub_agent", "compaction", "auxiliary", "discarded"] | OtherRole
"""What a chain was for: the agent's own turns, those of an agent that it started, a summary of a history that
was to be forgotten, calls beside the task (a title, a topic), what was sampled and never used, and turns of
other policies."""
TRAINED: frozenset[ChainRole] = frozenset({"agent", "sub_agent", "compaction"})
"""Roles of chains that are to be learned from."""


class FinishReason(StrEnum):
    """Why the turns of a rollout ended. All but `error` and `cancelled` are scored."""

    STOP = "stop"
    """The agent finished by itself."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    """The budget of sampled tokens (`Limits.max_response_tokens`) is used up."""
    LENGTH = "length"
    """One model call hit its `max_tokens` in the middle of a message."""
    CONTEXT_LENGTH = "context_length"
    """The model's context has no room for another turn."""
    MALFORMED_CALLS = "malformed_calls"
    """Too many consecutive tool calls that could not be parsed."""
    REPEATED_ACTIONS = "repeated_actions"
    """The same calls got the same answers too many times in a row."""
    TIME_LIMIT = "time_limit"
    """`Limits.run_timeout_s` passed; the partial trajectory is kept."""
    SANDBOX_LIMIT = "sandbox_limit"
    """The agent used more than its sandbox may, and the sandbox was ended for it."""
    ERROR = "error"
    CANCELLED = "cancelled"


class TextPart(BaseModel):
    """One piece of a message's content. Other types (images) will be further members."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"] = "text"
    text: str


class ToolCall(BaseModel):
    """A call the model made, as parsed from the tokens it sampled."""

    id: str
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Message(BaseModel):
    """One chat message. `content` accepts a plain string and is kept as a list of parts."""

    role: Role
    content: list[TextPart] = Field(default_factory=list)
    reasoning: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("content"), str):
            text = data["content"]
            data = {**data, "content": [{"type": "text", "text": text}] if text else []}
        return data

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.content)

    def to_chat(self) -> dict[str, Any]:
        """The message in the form that chat templates and renderers take."""
        out: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        more = {"tool_call_id": self.tool_call_id, "name": self.name}
        return out | {name: value for name, value in more.items() if value}


class Segment(BaseModel):
    """A run of token ids of one origin: a prompt, a sampled answer, or new observations.

    A model call across a weight swap gives one segment per policy version, all with the same
    `call_id`; the message is on the last of them.
    """

    role: Role
    token_ids: list[int]
    sampled: bool = False
    """True: the engine sampled these ids (loss mask 1). False: they were given (loss mask 0)."""
    logprobs: list[float] | None = None
    """Natural-log probabilities, one per id; None where `sampled` is False."""
    policy_version: str | None = None
    """Version of the weights that sampled these ids; None where `sampled` is False."""
    finish_reason: str | None = None
    """The engine's own word for the end of the call (`stop`, `length`, `abort`)."""
    call_id: str | None = None
    routed_experts: Any = None
    """Expert choices of the whole call, opaque, on its last segment; None = the engine sent none."""
    messages: list[Message] = Field(default_factory=list)
    """What these ids say, for readers. Never encoded again."""

    @model_validator(mode="after")
    def check(self) -> Segment:
        """Raise ValueError unless the parallel lengths hold; called again when a chain takes it."""
        if not self.sampled:
            if self.logprobs is not None or self.policy_version is not None:
                raise ValueError("a segment that was not sampled has no log-probs and no policy version")
            if self.routed_experts is not None:
                raise ValueError("a segment that was not sampled has no routed experts")
            return self
        if self.logprobs is None or len(self.logprobs) != len(self.token_ids):
            have = "none" if self.logprobs is None else str(len(self.logprobs))
            raise ValueError(f"{len(self.token_ids)} sampled ids need as many log-probs; got {have}")
        # The sum is not finite where one of them is not, and is ten times quicker to look at.
        if not math.isfinite(sum(self.logprobs)) and not all(map(math.isfinite, self.logprobs)):
            raise ValueError("a log-prob is not finite")
        if self.role != "assistant":
            raise ValueError(f"sampled ids belong to the role 'assistant', not {self.role!r}")
        return self


class Chain(BaseModel):
    """Segments whose concatenation the engine saw as one growing context."""

    segments: list[Segment] = Field(default_factory=list)
    role: ChainRole = "agent"
    parent: int | None = None
    """Place among the trajectory's chains of the one that it left, or that started it. What it shares with
    that one was sampled there, and is given here: each sampled id has loss in one chain alone."""
    policy: str | None = None
    """Whose turns they are; None = of the policy that the rollout's request names."""
    tokenizer: str | None = None
    """As the trajectory's, which None stands for."""
    model: str | None = None
    """As the trajectory's, of a chain that names a policy."""
    trained: bool | None = None
    """Whether it is to be learned from; None = as its role says."""
    text_only: bool = False
    """True: its policy told no ids. It has no segments, and what was said is in `texts`."""
    texts: list[Message] = Field(default_factory=list)

    @property
    def teaches(self) -> bool:
        """Whether it is to be learned from."""
        return self.role in TRAINED if self.trained is None else self.trained

    def append(self, segment: Segment) -> None:
        """Add a segment; the only way a chain grows.

        Raises:
            ValueError: The segment is empty, breaks the parallel lengths, or samples before
                there is a prompt.
        """
        if not segment.token_ids:
            raise ValueError("a segment needs at least one token id")
        if segment.sampled and not self.segments:
            raise ValueError("a chain starts with a prompt, not with sampled ids")
        self.segments.append(segment.check())

    @property
    def token_ids(self) -> list[int]:
        """Every id of the chain, in order."""
        return [token for segment in self.segments for token in segment.token_ids]

    def _first_sampled(self) -> int:
        return next((i for i, s in enumerate(self.segments) if s.sampled), len(self.segments))

    def _response(self) -> list[Segment]:
        return self.segments[self._first_sampled() :]

    @property
    def prompt_ids(self) -> list[int]:
        """Ids before the first sampled one."""
        return [token for s in self.segments[: self._first_sampled()] for token in s.token_ids]

    @property
    def response_ids(self) -> list[int]:
        """Ids from the first sampled one on, observations included."""
        return [token for segment in self._response() for token in segment.token_ids]

    @property
    def loss_mask(self) -> list[int]:
        """Parallel to `response_ids`: 1 where the engine sampled the id."""
        return [int(s.sampled) for s in self._response() for _ in s.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Parallel to `response_ids`; 0.0 where the mask is 0."""
        return [value for s in self._response() for value in (s.logprobs or [0.0] * len(s.token_ids))]

    @property
    def policy_versions(self) -> list[str | None]:
        """Parallel to `response_ids`; None where the mask is 0."""
        return [s.policy_version for s in self._response() for _ in s.token_ids]


class Trajectory(BaseModel):
    """All chains of a rollout. One chain unless the handler rewrote its history."""

    schema_version: int = SCHEMA_VERSION
    chains: list[Chain] = Field(default_factory=list)
    finish_reason: FinishReason | None = None
    model: str | None = None
    tokenizer: str | None = None
    """Name or path of the tokenizer and the digest of its format, vocabulary and template."""
    logprobs_mode: str | None = None
    """What the engine's log-probs mean: `processed_logprobs`, `raw_logprobs` or None (unknown)."""
    warnings: list[str] = Field(default_factory=list)
    """What a trainer should know before it trusts the log-probs or the isolation."""
    unread: list[Message] = Field(default_factory=list)
    """Observations after the last turn that no model call has read, because a limit ended the rollout.
    They have no ids: there is nothing to train on."""
    artifacts: dict[str, str] = Field(default_factory=dict)
    """What the handler keeps of a rollout besides its turns, by name: a patch, a report of its tests."""
    receipt: Receipt | None = None
    """Of a rollout that a program drove."""
    branch: Branch | None = None
    """Of a fork."""
    calls: list[CallRecord] = Field(default_factory=list)
    """In the order in which they were answered; earlier releases kept none."""

    @model_validator(mode="after")
    def _refuse_newer(self) -> Trajectory:
        if self.schema_version > SCHEMA_VERSION:
            raise ValueError(
                f"trajectory has schema version {self.schema_version}; this release reads up to "
                f"{SCHEMA_VERSION}: upgrade rollout-service"
            )
        return self

    @property
    def own(self) -> list[Chain]:
        """The agent's chains, which come after those of other policies."""
        return [chain for chain in self.chains if chain.policy is None]

    @property
    def shared_ids(self) -> list[int]:
        """Of each chain the number of ids that a fork has of the rollout that it left."""
        left, shared = self.branch.tokens if self.branch else 0, []
        for chain in self.chains:
            length = sum(len(segment.token_ids) for segment in chain.segments) if chain.policy is None else 0
            shared.append(min(left, length))
            left -= shared[-1]
        return shared

    @property
    def chain(self) -> Chain:
        """The agent's last chain, the one that reached the end of the rollout.

        Raises:
            LookupError: It has made no model call yet.
        """
        if not self.chains or self.chains[-1].policy is not None:
            raise LookupError("the trajectory is empty: no model call was made")
        return self.chains[-1]

    @property
    def prompt_ids(self) -> list[int]:
        return self.chain.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        return self.chain.response_ids

    @property
    def loss_mask(self) -> list[int]:
        return self.chain.loss_mask

    @property
    def logprobs(self) -> list[float]:
        return self.chain.logprobs

    @property
    def policy_versions(self) -> list[str | None]:
        return self.chain.policy_versions

    @property
    def messages(self) -> list[Message]:
        """The messages of the agent's last chain, and what nobody read after it, for readers and scorers."""
        segments = self.own[-1].segments if self.own else []
        return [m for segment in segments for m in segment.messages] + self.unread

    @property
    def versions_used(self) -> list[str]:
        """Policy versions that sampled it, over the agent's chains, in order of first use."""
        sampled = (s for chain in self.own for s in chain.segments if s.sampled)
        return list(dict.fromkeys(s.policy_version for s in sampled if s.policy_version is not None))

    @property
    def turns(self) -> int:
        """Number of the agent's model calls, over its chains."""
        return len({s.call_id for chain in self.own for s in chain.segments if s.sampled})

    @property
    def sampled_tokens(self) -> int:
        """Number of ids that were sampled in the agent's chains."""
        return sum(len(s.token_ids) for chain in self.own for s in chain.segments if s.sampled)

    def final_text(self) -> str:
        """Text of the last assistant message, or the empty string."""
        said = (message.text for message in reversed(self.messages) if message.role == "assistant")
        return next(said, "")
