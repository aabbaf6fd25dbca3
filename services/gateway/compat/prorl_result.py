"""The result object of ProRL-Agent-Server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from rollout.adapters.base import weightless
from rollout.schema import HandlerInfo, Rollout, State
from rollout.schema.calls import calls_of
from rollout.summary import SUCCESS
from rollout.trajectory import Chain, FinishReason, Message, Trajectory
from services.gateway.compat.calls import lacking

Ids = Literal["sampled", "all", "compact"]
"""Which messages carry ids: `sampled` those that were, each with its prompt; `compact` all, and none its
prompt; `all`, for trainers, who take the ids in a row for one context that ends with a turn of the model."""
RESULT = {
    "type": "object",
    "required": ["success", "filter", "resolved", "reward", "messages", "tools", "critical_error", "timing"],
    "properties": {
        **{name: {"type": "boolean"} for name in ("success", "filter", "resolved", "replayed")},
        **{name: {"type": "array", "items": {"type": "object"}} for name in ("messages", "tools")},
        "reward": {"type": ["number", "null"]},
        "score": {"type": "number"},
        "timing": {"type": "object"},
    },
}
"""JSON Schema of a result object, as far as clients may count on it."""


def result(rollout: Rollout, info: HandlerInfo | None, *, ids: Ids, replayed: bool = False) -> dict[str, Any]:
    """The result object of an ended rollout.

    Args:
        info: What its handler announced, for the tools; None = unknown.
        ids: Which messages carry ids.
        replayed: Somebody was given this rollout before, or could have been: it had ended before the call.
    """
    trajectory = rollout.trajectory
    why = lacking(rollout)
    dropped = rollout.drop or why is not None
    reward = None if dropped else rollout.reward
    reason = rollout.finish_reason
    names = rollout.request.metadata
    error = rollout.error
    if rollout.drop:
        why = f"{error.blame}: {error.message}" if error else rollout.drop_reason or rollout.state.value
    return {
        "instance_id": names.get("instance_id"),
        "trajectory_id": names.get("trajectory_id"),
        "git_patch": trajectory.artifacts.get("patch") if trajectory else None,
        "success": not dropped,
        "finish": not dropped and reason is FinishReason.STOP,
        "end_properly": not dropped and reason is not FinishReason.TIME_LIMIT and not _cut_off(rollout),
        "resolved": (reward or 0.0) > SUCCESS,
        "reward": reward,
        # A fork of NeMo RL learns from it. It fails on a null, so there is none where there is no reward.
        **({} if reward is None else {"score": reward}),
        "messages": _messages(rollout, ids),
        "replayed": replayed,
        "tools": info.tool_schemas if info else [],
        "critical_error": _critical_error(rollout),
        "filter": dropped,
        "error": why,
        "traceback": error.traceback if error else None,
        "timing": _timing(rollout),
    }


def _cut_off(rollout: Rollout) -> bool:
    """Whether the last turn ended in the middle, or there was none."""
    turns = [segment for segment in _last_chain(rollout).segments if segment.sampled]
    if not turns:
        # A handler without a model has no turn that could.
        return rollout.finish_reason is not FinishReason.STOP
    return turns[-1].finish_reason in ("length", "abort")


def _last_chain(rollout: Rollout) -> Chain:
    """The last chain in which something was sampled; an empty one where nothing was."""
    chains = rollout.trajectory.own if rollout.trajectory else []
    return next((c for c in reversed(chains) if any(s.sampled for s in c.segments)), Chain())


def _critical_error(rollout: Rollout) -> str | None:
    """The stage in which it failed, or in which it was when it was cancelled."""
    if not rollout.drop:
        return "final_result" if rollout.trajectory is None else "run" if lacking(rollout) else None
    if rollout.state is State.TIMED_OUT or (rollout.error and rollout.error.blame == "timeout"):
        return "timeout"
    if rollout.error and rollout.error.stage:
        return rollout.error.stage.value
    before = [event.state for event in rollout.timeline if not event.state.terminal]
    last = before[-1] if before else State.QUEUED
    return {State.EVALUATING: "eval", State.READY: "run", State.RUNNING: "run"}.get(last, "init")


def _timing(rollout: Rollout) -> dict[str, Any]:
    spent = rollout.stage_seconds
    stages = {f"{name}_time": spent.get(name, 0.0) for name in ("init", "run", "eval")}
    by_limit = rollout.finish_reason is FinishReason.TIME_LIMIT or rollout.state is State.TIMED_OUT
    blamed = rollout.error is not None and rollout.error.blame == "timeout"
    return {
        **stages,
        "others_time": spent.get("queued", 0.0),
        "counted_elapsed": sum(stages.values()),
        "timeout_triggered": by_limit or blamed,
    }


def _messages(rollout: Rollout, form: Ids) -> list[dict[str, Any]]:
    """Messages of all of the agent's chains, in order. Log-probs and ids stay as they were sampled."""
    if form == "all":
        if rollout.drop or lacking(rollout):
            # Trainers look at `messages` and `resolved` alone: with turns it would be a reward of 0. Of an
            # empty list they make another try, or a copy of another sample, and fail if there is none. So a
            # task that no try would mend gets a turn that says nothing.
            return _nothing_said() if rollout.error and rollout.error.blame == "task" else []
        messages = list(_chain_messages(_last_chain(rollout), form))
        while messages and messages[-1]["logprobs"] is None:
            messages.pop()
        return messages
    trajectory = rollout.trajectory or Trajectory()
    messages = []
    for number, chain in enumerate(trajectory.own):
        where = {"chain": number} if len(trajectory.own) > 1 else {}
        messages += [message | where for message in _chain_messages(chain, form)]
    return messages + [_message(message) | _NOT_SAMPLED[form] for message in trajectory.unread]


