"""BFCL's multi-turn tasks: calls of the package's APIs over turns of a user, judged by its checker."""

import ast
import os
import tempfile

# The package makes directories where it is imported, by default among the installed packages.
os.environ.setdefault("BFCL_PROJECT_ROOT", tempfile.mkdtemp(prefix="bfcl-"))

from bfcl_eval.constants.category_mapping import MULTI_TURN_CATEGORY
from bfcl_eval.constants.default_prompts import (
    DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING,
    MAXIMUM_STEP_LIMIT,
)
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (
    multi_turn_checker,
)
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import (
    execute_multi_turn_func_call,
)
from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry


class Episode:
    """One entry. The user's next turn comes where the model calls no more."""

    def __init__(self, ask):
        self._turns, self._exhausted = [[]], False

    def reset(self, task, seed):
        category, index = task["env"], task["index"]
        if category not in MULTI_TURN_CATEGORY:
            raise ValueError(f"no category {category!r}; there are: {', '.join(MULTI_TURN_CATEGORY)}")
        self._entry = load_dataset_entry(category)[index]
        truths = load_ground_truth_entry(category)
        self._truth = next(row["ground_truth"] for row in truths if row["id"] == self._entry["id"])
        self._later = self._entry.get("missed_function", {})
        self._functions = {doc["name"]: doc for doc in self._entry["function"]}
        return {
            "messages": self._entry["question"][0],
            "tools": [_tool(doc) for doc in self._functions.values()],
        }

    def rows(self, env, args):
        """The tasks of a category."""
        return [{"env": env, "index": place} for place, _ in enumerate(load_dataset_entry(env))]

    def step(self, text, calls):
        if calls:
            self._exhausted = len(self._turns[-1]) >= MAXIMUM_STEP_LIMIT
            return {"done": True} if self._exhausted else {"messages": self._executed(calls)}
        place = len(self._turns)
        if place == len(self._entry["question"]):
            return {"done": True}
        self._turns.append([])
        if added := self._later.get(str(place)):
            self._functions.update({doc["name"]: doc for doc in added})
            shown = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=added)
            return {"messages": [{"role": "user", "content": shown}]}
        return {"messages": self._entry["question"][place]}

    def _executed(self, calls):
        """What the calls give, in their order.

        The package evaluates them as Python. So one that names no function is answered, and never written.
        """
        made, answers = [], []
        for call in calls:
            name, arguments = call.get("name"), call.get("arguments", {})
            if "malformed" in call:
                answers.append(f"Error: malformed tool call ({call['malformed']})")
            elif name not in self._functions or not all(word.isidentifier() for word in arguments):
                answers.append(f"Error: no function {name!r} with such parameters")
            else:
                written = ", ".join(f"{word}={value!r}" for word, value in arguments.items())
                made.append(f"{name}({written})")
                answers.append(None)
        self._turns[-1].append(made)
        entry = self._entry
        world = entry["initial_config"], entry["involved_classes"], "model", entry["id"]
        given, _ = execute_multi_turn_func_call(made, *world, long_context="long_context" in entry["id"])
        given = iter(given)
        return [
            {
                "role": "tool",
                "tool_call_id": call.get("id"),
                "content": next(given) if answer is None else answer,
            }
            for call, answer in zip(calls, answers, strict=True)
        ]

    def score(self, messages):
        """1 where the checker finds states and answers as they should be after each of the user's turns."""
        if self._exhausted or len(self._turns) != len(self._truth):
            return {"reward": 0.0, "parts": {"force_terminated": 1.0}}
        # Calls that were answered and not executed are none.
        turns = [[step for step in turn if step] for turn in self._turns]
        category = self._entry["id"].rsplit("_", 1)[0]
        verdict = multi_turn_checker(turns, self._truth, self._entry, category, "model")
        return {"reward": float(verdict["valid"])}

    def solution(self):
        """The turns of the ground truth: all calls of one of the user's, then a word."""
        docs = dict(self._functions)
        docs.update({doc["name"]: doc for later in self._later.values() for doc in later})
        turns = []
        for calls in self._truth:
            if calls:
                turns.append({"text": "", "calls": [_call(written, docs) for written in calls]})
            turns.append({"text": "Done.", "calls": []})
        return turns


def _tool(doc):
    shown = {"name": doc["name"], "description": doc["description"], "parameters": _schema(doc["parameters"])}
    return {"type": "function", "function": shown}


def _schema(node):
    """A schema with the types of JSON, where BFCL has those of Python."""
    if isinstance(node, list):
        return [_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    shown = {name: _schema(value) for name, value in node.items()}
    if isinstance(node.get("type"), str):
        shown["type"] = GORILLA_TO_OPENAPI.get(node["type"], node["type"])
    return shown


def _call(written, docs):
    """A call that is written in Python, as the model would make it."""
    call = ast.parse(written, mode="eval").body
    names = docs[call.func.id]["parameters"]["properties"]
    values = dict(zip(names, call.args, strict=False))
    values.update({keyword.arg: keyword.value for keyword in call.keywords})
    arguments = {name: ast.literal_eval(value) for name, value in values.items()}
    return {"id": "call", "name": call.func.id, "arguments": arguments}
