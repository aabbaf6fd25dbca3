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
from rollout.exports.steps import Step, agent_of, facts, file_name, iso, stage, steps_of
from rollout.schema import Chain, Message, Rollout

VERSION = 2
STOPS = {"stop": "stop", "length": "max_tokens"}
LIMITS = {"turn_limit": ("turn", "max_turns"), "token_limit": ("token", "max_response_tokens")}
LIMITS["time_limit"] = ("time", "run_timeout_s")
"""Ends of a rollout that Inspect has words for: those, and the limits."""
SUMMARIZED = ("id", "epoch", "uuid", "target", "scores", "model_usage", "started_at", "completed_at")
MOST_CHARS = 1000
"""Of a text in the list of samples."""


def sample(rollout: Rollout, epoch: int) -> dict[str, Any]:
    """A rollout as an `EvalSample`, ready for `json.dumps`."""
    record, ended = rollout.trajectory, rollout.finished_at or rollout.updated_at
    chain = record.chains[-1] if record and record.chains else Chain()
    steps = steps_of(chain, record.unread if record else ())
    model = (record and record.model) or "unknown"
    calls = [step for step in steps if step.sampled.segments]
    messages = [made for step in steps for made in _messages(step)]
    prompt = [_messages(step)[0] for step in steps[: steps.index(calls[0])]] if calls else []
    said = _messages(calls[-1])[0] if calls else {}
    stop = "tool_calls" if said.get("tool_calls") else STOPS.get(calls[-1].stop, "unknown") if calls else ""
    read, sampled = sum(step.prompt for step in calls), sum(len(s.sampled.token_ids) for s in calls)
    usage = {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
    values = rollout.reward_components | ({} if rollout.reward is None else {"reward": rollout.reward})
    made: dict[str, Any] = {
        "id": file_name(rollout.group_id),
        "epoch": epoch,
        "uuid": rollout.id,
        "input": prompt or json.dumps(rollout.request.task, ensure_ascii=False),
        "target": str(rollout.request.task.get("answer", "")),
        "messages": messages,
        "output": {"model": model, "choices": [{"message": said, "stop_reason": stop}] if said else []},
        "scores": {name: {"value": value} for name, value in values.items()},
        "metadata": facts(rollout),
        "model_usage": {model: usage},
        "started_at": iso((stage(rollout, "running") or [rollout.created_at])[0]),
        "completed_at": iso(ended),
        "total_time": ended - rollout.created_at,
        "turn_count": len(calls),
    }
    if error := rollout.error:
        text, trace = f"{error.blame.value}: {error.type}: {error.message}", error.traceback or ""
        made["error"] = {"message": text, "traceback": trace, "traceback_ansi": trace}
    if rollout.finish_reason in LIMITS:
        kind, field = LIMITS[rollout.finish_reason]
        made["limit"] = {"type": kind, "limit": float(getattr(rollout.request.limits, field) or 0)}
    return made


def write(rollouts: Iterable[Rollout], path: Path) -> None:
    """Rollouts of any number become one log, written one by one."""
    summaries: list[dict[str, Any]] = []
    agents: dict[str, None] = {}
    used: set[tuple[str, int]] = set()
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
            summaries.append(_summary(made))
        if summaries:
            plan = {"name": "plan", "steps": [{"solver": name, "params": {}} for name in agents]}
            start = {"version": VERSION, "eval": _spec(summaries), "plan": plan}
            put("_journal/start.json", start)
            put("summaries.json", summaries)
            put("header.json", start | {"status": "success", "results": _results(summaries)})


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
        made["tool_calls"] = [
            {"id": name, "function": tool.name, "arguments": tool.arguments, "type": "function"}
            for name, tool in step.tools.items()
        ]
    return [made, *(_answer(result, step) for result in step.results)]


def _answer(result: Message, step: Step) -> dict[str, Any]:
    tool = step.tools.get(result.tool_call_id or "")
    known = {"tool_call_id": result.tool_call_id, "function": tool.name if tool else result.name}
    return {"role": "tool", "content": result.text} | known


def _summary(made: dict[str, Any]) -> dict[str, Any]:
    """A sample as the list of samples has it."""
    summary = {name: made[name] for name in (*SUMMARIZED, "total_time", "turn_count")}
    asked = made["input"] if isinstance(made["input"], str) else made["input"][-1]["content"]
    short = {k: v for k, v in made["metadata"].items() if not isinstance(v, (dict, list))}
    summary |= {"input": str(asked)[:MOST_CHARS], "message_count": len(made["messages"]), "completed": True}
    summary["metadata"] = {k: v[:MOST_CHARS] if isinstance(v, str) else v for k, v in short.items()}
    if "error" in made:
        summary["error"] = made["error"]["message"][:MOST_CHARS]
    return summary | ({"limit": made["limit"]["type"]} if "limit" in made else {})


def _spec(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    ids = list(dict.fromkeys(summary["id"] for summary in summaries))
    task = " ".join(dict.fromkeys(summary["metadata"]["handler"] for summary in summaries))
    return {
        **dict.fromkeys(("eval_id", "run_id", "task_id"), summaries[0]["uuid"]),
        "created": min(summary["started_at"] for summary in summaries),
        "task": task,
        "dataset": {"name": task, "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": " ".join(dict.fromkeys(model for summary in summaries for model in summary["model_usage"])),
        "config": {"epochs": max(summary["epoch"] for summary in summaries)},
        "packages": {"rollout-service": __version__},
    }


def _results(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    scores = []
    for name in dict.fromkeys(name for summary in summaries for name in summary["scores"]):
        values = [s["scores"][name]["value"] for s in summaries if name in s["scores"]]
        mean = {"name": "mean", "value": sum(values) / len(values)}
        counts = {"scored_samples": len(values), "unscored_samples": len(summaries) - len(values)}
        scores.append({"name": name, "scorer": name, "metrics": {"mean": mean}} | counts)
    return {"total_samples": len(summaries), "completed_samples": len(summaries), "scores": scores}
