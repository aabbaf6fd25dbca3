"""What an agent is told: the instruction, where it works, and what an agent before it has done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.suites.harbor.directory import StepDirectory
from rollout.trajectory import Message, ToolCall
from workers.errors import TaskError
from workers.handlers.harbor.mcp import described
from workers.handlers.harbor.trial import Trial

MAX_BYTES = 4 << 20
ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def opening(trial: Trial, step: StepDirectory, *, for_program: bool = False) -> list[Message]:
    """The messages that a task begins with; a program is told of MCP servers, which it speaks with itself.

    Raises:
        TaskError: `trajectory.json` is no document of ATIF.
    """
    before = prior_context(step.trajectory) if step.trajectory is not None else []
    return [*before, told(trial, step, described(trial) if for_program else ())]


def told(trial: Trial, step: StepDirectory, more: Sequence[str] = ()) -> Message:
    """The instruction of a step, as the task has it, with what Harbor's agents know by their own means."""
    lines = [f"The working directory is {trial.workdir}."]
    environment = trial.directory.config.environment
    if environment.skills_dir:
        lines.append(f"Skills, directories with a SKILL.md each, are in {environment.skills_dir}.")
    return Message(role="user", content="\n\n".join([step.instruction.strip(), "\n".join([*lines, *more])]))


def prior_context(file: Path) -> list[Message]:
    """The steps of an ATIF document, as messages.

    Raises:
        TaskError: It is none; the message names the step.
    """
    at = 0
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        messages: list[Message] = []
        for at, step in enumerate(json.loads(file.read_text())["steps"], 1):  # noqa: B007
            messages += _messages(step, bool(messages))
        return messages
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        where = f", step {at}" if at else ""
        raise TaskError(
            f"{file.name}{where}: no trajectory in ATIF: {type(error).__name__}: {error}"
        ) from error


def _messages(step: dict[str, Any], begun: bool) -> list[Message]:
    role = ROLES[step["source"]]
    if role == "system" and begun:
        role = "user"  # chat formats take a system text at the start alone
    calls = [
        ToolCall(id=call["tool_call_id"], name=call["function_name"], arguments=call["arguments"])
        for call in step.get("tool_calls") or ()
    ]
    message = Message(
        role=role,  # type: ignore[arg-type]
        content=_text(step.get("message")),
        reasoning=step.get("reasoning_content"),
        tool_calls=calls,
    )
    results = (step.get("observation") or {}).get("results") or ()
    if role != "assistant":
        # What was observed without a call is what the world said.
        return [message, *(Message(role="user", content=_text(result.get("content"))) for result in results)]
    names = {call.id: call.name for call in calls}
    answers = []
    for result in results:
        call = result.get("source_call_id")
        more = {"tool_call_id": call, "name": names[call]} if call in names else {}
        answers.append(Message(role="tool", content=_text(result.get("content")), **more))
    return [message, *answers]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", f"[{part.get('type')}: not shown]") for part in content)
    return content or ""