def _nothing_said() -> list[dict[str, Any]]:
    """A prompt and a turn of one id each, which every vocabulary has."""
    row = weightless()
    asked = {"token_ids": row.prompt_ids, "input_ids": None, "logprobs": None}
    turn = {"token_ids": row.response_ids, "input_ids": None, "logprobs": row.logprobs}
    return [_message(Message(role="user")) | asked, _message(Message(role="assistant")) | turn]


_NOT_SAMPLED: dict[Ids, dict[str, Any]] = {
    "sampled": {},
    "all": {"token_ids": [], "input_ids": None, "logprobs": None},
    "compact": {"token_ids": []},
}
"""What a message that was not sampled has beside its text."""


def _chain_messages(chain: Chain, form: Ids) -> Iterator[dict[str, Any]]:
    seen: list[int] = []
    for call in calls_of(chain):
        ids = [token for segment in call for token in segment.token_ids]
        messages = [_message(message) for segment in call for message in segment.messages]
        if call[0].sampled:
            answer = messages[-1] if messages else _message(Message(role="assistant"))
            answer["token_ids"] = ids
            answer["logprobs"] = [value for segment in call for value in segment.logprobs or ()]
            if form != "compact":
                # NeMo RL's code cuts as many ids off a turn as its prompt has.
                answer["input_ids"] = None if form == "all" else list(seen)
            messages = [answer]
        elif form != "sampled":
            # The ids of messages that came together cannot be told apart. The first has them all that is no
            # assistant's: trainers tell by the role what was sampled.
            messages = [
                message | _NOT_SAMPLED[form]
                for message in messages or [{"role": call[0].role, "content": ""}]
            ]
            bearer = next((m for m in messages if m["role"] != "assistant"), messages[-1])
            bearer["token_ids"] = ids
        seen += ids
        yield from messages


def _message(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "assistant":
        entry["tool_calls"] = [
            {"name": call.name, "arguments": call.arguments} for call in message.tool_calls
        ]
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    return entry
