"""ATIF 1.8, the Agent Trajectory Interchange Format: a JSON document a rollout.

Its steps are those of the last chain; the other chains are its `subagent_trajectories`. With each step that a
model call made are the call's ids and log-probs and, under `metrics.extra`, policy versions and loss mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout import __version__
from rollout.exports.steps import Step, agent_of, facts, file_name, iso, steps_of, timed
from rollout.schema import Chain, Rollout
from rollout.schema.trajectory import TRAINED

SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "user"}
MOST_PROMPT_IDS = 4_000_000
"""Each call repeats the ids before it. A document with more of them has only what each call added."""


def trajectory(rollout: Rollout) -> dict[str, Any]:
    """The document of a rollout, ready for `json.dumps`."""
    record = rollout.trajectory
    chains = record.chains if record else []
    talks = [steps_of(chain) for chain in chains[:-1]]
    if record and chains:
        talks.append(steps_of(chains[-1], record.unread))
    whole = sum(step.prompt for talk in talks for step in talk) <= MOST_PROMPT_IDS
    parts = [_part(rollout, number, talk, whole) for number, talk in enumerate(talks)]
    if not parts:
        error = rollout.error.message if rollout.error else rollout.drop_reason or rollout.state.value
        parts = [_part(rollout, 0, [], whole)]
        parts[0]["steps"] = [{"step_id": 1, "source": "system", "message": f"No model call: {error}"}]
    document, others = parts[-1], parts[:-1]
    document["extra"] |= facts(rollout)
    if not whole:
        document["notes"] = "too long for prompt_token_ids: extra.added_prompt_ids is what each call added"
    if others:
        refs = [{"trajectory_id": part["trajectory_id"], "session_id": rollout.id} for part in others]
        step = {"step_id": len(document["steps"]) + 1, "source": "system", "message": "Its other chains"}
        document["steps"].append(step | {"observation": {"results": [{"subagent_trajectory_ref": refs}]}})
        document["final_metrics"]["total_steps"] += 1
        document["subagent_trajectories"] = others
    return document


def write(rollouts: Iterable[Rollout], path: Path) -> None:
    """One rollout becomes a file, several a directory of files."""
    first = ""
    for count, rollout in enumerate(rollouts):
        text, name = (
            json.dumps(trajectory(rollout), ensure_ascii=False),
            file_name(rollout.id) + ".json",
        )
        if count == 1:
            whole = path.rename(path.with_name(f"{path.name}.first"))
            path.mkdir()
            whole.rename(path / first)
        first = first or name
        (path / name if count else path).write_text(text, encoding="utf-8")


def _part(rollout: Rollout, number: int, talk: list[Step], whole: bool) -> dict[str, Any]:
    """The document of a chain."""
    record = rollout.trajectory
    chain = record.chains[number] if record and record.chains else Chain()
    calls, ids = timed(record, "model"), chain.token_ids
    steps = [
        {"step_id": place} | _step(step, chain, calls.get(step.call_id), ids, whole)
        for place, step in enumerate(talk, start=1)
    ]
    spent = [step["metrics"] for step in steps if "metrics" in step]
    sums = {"total_steps": len(steps)}
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        if known := [part[name] for part in spent if part.get(name) is not None]:
            sums[f"total_{name}"] = sum(known)
    extra: dict[str, Any] = {"chain_role": chain.role}
    if chain.parent is not None:
        extra["parent_trajectory_id"] = f"{rollout.id}/chain-{chain.parent}"
    agent = {"name": agent_of(rollout), "version": __version__}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": rollout.id,
        "trajectory_id": f"{rollout.id}/chain-{number}",
        "agent": agent | ({"model_name": record.model} if record and record.model else {}),
        "steps": steps,
        "final_metrics": sums,
        "extra": extra,
    }


def _step(step: Step, chain: Chain, call: Any, ids: list[int], whole: bool) -> dict[str, Any]:
    message = step.message
    made: dict[str, Any] = {"source": SOURCES[message.role], "message": message.text}
    if call is not None:
        made["timestamp"] = iso(call.at)
    if step.copied:
        made["is_copied_context"] = True
    if message.role == "assistant" and message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.role == "assistant" and step.tools:
        made["tool_calls"] = [
            {"tool_call_id": name, "function_name": tool.name, "arguments": tool.arguments}
            for name, tool in step.tools.items()
        ]
    if step.results:
        known = [
            {"source_call_id": r.tool_call_id} if r.tool_call_id in step.tools else {} for r in step.results
        ]
        results = [{"content": r.text} | source for r, source in zip(step.results, known, strict=True)]
        made["observation"] = {"results": results}
    if step.sampled.segments:
        made |= {"llm_call_count": 1, "metrics": _metrics(step, chain.role in TRAINED, call, ids, whole)}
    return made


def _metrics(step: Step, trained: bool, call: Any, ids: list[int], whole: bool) -> dict[str, Any]:
    sampled = step.sampled.token_ids
    extra: dict[str, Any] = {"call_id": step.call_id, "finish_reason": step.stop}
    extra |= {"policy_versions": step.sampled.policy_versions, "loss_mask": [int(trained)] * len(sampled)}
    metrics = {"prompt_tokens": step.prompt, "completion_tokens": len(sampled), "extra": extra}
    metrics |= {"completion_token_ids": sampled, "logprobs": step.sampled.logprobs}
    if whole:
        metrics["prompt_token_ids"] = ids[: step.prompt]
    else:
        extra["added_prompt_ids"] = ids[step.prompt - step.given : step.prompt]
    if call is not None:
        extra |= {"seconds": call.seconds, "backend": call.backend}
        metrics["cached_tokens"] = call.cached_tokens
    return metrics
