"""ATIF 1.8, the Agent Trajectory Interchange Format: a JSON document a rollout.

Its steps are those of the agent's last chain; the others are its `subagent_trajectories`. With each step that
a model call made are the call's ids and log-probs and, under `metrics.extra`, policy versions and loss mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout import __version__
from rollout.exports.steps import Step, agent_of, facts, file_name, iso, steps_of, timed
from rollout.schema import Chain, Rollout, Trajectory
from rollout.schema.agents import CallRecord

SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "user"}
MOST_PROMPT_IDS = 4_000_000
"""Each call repeats the ids before it. A document with more of them has only what each call added."""


def trajectory(rollout: Rollout) -> dict[str, Any]:
    """The document of a rollout, ready for `json.dumps`."""
    record = rollout.trajectory or Trajectory()
    last = len(record.chains) - 1
    talks = [
        steps_of(chain, record.unread if n == last else (), shared)
        for n, (chain, shared) in enumerate(zip(record.chains, record.shared_ids, strict=True))
    ]
    whole = sum(step.prompt for talk in talks for step in talk) <= MOST_PROMPT_IDS
    parts = [_part(rollout, record, number, talk, whole) for number, talk in enumerate(talks)]
    document = parts[-1] if parts else _part(rollout, Trajectory(chains=[Chain()]), 0, [], whole)
    document["extra"] |= facts(rollout)
    if not parts:
        why = rollout.error.message if rollout.error else rollout.drop_reason or rollout.state.value
        document["steps"] = [{"step_id": 1, "source": "system", "message": f"No model call: {why}"}]
    if not whole:
        document["notes"] = "too long for prompt_token_ids: extra.added_prompt_ids is what each call added"
    if others := parts[:-1]:
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
        text, name = json.dumps(trajectory(rollout), ensure_ascii=False), f"{file_name(rollout.id)}.json"
        if count == 1:
            whole = path.rename(path.with_name(f"{path.name}.first"))
            path.mkdir()
            whole.rename(path / first)
        first = first or name
        (path / name if count else path).write_text(text, encoding="utf-8")


def _part(rollout: Rollout, record: Trajectory, number: int, talk: list[Step], whole: bool) -> dict[str, Any]:
    """The document of a chain."""
    chain, calls = record.chains[number], timed(record, "model")
    steps, seen, ids = [], 0, chain.token_ids
    for place, step in enumerate(talk, start=1):
        steps.append({"step_id": place} | _step(step, calls.get(step.call_id)))
        if step.sampled.segments:
            metrics = _metrics(step, chain.teaches, calls.get(step.call_id))
            added = {"prompt_token_ids": ids[: step.prompt]} if whole else {}
            metrics["extra"] |= {} if whole else {"added_prompt_ids": ids[seen : step.prompt]}
            steps[-1] |= {"llm_call_count": 1, "metrics": metrics | added}
            seen = step.prompt + metrics["completion_tokens"]
    sums: dict[str, int] = {"total_steps": len(steps)}
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        known = [step["metrics"].get(name) for step in steps if "metrics" in step]
        sums |= {f"total_{name}": sum(filter(None, known))} if any(n is not None for n in known) else {}
    parent = {} if chain.parent is None else {"parent_trajectory_id": f"{rollout.id}/chain-{chain.parent}"}
    model = chain.model or record.model
    agent = {"name": agent_of(rollout) if chain.policy is None else chain.policy, "version": __version__}
    policy = {} if chain.policy is None else {"policy": chain.policy, "text_only": chain.text_only}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": rollout.id,
        "trajectory_id": f"{rollout.id}/chain-{number}",
        "agent": agent | ({"model_name": model} if model else {}),
        "steps": steps,
        "final_metrics": sums,
        "extra": {"chain_role": chain.role} | parent | policy,
    }


def _step(step: Step, call: CallRecord | None) -> dict[str, Any]:
    message, made = step.message, {"source": SOURCES[step.message.role], "message": step.message.text}
    made |= {"timestamp": iso(call.at)} if call else {}
    made |= {"is_copied_context": True} if step.copied else {}
    if message.role == "assistant":  # the format allows these for no other
        made |= {"reasoning_content": message.reasoning} if message.reasoning else {}
        tools = [(name, tool.name, tool.arguments) for name, tool in step.tools.items()]
        names = ("tool_call_id", "function_name", "arguments")
        made |= {"tool_calls": [dict(zip(names, tool, strict=True)) for tool in tools]} if tools else {}
    if step.results:
        known = [
            {"source_call_id": r.tool_call_id} if r.tool_call_id in step.tools else {} for r in step.results
        ]
        results = [{"content": r.text} | source for r, source in zip(step.results, known, strict=True)]
        made["observation"] = {"results": results}
    return made


def _metrics(step: Step, trained: bool, call: CallRecord | None) -> dict[str, Any]:
    sampled, logprobs, versions = step.sampled.token_ids, step.sampled.logprobs, step.sampled.policy_versions
    extra: dict[str, Any] = {"call_id": step.call_id, "finish_reason": step.stop}
    extra |= {"policy_versions": versions, "loss_mask": [int(trained)] * len(sampled)}
    extra |= {"seconds": call.seconds, "backend": call.backend} if call else {}
    metrics = {"prompt_tokens": step.prompt, "completion_tokens": len(sampled), "extra": extra}
    metrics |= {"completion_token_ids": sampled, "logprobs": logprobs}
    return metrics | ({"cached_tokens": call.cached_tokens} if call else {})
