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
from rollout.exports.steps import agent_of, facts, file_name, iso, stage, steps_of, timed
from rollout.schema import Rollout

PLACES = {"test_log": "verifier/test-stdout.txt", "patch": "artifacts/patch.diff"}
"""Of artifacts that Harbor has a place or an ending for."""
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
    document, record, error = atif.trajectory(rollout), rollout.trajectory, rollout.error
    _put(path / "agent" / "trajectory.json", document)
    if recording := _recording(rollout):
        (path / "agent" / "recording.cast").write_text(recording, encoding="utf-8")
    rewards = None if rollout.reward is None else rollout.reward_components | {"reward": rollout.reward}
    if rewards:
        _put(path / "verifier" / "reward.json", rewards)
        (path / "verifier" / "reward.txt").write_text(f"{rollout.reward}\n")
    for name, text in (record.artifacts if record else {}).items():
        file = path / (PLACES.get(name) or f"artifacts/{file_name(name)}")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    task, model, ended = file_name(rollout.group_id), record and record.model, rollout.finished_at
    agent = {"name": agent_of(rollout), "version": __version__}
    config = {
        "task": {"path": task, "source": rollout.handler},
        "trial_name": path.name,
        "agent": {"name": agent["name"], "model_name": model},
    }
    sums = document["final_metrics"]
    result = {
        "id": str(uuid5(NAMESPACE_URL, rollout.id)),
        "task_name": task,
        "trial_name": path.name,
        "trial_uri": f"rollout:{rollout.id}",
        "task_id": {"path": task},
        "source": rollout.handler,
        "task_checksum": "",
        "config": config,
        "agent_info": agent | {"model_info": {"name": model} if model else None},
        "agent_result": {
            "n_input_tokens": sums.get("total_prompt_tokens"),
            "n_cache_tokens": sums.get("total_cached_tokens"),
            "n_output_tokens": sums.get("total_completion_tokens"),
            "metadata": facts(rollout),
        },
        "verifier_result": {"rewards": rewards},
        "exception_info": {
            "exception_type": error.type if error else "Dropped",
            "exception_message": error.message if error else rollout.drop_reason or "",
            "exception_traceback": (error and error.traceback) or "",
            "occurred_at": iso(ended),
        }
        if error or rollout.drop
        else None,
        "started_at": iso(rollout.created_at),
        "finished_at": iso(ended),
        "environment_setup": _timing(rollout, "initializing"),
        "agent_execution": _timing(rollout, "running"),
        "verifier": _timing(rollout, "evaluating"),
    }
    _put(path / "config.json", config)
    _put(path / "result.json", result)
    return result


def _timing(rollout: Rollout, state: str) -> dict[str, str] | None:
    times = stage(rollout, state)
    return {"started_at": iso(times[0]), "finished_at": iso(times[1])} if times else None


def _recording(rollout: Rollout) -> str:
    """The timed tool calls as a terminal shows them (asciinema 2); empty where none was timed."""
    tools, events = timed(rollout.trajectory, "tool"), []
    for chain in rollout.trajectory.chains if rollout.trajectory else []:
        for step in (step for step in steps_of(chain) if step.sampled.segments):
            results = {result.tool_call_id: result.text for result in step.results}
            for name, tool in step.tools.items():
                if call := tools.get(name):
                    typed = " ".join(map(str, tool.arguments.values()))
                    events.append((call.at, f"\x1b[1m{tool.name}\x1b[0m {typed}\n"))
                    events.append((call.at + call.seconds, results.get(name, "") + "\n"))
    if not events:
        return ""
    begun = min(at for at, _ in events)
    lines: list[Any] = [{"version": 2, "width": 120, "height": 40, "timestamp": int(begun)}]
    for at, text in sorted(events, key=lambda event: event[0]):
        lines.append([round(at - begun, 3), "o", CONTROLS.sub("", text).replace("\n", "\r\n")])
    return "".join(json.dumps(line) + "\n" for line in lines)


def _job(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a job: how many trials there are, and their rewards by agent, model and handler."""
    evals: dict[str, Any] = {}
    for result in results:
        name, agent = result["trial_name"], result["config"]["agent"]
        key = "__".join(filter(None, (agent["name"], agent["model_name"], result["source"])))
        part = evals.setdefault(
            key, {"n_trials": 0, "n_errors": 0, "reward_stats": {}, "exception_stats": {}}
        )
        part["n_trials"] += result["verifier_result"]["rewards"] is not None
        for reward, value in (result["verifier_result"]["rewards"] or {}).items():
            part["reward_stats"].setdefault(reward, {}).setdefault(value, []).append(name)
        if error := result["exception_info"]:
            part["n_errors"] += 1
            part["exception_stats"].setdefault(error["exception_type"], []).append(name)
    for part in evals.values():
        rewards = [value for value, names in part["reward_stats"].get("reward", {}).items() for _ in names]
        part["metrics"] = [{"mean": statistics.fmean(rewards)}] if rewards else []
    finished, errors = max(r["finished_at"] for r in results), sum(p["n_errors"] for p in evals.values())
    return {
        "id": str(uuid5(NAMESPACE_URL, " ".join(result["id"] for result in results))),
        "started_at": min(result["started_at"] for result in results),
        "updated_at": finished,
        "finished_at": finished,
        "n_total_trials": len(results),
        "stats": {"n_completed_trials": len(results), "n_errored_trials": errors, "evals": evals},
    }


def _put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
