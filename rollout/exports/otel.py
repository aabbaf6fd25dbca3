"""Spans by OpenTelemetry's conventions for generative AI, as a file of OTLP in JSON: a line a rollout.

A rollout's span holds those of its stages and `invoke_agent`, which holds `chat` and `execute_tool`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout import __version__
from rollout.exports.steps import Step, agent_of, end_of, facts, stage, stages, steps_of, timed
from rollout.schema import Message, Rollout, Trajectory
from rollout.schema.agents import CallRecord

INTERNAL, CLIENT = 1, 3
ERROR = 2
"""Numbers of OTLP: kinds of a span, and a status."""


def spans(rollout: Rollout) -> dict[str, Any]:
    """A rollout as one `ExportTraceServiceRequest`, ready for `json.dumps`."""
    trace, ended = _Trace(rollout.id), end_of(rollout)
    known = {f"rollout.{name}": value for name, value in facts(rollout).items()}
    root = trace.add("", f"rollout {rollout.handler}", rollout.created_at, ended, known)
    if origin := rollout.request.origin:
        turn = {"attributes": _attributes({"turn": origin.turn})}
        trace.spans[0]["links"] = [_Trace(origin.rollout).link | turn]
    if rollout.reward is not None:
        score = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": rollout.reward}
        event = {"timeUnixNano": _nanos(ended), "attributes": _attributes(score)}
        trace.spans[0]["events"] = [event | {"name": "gen_ai.evaluation.result"}]
    if error := rollout.error:
        trace.spans[0]["status"] = {"code": ERROR, "message": f"{error.type}: {error.message}"}
    for name, attempt, begin, end in stages(rollout):
        trace.add(root, name, begin, end, {"rollout.attempt": attempt})
    if rollout.trajectory and rollout.trajectory.own:
        _agent(trace, rollout, rollout.trajectory, root)
    about = _attributes({"service.name": "rollout-service", "service.version": __version__})
    part = {"scope": {"name": "rollout.exports", "version": __version__}, "spans": trace.spans}
    return {"resourceSpans": [{"resource": {"attributes": about}, "scopeSpans": [part]}]}


def write(rollouts: Iterable[Rollout], path: Path) -> None:
    """Rollouts of any number, a line each, as OpenTelemetry has such files."""
    with path.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(spans(rollout), ensure_ascii=False) + "\n")


class _Trace:
    """The spans of a rollout. Their ids are made of its own: they are the same in each export."""

    def __init__(self, rollout_id: str) -> None:
        self._id = hashlib.sha256(rollout_id.encode()).hexdigest()[:32]
        self.spans: list[dict[str, Any]] = []

    def add(self, parent: str, name: str, begin: float, end: float, known: dict, kind: int = INTERNAL) -> str:
        """Add a span; its id."""
        number = self._number(len(self.spans))
        span = {"traceId": self._id, "spanId": number, "parentSpanId": parent, "name": name, "kind": kind}
        span |= {"startTimeUnixNano": _nanos(begin), "endTimeUnixNano": _nanos(max(begin, end))}
        self.spans.append(span | {"attributes": _attributes(known)})
        return number

    @property
    def link(self) -> dict[str, Any]:
        """To its first span, from another trace."""
        return {"traceId": self._id, "spanId": self._number(0)}

    def _number(self, place: int) -> str:
        return hashlib.sha256(f"{self._id} {place}".encode()).hexdigest()[:16]


def _agent(trace: _Trace, rollout: Rollout, record: Trajectory, root: str) -> None:
    """The agent's span, and those of its calls: even shares of its time, marked, where none was timed."""
    begin, end = stage(rollout, "running") or (rollout.created_at, end_of(rollout))
    talks = [steps_of(chain) for chain in record.own]
    calls = [step for talk in talks for step in talk if step.sampled.segments]
    shared = {"gen_ai.provider.name": "rollout-service", "gen_ai.conversation.id": rollout.id}
    shared |= {"gen_ai.request.model": record.model} if record.model else {}
    known = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent_of(rollout)}
    known |= {"gen_ai.usage.input_tokens": sum(step.prompt for step in calls)}
    known |= {"gen_ai.usage.output_tokens": record.sampled_tokens}
    agent = trace.add(root, f"invoke_agent {agent_of(rollout)}", begin, end, shared | known)
    models, tools, before = timed(record, "model"), timed(record, "tool"), len(trace.spans)
    share = (end - begin) / max(1, sum(1 + len(step.tools) for step in calls))

    def add(name: str, call: CallRecord | None, known: dict[str, Any], kind: int = INTERNAL) -> None:
        even = begin + (len(trace.spans) - before) * share
        at, seconds = (call.at, call.seconds) if call else (even, share)
        known |= {} if call else {"rollout.times_estimated": True}
        trace.add(agent, name, at, at + seconds, known, kind)

    for talk in talks:
        asked: list[Message] = []  # since the call before: all of it each time would be a square of it
        for step in talk:
            if not step.sampled.segments:
                asked += [step.message, *step.results]
                continue
            call = models.get(step.call_id)
            add(f"chat {record.model}", call, shared | _call(rollout, step, call, asked), CLIENT)
            results = {result.tool_call_id: result.text for result in step.results}
            for name, tool in step.tools.items():
                known = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function"}
                known |= {"gen_ai.tool.name": tool.name, "gen_ai.tool.call.id": name}
                known |= {"gen_ai.tool.call.arguments": tool.arguments}
                known |= {"gen_ai.tool.call.result": results.get(name)}
                add(f"execute_tool {tool.name}", tools.get(name), known)
            asked = [*step.results]


def _call(rollout: Rollout, step: Step, call: CallRecord | None, asked: list[Message]) -> dict[str, Any]:
    sampling, said = rollout.request.sampling, _message(step.message) | {"finish_reason": step.stop}
    known = {"gen_ai.operation.name": "chat", "gen_ai.response.id": step.call_id or None}
    for name in ("temperature", "top_p", "max_tokens"):
        known[f"gen_ai.request.{name}"] = getattr(sampling, name)
    known |= {"gen_ai.response.finish_reasons": [step.stop], "gen_ai.usage.input_tokens": step.prompt}
    known |= {"gen_ai.usage.output_tokens": len(step.sampled.token_ids)}
    known |= {"gen_ai.usage.cache_read.input_tokens": call and call.cached_tokens}
    known |= {"gen_ai.input.messages": [_message(message) for message in asked]}
    known |= {"gen_ai.output.messages": [said], "rollout.backend": call and call.backend}
    versions = dict.fromkeys(filter(None, step.sampled.policy_versions))
    return known | {"rollout.policy_versions": [*versions]}


def _message(message: Message) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.role == "tool":
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.text})
    elif message.text:
        parts.append({"type": "text", "content": message.text})
    for call in message.tool_calls:
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments})
    return {"role": message.role, "parts": parts}


def _nanos(at: float) -> str:
    return str(int(at * 1e6) * 1000)


def _attributes(known: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in known.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, (bool, int, float)):
        kind = {bool: "boolValue", int: "intValue", float: "doubleValue"}[type(value)]
        return {kind: str(value) if kind == "intValue" else value}
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return {"arrayValue": {"values": [{"stringValue": part} for part in value]}}
    return {"stringValue": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
