"""Prompts begin with the ids that are stored, whatever was kept of the one before."""

from __future__ import annotations

import asyncio

import pytest

from rollout.trajectory import Message
from services.capture.call import ModelCall
from services.capture.prompts import Prompt, Prompts
from services.capture.tree import Tree
from services.state.capture.nodes import ROOT
from tests.unit.capture.conversations import node_of
from workers.agent.formats import CodecError


class Letters:
    """A chat format in which a letter is an id."""

    refuses = False

    def render(self, messages, tools):
        return [ord(letter) for message in messages for letter in message.text]

    def bridge(self, prompt, sampled, new):
        if self.refuses:
            raise CodecError("it does not append")
        return [len(prompt), *self.render(new, [])]


class Capture:
    def __init__(self, most_ids: int = 1000) -> None:
        self.prompts, self.codec, self.most_ids = Prompts(most_ids), Letters(), most_ids

    def ask(self, tree: Tree, messages: list[Message]) -> Prompt:
        """The same prompt is made by a process that keeps nothing, and it is what is then stored."""
        call = ModelCall(messages)
        made = asyncio.run(self.prompts.of(tree, self.codec, call))
        assert made == asyncio.run(Prompts(0).of(tree, self.codec, call))
        sampled = [7, len(tree.nodes)]
        answer = Message(role="assistant", content=f"answer {len(tree.nodes)}")
        place = tree.add(node_of(tree, call, answer, made.given, sampled))
        assert tree.prompt(place) == made.ids
        messages.append(answer)
        return made


def user(text: str) -> Message:
    return Message(role="user", content=text)


@pytest.mark.parametrize("most_ids", [0, 30, 1000])
def test_turns_and_branches_begin_with_what_is_stored(most_ids):
    capture, trees = Capture(most_ids), [Tree(), Tree()]
    talks = [[user("task")], [user("task")], [user("other")]]
    for number in range(4):
        for at, talk in enumerate(talks):
            made = capture.ask(trees[at % 2], talk)
            assert (made.place.parent == ROOT) == (number == 0)
            talk.append(user(f"more {number}"))
    # An earlier turn is answered otherwise: what was kept is of a later one.
    made = capture.ask(trees[0], [*talks[0][:2], user("instead")])
    assert trees[0].prompt(0) == made.ids[:4] and made.place.parent == 0


def test_what_the_format_cannot_append_begins_anew():
    capture, tree, talk = Capture(), Tree(), [user("task")]
    capture.ask(tree, talk)
    capture.codec.refuses = True
    made = asyncio.run(capture.prompts.of(tree, capture.codec, ModelCall([*talk, user("more")])))
    assert made.place.parent == ROOT
    assert made.given == made.ids == [ord(letter) for letter in "taskanswer 0more"]
