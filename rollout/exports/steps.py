"""What all formats need of a record: a chain as steps, its times, and names for files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rollout.schema import Chain, Message, Rollout, ToolCall, Trajectory
from rollout.schema.agents import CallRecord


@dataclass
class Step:
    """A message and, where the model said it in this chain, the call that it was said in."""

    message: Message
    call_id: str = ""
    sampled: Chain = field(default_factory=Chain)
    """What was sampled, a segment for each policy version; empty: the message was given."""
    prompt: int = 0
    """Ids of the chain before the call."""
    copied: bool = False
    """Whether another chain has it too, or the rollout that it left, and what was sampled up to it."""
    results: list[Message] = field(default_factory=list)
    """What the tools that it called have answered."""

    @property
    def stop(self) -> str:
        """The engine's word for the end of the call."""
        return self.sampled.segments[-1].finish_reason or "unknown"

    @property
    def tools(self) -> dict[str | None, ToolCall]:
        """Its tool calls by id; some programs give them none."""
        return {call.id or f"call-{number}": call for number, call in enumerate(self.message.tool_calls)}


def steps_of(chain: Chain, unread: Iterable[Message] = (), shared: int = 0) -> list[Step]:
    """The conversation of a chain, then what no call has read. Answers are with the calls of the tools.

    Args:
        shared: Ids of its beginning that a fork has of another rollout; see `Trajectory.shared_ids`.
    """
    steps: list[Step] = []
    # What another chain sampled is given here, under the id of its call.
    copied = max((n for n, s in enumerate(chain.segments) if s.call_id and not s.sampled), default=-1)
    prompt = 0
    for number, segment in enumerate(chain.segments):
        if not segment.sampled:
            _add(steps, segment.messages, number <= copied or prompt < shared)
        else:
            if not (steps and segment.call_id and steps[-1].call_id == segment.call_id):
                empty = Chain.model_construct(segments=[])
                steps.append(Step(Message(role="assistant"), segment.call_id or "", empty, prompt))
            steps[-1].sampled.segments.append(segment)
            steps[-1].message = [steps[-1].message, *segment.messages][-1]
        prompt += len(segment.token_ids)
    _add(steps, [*chain.texts, *unread], False)
    return steps


def _add(steps: list[Step], messages: Iterable[Message], copied: bool) -> None:
    for message in messages:
        if message.role == "tool" and steps and steps[-1].message.role == "assistant":
            steps[-1].results.append(message)
        else:
            steps.append(Step(message, copied=copied))


def timed(trajectory: Trajectory, kind: str) -> dict[str | None, CallRecord]:
    """The calls of a kind that were timed, by id; in records of older releases there are none."""
    return {call.id: call for call in trajectory.calls if call.kind == kind}


def stages(rollout: Rollout) -> list[tuple[str, int, float, float]]:
    """The states that it went through: name, attempt, begin and end."""
    ends = [*(event.at for event in rollout.timeline[1:]), end_of(rollout)]
    pairs = zip(rollout.timeline, ends, strict=False)  # there may be no timeline
    return [(e.state.value, e.attempt, e.at, max(end, e.at)) for e, end in pairs if not e.state.terminal]


def stage(rollout: Rollout, state: str) -> tuple[float, float] | None:
    """When its last attempt was in a state."""
    spans = [times for name, number, *times in stages(rollout) if (name, number) == (state, rollout.attempt)]
    return (spans[0][0], spans[-1][1]) if spans else None


def end_of(rollout: Rollout) -> float:
    """When it ended, or what is known last; seconds since the epoch."""
    return rollout.finished_at or rollout.updated_at


def iso(at: float) -> str:
    """Seconds since the epoch as ISO 8601."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def agent_of(rollout: Rollout) -> str:
    """Who drove the turns: a program's harness, or the service's own loop."""
    return rollout.request.agent.harness if rollout.request.agent else "rollout-service"


def facts(rollout: Rollout) -> dict[str, Any]:
    """What formats have no field for, as JSON."""
    kept = {"group_id", "index", "handler", "state", "attempt", "reward", "reward_components", "drop"}
    kept |= {"role_rewards", "drop_reason", "finish_reason", "policy_versions", "backend", "metrics"}
    kept |= {"stage_seconds", "error"}
    known = rollout.model_dump(mode="json", include=kept, exclude_none=True)
    known |= {"moved": rollout.moved} if rollout.moved else {}
    known |= {"origin": rollout.request.origin.model_dump()} if rollout.request.origin else {}
    known |= {"rollout_id": rollout.id, "task": rollout.request.task, "tags": list(rollout.request.tags)}
    if rollout.trajectory is not None:
        more = {"warnings", "receipt", "tokenizer", "logprobs_mode", "branch"}
        known |= rollout.trajectory.model_dump(mode="json", include=more, exclude_none=True)
    return known


def file_name(text: str) -> str:
    """Text of a record as the name of a file: no path, and with a digest where it is not the text itself."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".")[:150] or "_"
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
