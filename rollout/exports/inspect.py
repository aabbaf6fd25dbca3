"""Inspect's `.eval`: a ZIP file of JSON, as `inspect view` and `inspect_ai.log` read it.

A group is a sample, and its rollouts are the epochs of that sample, counted from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from rollout import __version__
from rollout.exports.steps import Step, agent_of, end_of, facts, file_name, iso, stage, steps_of
from rollout.schema import Chain, Message, Rollout, Trajectory

VERSION = 2
UNKNOWN = "unknown"
STOPS = {"stop": "stop", "length": "max_tokens"}
LIMITS = {"turn_limit": ("turn", "max_turns"), "token_limit": ("token", "max_response_tokens")}
LIMITS["time_limit"] = ("time", "run_timeout_s")
"""Inspect's words for ends of a call and of a rollout, with our limits."""
MOST_CHARS = 1000
"""Of a text in the list of samples."""


def sample(rollout: Rollout, epoch: int) -> dict[str, Any]:
    """A rollout as an `EvalSample`, ready for `json.dumps`."""
    record, task = rollout.trajectory or Trajectory(), rollout.request.task
    shared = record.shared_ids[-1] if record.own else 0
    steps = steps_of(record.own[-1] if record.own else Chain(), record.unread, shared)
    calls = [step for step in steps if step.sampled.segments]
    prompt = [_messages(step)[0] for step in steps[: steps.index(calls[0])]] if calls else []
    said = [_messages(step)[0] for step in calls[-1:]]
    stop = "tool_calls" if said and said[0]["tool_calls"] else STOPS.get(calls[-1].stop if calls else "")
    read, sampled = sum(step.prompt for step in calls), sum(len(step.sampled.token_ids) for step in calls)
    usage = {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
    values = rollout.reward_components | ({} if rollout.reward is None else {"reward": rollout.reward})
    choices = [{"message": message, "stop_reason": stop or UNKNOWN} for message in said]
    begun, model = stage(rollout, "running") or (rollout.created_at,), record.model or UNKNOWN
    made = {
        **{"id": file_name(rollout.group_id), "epoch": epoch, "uuid": rollout.id},
        "input": prompt or json.dumps(task, ensure_ascii=False),
        "target": str(task.get("answer", "")),
        "messages": [message for step in steps for message in _messages(step)],
        "output": {"model": model, "choices": choices},
        "scores": {name: {"value": value} for name, value in values.items()},
        "metadata": facts(rollout),
        "model_usage": {model: usage},
        **{"started_at": iso(begun[0]), "completed_at": iso(end_of(rollout))},
        "total_time": end_of(rollout) - rollout.created_at,
        "turn_count": len(calls),
    }
    if error := rollout.error:
        text, trace = f"{error.blame.value}: {error.type}: {error.message}", error.traceback or ""
        made["error"] = {"message": text, "traceback": trace, "traceback_ansi": trace}
    if rollout.finish_reason in LIMITS:
        kind, limit = LIMITS[rollout.finish_reason]
        made["limit"] = {"type": kind, "limit": float(getattr(rollout.request.limits, limit) or 0)}
    return made


def write(rollouts: Iterable[Rollout], path: Path) -> None:
    """Rollouts of any number become one log, written one by one."""
    listed: list[dict[str, Any]] = []
    used: set[tuple[str, int]] = set()
    agents: dict[str, None] = {}
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:

        def put(name: str, value: Any) -> None:
            archive.writestr(name, json.dumps(value, ensure_ascii=False))

        for rollout in rollouts:
            name, epoch = file_name(rollout.group_id), rollout.index + 1
            while (name, epoch) in used:  # each request of a group that several share begins with 0
                epoch += 1
            used.add((name, epoch))
            agents[agent_of(rollout)] = None
            made = sample(rollout, epoch)
            put(f"samples/{name}_epoch_{epoch}.json", made)
            listed.append(_summary(made))
        if listed:
            plan = {"name": "plan", "steps": [{"solver": name, "params": {}} for name in agents]}
            start = {"version": VERSION, "eval": _spec(listed), "plan": plan}
            put("_journal/start.json", start)
            put("summaries.json", listed)
            put("header.json", start | {"status": "success", "results": _results(listed)})


def _messages(step: Step) -> list[dict[str, Any]]:
    """The message of a step, and the answers of its tools."""
    message = step.message
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        text = [{"type": "text", "text": message.text}] if message.text else []
        made["content"] = [{"type": "reasoning", "reasoning": message.reasoning}, *text]
    if message.role == "assistant":
        versions = list(dict.fromkeys(step.sampled.policy_versions))
        made["metadata"] = {"call_id": step.call_id, "policy_versions": versions}
        calls = [{"id": name, "function": t.name, "arguments": t.arguments} for name, t in step.tools.items()]
        made["tool_calls"] = [call | {"type": "function"} for call in calls]
    if step.copied:
        made["metadata"] = made.get("metadata", {}) | {"shared": True}
    return [made, *(_answer(result, step.tools.get(result.tool_call_id)) for result in step.results)]


def _answer(result: Message, tool: Any) -> dict[str, Any]:
    known = {"tool_call_id": result.tool_call_id, "function": tool.name if tool else result.name}
    return {"role": "tool", "content": result.text} | known


def _summary(made: dict[str, Any]) -> dict[str, Any]:
    """A sample as the list of samples has it."""
    asked = made["input"] if isinstance(made["input"], str) else made["input"][-1]["content"]
    short = {k: v for k, v in made["metadata"].items() if not isinstance(v, (dict, list))}
    summary = {name: value for name, value in made.items() if name not in ("messages", "output")}
    summary |= {"input": str(asked)[:MOST_CHARS], "message_count": len(made["messages"]), "completed": True}
    summary["metadata"] = {k: v[:MOST_CHARS] if isinstance(v, str) else v for k, v in short.items()}
    summary |= {"error": made["error"]["message"][:MOST_CHARS]} if "error" in made else {}
    return summary | ({"limit": made["limit"]["type"]} if "limit" in made else {})


def _spec(listed: list[dict[str, Any]]) -> dict[str, Any]:
    ids = list(dict.fromkeys(summary["id"] for summary in listed))
    task = " ".join(dict.fromkeys(summary["metadata"]["handler"] for summary in listed))
    models = dict.fromkeys(model for summary in listed for model in summary["model_usage"])
    return {
        **dict.fromkeys(("eval_id", "run_id", "task_id"), listed[0]["uuid"]),
        "created": min(summary["started_at"] for summary in listed),
        "task": task,
        "dataset": {"name": task, "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": " ".join(model for model in models if model != UNKNOWN) or UNKNOWN,
        "config": {"epochs": max(summary["epoch"] for summary in listed)},
        "packages": {"rollout-service": __version__},
    }


def _results(listed: list[dict[str, Any]]) -> dict[str, Any]:
    scores = []
    for name in dict.fromkeys(name for summary in listed for name in summary["scores"]):
        values = [summary["scores"][name]["value"] for summary in listed if name in summary["scores"]]
        mean = {"name": "mean", "value": sum(values) / len(values)}
        counts = {"scored_samples": len(values), "unscored_samples": len(listed) - len(values)}
        scores.append({"name": name, "scorer": name, "metrics": {"mean": mean}} | counts)
    return {"total_samples": len(listed), "completed_samples": len(listed), "scores": scores}
