"""A job of Harbor: a directory with a trial a rollout. `harbor view` is given the directory that it is in.

A group is a task, and its rollouts are the trials of that task.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from rollout import __version__
from rollout.exports import atif
from rollout.exports.steps import agent_of, end_of, facts, file_name, iso, stage, steps_of, timed
from rollout.schema import Rollout, Trajectory

PLACES = {"test_log": "verifier/test-stdout.txt", "patch": "artifacts/patch.diff"}
"""Of artifacts that Harbor has a place or an ending for."""
PHASES = {"environment_setup": "initializing", "agent_execution": "running", "verifier": "evaluating"}
"""Harbor's names for our states."""
CONTROLS = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
"""What a recording leaves out, for a terminal that plays it obeys. Colours stay."""


def write(rollouts: Iterable[Rollout], path: Path) -> None:
    """Rollouts of any number become one job."""
    results = [_trial(rollout, path / file_name(rollout.id)) for rollout in rollouts]
    if results:
        _put(path / "config.json", {"job_name": path.name, "agents": [results[0]["config"]["agent"]]})
        _put(path / "result.json", _job(results))


def _trial(rollout: Rollout, path: Path) -> dict[str, Any]:
    """Write the directory of a trial; its result."""
    record, document = rollout.trajectory or Trajectory(), atif.trajectory(rollout)
    rewards = None if rollout.reward is None else rollout.reward_components | {"reward": rollout.reward}
    _put(path / "agent/trajectory.json", document)
    if recording := _recording(record):
        _put(path / "agent/recording.cast", recording)
    if rewards:
        _put(path / "verifier/reward.json", rewards)
        _put(path / "verifier/reward.txt", f"{rollout.reward}\n")
    for name, text in record.artifacts.items():
        _put(path / (PLACES.get(name) or f"artifacts/{file_name(name)}"), text)
    task, agent, ended = file_name(rollout.group_id), agent_of(rollout), iso(end_of(rollout))
    config = {"task": {"path": task, "source": rollout.handler}, "trial_name": path.name}
    config["agent"] = {"name": agent, "model_name": record.model}
    known = {"name": agent, "version": __version__, "model_info": record.model and {"name": record.model}}
    spent: dict[str, Any] = {"metadata": facts(rollout)}
    for name, sum_of in {"input": "prompt", "cache": "cached", "output": "completion"}.items():
        spent[f"n_{name}_tokens"] = document["final_metrics"].get(f"total_{sum_of}_tokens")
    result = {
        **{"id": str(uuid5(NAMESPACE_URL, rollout.id)), "trial_uri": f"rollout:{rollout.id}"},
        **{"trial_name": path.name, "task_name": task, "task_id": {"path": task}, "task_checksum": ""},
        **{"source": rollout.handler, "config": config, "agent_info": known, "agent_result": spent},
        **{"verifier_result": {"rewards": rewards}, "exception_info": _exception(rollout)},
        **{"started_at": iso(rollout.created_at), "finished_at": ended},
    }
    for name, state in PHASES.items():
        if times := stage(rollout, state):
            result[name] = dict(zip(("started_at", "finished_at"), map(iso, times), strict=True))
    _put(path / "config.json", config)
    _put(path / "result.json", result)
    return result


def _exception(rollout: Rollout) -> dict[str, str] | None:
    if not rollout.error and not rollout.drop:
        return None
    kind, text = rollout.error.type if rollout.error else "Dropped", rollout.drop_reason or ""
    trace = (rollout.error and rollout.error.traceback) or ""
    info = {"exception_type": kind, "exception_message": rollout.error.message if rollout.error else text}
    return info | {"exception_traceback": trace, "occurred_at": iso(end_of(rollout))}


def _recording(record: Trajectory) -> str:
    """The timed tool calls as a terminal shows them (asciinema 2); empty where none was timed."""
    tools, events = timed(record, "tool"), []
    for step in (step for chain in record.own for step in steps_of(chain) if step.sampled.segments):
        results = {result.tool_call_id: result.text for result in step.results}
        for name, tool in step.tools.items():
            if call := tools.get(name):
                typed = " ".join(map(str, tool.arguments.values()))
                events.append((call.at, f"\x1b[1m{tool.name}\x1b[0m {typed}\n"))
                events.append((call.at + call.seconds, results.get(name, "") + "\n"))
    begun = min((at for at, _ in events), default=0.0)
    lines: list[Any] = [{"version": 2, "width": 120, "height": 40, "timestamp": int(begun)}]
    for at, text in sorted(events, key=lambda event: event[0]):
        lines.append([round(at - begun, 3), "o", CONTROLS.sub("", text).replace("\n", "\r\n")])
    return "".join(json.dumps(line) + "\n" for line in lines) if events else ""


def _job(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a job: how many trials there are, and their rewards by agent, model and handler."""
    evals: dict[str, Any] = {}
    for result in results:
        name, agent = result["trial_name"], result["config"]["agent"]
        key = "__".join(filter(None, (agent["name"], agent["model_name"], result["source"])))
        none = {"n_trials": 0, "n_errors": 0, "reward_stats": {}, "exception_stats": {}}
        part = evals.setdefault(key, none)
        part["n_trials"] += result["verifier_result"]["rewards"] is not None
        for reward, value in (result["verifier_result"]["rewards"] or {}).items():
            part["reward_stats"].setdefault(reward, {}).setdefault(value, []).append(name)
        if error := result["exception_info"]:
            part["n_errors"] += 1
            part["exception_stats"].setdefault(error["exception_type"], []).append(name)
    for part in evals.values():
        rewards = [value for value, names in part["reward_stats"].get("reward", {}).items() for _ in names]
        part["metrics"] = [{"mean": statistics.fmean(rewards)}] if rewards else []
    errors = sum(part["n_errors"] for part in evals.values())
    return {
        "id": str(uuid5(NAMESPACE_URL, " ".join(result["id"] for result in results))),
        "started_at": min(result["started_at"] for result in results),
        "finished_at": max(result["finished_at"] for result in results),
        "n_total_trials": len(results),
        "stats": {"n_completed_trials": len(results), "n_errored_trials": errors, "evals": evals},
    }


def _put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    path.write_text(text, encoding="utf-8")
