"""A model for programs that we did not write: it follows the plan that stands in its task, by whatever shell
tool it is offered, in Qwen3's format.

    PLAN: ["echo hello > out.txt", "seq 1 2000", "! all done"]

A step is a command for the shell, with `12 * ` in front twelve of them, in which `{n}` is the number, or with
`! ` in front a last answer. Which step is next is told by what the turns say that the prompt holds, so the
answer to the same ids is the same, also where some of it is there. What is asked beside the task (no plan, or
no tools) is answered with a sentence, and a request for a summary by one that carries the plan on.

For `--script tests.helpers.agent_script:turn` of the fake engine, started with `--tokenizer` and
AGENT_TOKENIZER at Qwen3's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer

START, END, THOUGHT = "<|im_start|>assistant\n", "<|im_end|>", "<think>\n\n</think>\n\n"
PLAN = re.compile(r'PLAN: (\[(?:"(?:[^"\\]|\\.)*"(?:, )?)*\])')
TIMES = re.compile(r"(\d+) \* (.*)", re.DOTALL)
DONE, STEP = re.compile(r"STEPS DONE: (\d+)"), re.compile(r"\bStep (\d+)\.(?=\s|<)")
SUMMARY = re.compile(r"(?i)text only|compaction\. create|state_snapshot|summari[zs]|structured.{0,30}summary")
HEARD = re.compile(r"(?s)<tool_response>.*?</tool_response>|<summary>.*?</summary>")
SHELLS = re.compile(r"(?i)bash|shell|exec|terminal|command")
COMMAND = ("command", "cmd", "script", "code")
LAST = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""By a shell's echo of it mini-SWE-agent is told that the work is done: it knows no other end."""


@cache
def _tokenizer() -> Tokenizer:
    # Not by transformers, which take seconds to import: the engine stands still meanwhile.
    return Tokenizer.from_file(f"{os.environ['AGENT_TOKENIZER']}/tokenizer.json")


def turn(prompt: list[int], number: int) -> list[int]:
    """The rest of the turn that these ids begin."""
    return rest_of_turn(prompt, says)


def rest_of_turn(prompt: list[int], says: Callable[[str], str]) -> list[int]:
    """The same of a turn whose text another script says."""
    tokenizer = _tokenizer()
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    before, _, begun = text.rpartition(START)
    whole = tokenizer.encode(says(before) + END, add_special_tokens=False).ids
    at = len(tokenizer.encode(begun, add_special_tokens=False).ids) if begun else 0
    return whole[at:] or whole[-1:]


def says(before: str) -> str:
    """The turn's text behind this conversation."""
    messages = before.split("<|im_start|>")
    plans, tools = PLAN.findall(before), _tools(before)
    turns = sum(part.startswith("assistant") for part in messages)
    # A program may leave turns out, or put what they said into a summary: they tell their number themselves.
    said = "".join(part for part in messages if not part.startswith("system"))
    marks = [int(mark) for mark in DONE.findall(said)] + [int(mark) + 1 for mark in STEP.findall(said)]
    at = max(marks, default=0)
    asked = HEARD.sub("", PLAN.sub("", before.rpartition(START)[2]))
    if (turns and SUMMARY.search(asked)) or (not tools and "summar" in before):
        plan = f"The task was given as PLAN: {plans[0]}\n" if plans else ""
        rest = "All went well so far, and what is left is to be done as the plan says."
        return f"{THOUGHT}<summary>{plan}STEPS DONE: {at}\n{rest}</summary>"
    if not plans:
        return f"{THOUGHT}A short title of {len(before)} characters"
    steps = [one for step in json.loads(plans[0]) for one in _each(step)]
    step = steps[min(at, len(steps) - 1)]
    shell = next((tool for tool in tools if SHELLS.search(tool["name"])), None)
    last, text = step.startswith("! "), step.removeprefix("! ")
    if shell is None or (last and LAST not in before):
        return f"{THOUGHT}{text}"
    text, step = (text, f"echo {LAST}") if last else (f"Step {at}.", step)
    call = {"name": shell["name"], "arguments": _arguments(shell, step)}
    return f"{THOUGHT}{text}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _each(step: str) -> list[str]:
    many = TIMES.fullmatch(step)
    return [many[2].replace("{n}", str(n)) for n in range(int(many[1]))] if many else [step]


def _tools(before: str) -> list[dict[str, Any]]:
    block = before.partition("<tools>\n")[2].partition("\n</tools>")[0]
    return [json.loads(line)["function"] for line in block.splitlines() if line.strip()]


def _arguments(tool: dict[str, Any], command: str) -> dict[str, Any]:
    """What a schema requires, the command in its place."""
    schema = tool.get("parameters") or {}
    fields = schema.get("properties") or {}
    name = next((name for name in COMMAND if name in fields), "command")
    kind = fields.get(name, {}).get("type")
    arguments: dict[str, Any] = {name: ["bash", "-lc", command] if kind == "array" else command}
    for needed in schema.get("required", ()):
        arguments.setdefault(needed, _dummy(fields.get(needed, {})))
    return arguments


def _dummy(field: dict[str, Any]) -> Any:
    if field.get("enum"):
        return field["enum"][0]
    kind = field.get("type")
    return {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}.get(str(kind), "step")
