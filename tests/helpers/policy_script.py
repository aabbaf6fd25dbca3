"""A policy that plays fixed lists of actions: the fake engine's `--script tests.helpers.policy_script:play`.

A test writes the lists with `Plans`; a rollout's prompt names its list as `plan:NAME` anywhere in its text.
The turn to play is the number of assistant turns that the prompt holds already, so retries and other backends
give the same answer.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from tests.helpers.llm_servers import DEMO_MODEL
from workers.agent.codec import Codec, load_codec
from workers.agent.replay import Action, encode

VARIABLE = "TEST_PLANS"
_NAME = re.compile(r"plan:([a-z0-9-]+)")
_TURN = "<|im_start|>assistant"


class Plans:
    """The lists of actions of a test session, in a directory that the engine reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, name: str, actions: list[Action]) -> str:
        """Write a list; returns the words that a prompt names it by."""
        data = [action.model_dump() for action in actions]
        (self.directory / f"{name}.json").write_text(json.dumps(data))
        return f"plan:{name}"


def plan_of(prompt: list[int], name: re.Pattern[str], variable: str) -> tuple[Codec, str, str, list]:
    """Codec and text of a prompt, the name in it, and what the variable's directory has under that name."""
    codec = load_codec(str(DEMO_MODEL))
    text = codec.tokenizer.decode(prompt)
    named = name.search(text)
    if named is None:
        raise ValueError(f"the prompt names no plan: {text[-200:]!r}")
    data = json.loads((Path(os.environ[variable]) / f"{named[1]}.json").read_text())
    return codec, text, named[1], data


def play(prompt: list[int], call_number: int) -> list[int]:
    """All ids of the turn that is due, its stop id included; behind the last action an empty turn."""
    codec, text, _, data = plan_of(prompt, _NAME, VARIABLE)
    actions = [Action.model_validate(action) for action in data]
    turn = text.count(_TURN) - 1
    return encode(actions[turn] if turn < len(actions) else Action(), codec, prompt)
