"""BFCL's multi-turn tasks: calls of the package's APIs over turns of a user, judged by its checker."""

import ast
import os
import tempfile

# The package makes directories where it is imported, by default among the installed packages.
os.environ.setdefault("BFCL_PROJECT_ROOT", tempfile.mkdtemp(prefix="bfcl-"))

from bfcl_eval.constants.category_mapping import MULTI_TURN_CATEGORY
from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as MORE
from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call
from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry


class Episode:
    """One entry. The user's next turn comes where the model calls no more."""

    def __init__(self, ask):
        self._turns, self._exhausted = [[]], False

    def rows(self, env, args):
        return [{"env": env, "index": place} for place, _ in enumerate(load_dataset_entry(env))]

    def reset(self, task, seed):
        category = task["env"]
        if category not in MULTI_TURN_CATEGORY:
            raise ValueError(f"no category {category!r}; there are: {', '.join(MULTI_TURN_CATEGORY)}")
        self._entry = load_dataset_entry(category)[task["index"]]
        truths = {row["id"]: row["ground_truth"] for row in load_ground_truth_entry(category)}
        self._truth, self._later = truths[self._entry["id"]], self._entry.get("missed_function", {})
        self._functions = {doc["name"]: doc for doc in self._entry["function"]}
        return {"messages": self._entry["question"][0], "tools": [*map(_tool, self._functions.values())]}

    def step(self, text, calls):
        if calls:
            self._exhausted = len(self._turns[-1]) >= MAXIMUM_STEP_LIMIT
            return {"done": True} if self._exhausted else {"messages": self._executed(calls)}
        place = len(self._turns)
        if place == len(self._entry["question"]):
            return {"done": True}
        self._turns.append([])
        added = self._later.get(str(place), [])
        self._functions.update({doc["name"]: doc for doc in added})
        shown = [{"role": "user", "content": MORE.format(functions=added)}]
        return {"messages": shown if added else self._entry["question"][place]}

    def _executed(self, calls):
        """What the calls give, in their order.

        The package evaluates them as Python. So one that names no function is answered, and never written.
        """
        made, refused = [], []
        for call in calls:
            if call["name"] in self._functions and all(word.isidentifier() for word in call["arguments"]):
                written = ", ".join(f"{word}={value!r}" for word, value in call["arguments"].items())
                made.append(f"{call['name']}({written})")
                refused.append(None)
            else:
                refused.append(f"Error: no function {call['name']!r} with such parameters")
        if made:
            self._turns[-1].append(made)
        entry = self._entry
        world = entry["initial_config"], entry["involved_classes"], "model", entry["id"]
        given, _ = execute_multi_turn_func_call(made, *world, long_context="long_context" in entry["id"])
        given = iter(given)
        return [{"role": "tool", "content": no or next(given)} for no in refused]

    def score(self, messages):
        """1 where the checker finds states and answers as they should be after each of the user's turns."""
        if self._exhausted or len(self._turns) != len(self._truth):
            return {"reward": 0.0, "parts": {"force_terminated": 1.0}}
        category = self._entry["id"].rsplit("_", 1)[0]
        verdict = multi_turn_checker(self._turns, self._truth, self._entry, category, "model")
        return {"reward": float(verdict["valid"])}

    def solution(self):
        """The turns of the ground truth: all calls of one of the user's, then a word."""
        docs = {doc["name"]: doc for later in self._later.values() for doc in later} | self._functions
        turns = []
        for written in self._truth:
            if written:
                turns.append({"text": "", "calls": [_call(call, docs) for call in written]})
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
    kind = node.get("type")
    shown = {name: _schema(value) for name, value in node.items()}
    return shown | ({"type": GORILLA_TO_OPENAPI.get(kind, kind)} if isinstance(kind, str) else {})


def _call(written, docs):
    """A call that is written in Python, as the model would make it."""
    call = ast.parse(written, mode="eval").body
    values = dict(zip(docs[call.func.id]["parameters"]["properties"], call.args, strict=False))
    values.update({keyword.arg: keyword.value for keyword in call.keywords})
    arguments = {name: ast.literal_eval(value) for name, value in values.items()}
    return {"id": "call", "name": call.func.id, "arguments": arguments}
