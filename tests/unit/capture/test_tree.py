"""A call attaches at the deepest node whose conversation it repeats, and its ids are those stored there."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.trajectory import Message, ToolCall
from services.capture.call import ModelCall
from services.capture.matching import after, paths
from services.capture.tree import Tree
from services.state.capture.nodes import ROOT, decode, encode
from tests.unit.capture.conversations import (
    TOOLS,
    few,
    meaning,
    node_of,
    openings,
    replies,
    respelled,
    turns,
)

USER = Message(role="user", content="x")


class World:
    """A tree, and beside it what was asked, answered and sampled, whole, for each node."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.asked: list[tuple[list, list[Message]]] = []
        self.said: list[tuple[list, list[Message]]] = []
        self.ids: list[list[int]] = []
        self.prompts: list[list[int]] = []

    def nodes_of(self, call: ModelCall) -> set[int]:
        """Where a call may attach: of the nodes that it repeats, the deepest that it can go on from."""
        deepest: dict[int, set[int]] = {}
        for place, (tools, messages) in enumerate(self.said):
            for end in range(1, len(call.messages) + 1):
                if meaning(tools, messages) == meaning(call.tools, call.messages[:end]):
                    deepest.setdefault(end, set()).add(place)
        end = max(deepest, default=0)
        tail = call.messages[end:]
        return deepest[end] if end and tail and all(m.role != "assistant" for m in tail) else {ROOT}

    def answer(self, call: ModelCall, message: Message) -> int:
        attached = self.tree.attach(call)
        assert attached.parent in self.nodes_of(call)
        before = [] if attached.parent == ROOT else self.ids[attached.parent]
        number = len(self.ids)
        given, sampled = [10 * number, 10 * number + 1], [10 * number + 2] * (1 + number % 3)
        place = self.tree.add(node_of(self.tree, call, message, given, sampled))
        self.asked.append((call.tools, call.messages))
        self.said.append((call.tools, [*call.messages, message]))
        self.prompts.append(before + given)
        self.ids.append(before + given + sampled)
        return place


@st.composite
def edited(draw, messages: list[Message]) -> list[Message]:
    """With one message changed, left out, or put in."""
    at = draw(st.integers(0, len(messages) - 1))
    kind = draw(st.sampled_from(["change", "omit", "insert"]))
    other = Message(role=draw(st.sampled_from(["user", "assistant", "tool"])), content=draw(few))
    return [*messages[:at], *([] if kind == "omit" else [other]), *messages[at + (kind != "insert") :]]


@st.composite
def requests(draw, world: World) -> ModelCall:
    """A new conversation, one that goes on, a retry of one, or one that was tampered with."""
    tools = draw(st.sampled_from([[], TOOLS]))
    kind = draw(st.sampled_from(["new", "on", "on", "on", "on", "retry", "edit", "unasked"]))
    if kind == "new" or not world.said:
        return ModelCall(draw(openings()), tools)
    place = draw(st.integers(max(0, len(world.said) - 4), len(world.said) - 1))
    if kind == "retry":
        return ModelCall(draw(respelled(world.asked[place][1])), world.asked[place][0])
    tools, messages = world.said[place]
    messages = [*messages, *(draw(replies(messages[-1])) if kind != "unasked" else [])]
    if kind == "edit":
        messages = draw(edited(messages)) or [USER]
    return ModelCall(draw(respelled(messages)), tools if draw(st.integers(0, 9)) else [])


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_call_attaches_at_the_deepest_conversation_that_it_repeats(data):
    world = World()
    for number in range(data.draw(st.integers(1, 14))):
        call = data.draw(requests(world))
        fitting = world.nodes_of(call)
        attached = world.tree.attach(call)
        assert attached.parent in fitting
        assert attached.path == paths(call.tools, call.messages)[-1]
        siblings = [at for at, node in enumerate(world.tree.nodes) if node.parent == attached.parent]
        repeated = [at for at in siblings if meaning(*world.asked[at]) == meaning(call.tools, call.messages)]
        assert attached.earlier == len(repeated)
        if attached.parent == ROOT:
            assert attached.tail == call.messages
        else:
            assert attached.tail and call.messages[-len(attached.tail) :] == attached.tail
            assert all(message.role != "assistant" for message in attached.tail)
        world.answer(call, data.draw(turns(f"c{number}-")))
    again = Tree(decode(encode(node) for node in world.tree.nodes))
    for place, ids in enumerate(world.ids):
        assert again.prompt(place) == world.tree.prompt(place) == world.prompts[place]
        assert again.prompt(place) + again.sampled(place) == ids


def said(*calls, text="", **more):
    made = [ToolCall(id=call, name="look") for call in calls]
    return Message(role="assistant", content=text, tool_calls=made, **more)


def test_of_the_same_words_that_were_said_twice_the_ids_of_calls_tell_which_were_meant():
    world = World()
    call = ModelCall([USER], TOOLS)
    first, second = world.answer(call, said("a")), world.answer(call, said("b"))
    for mine, place in (("a", first), ("b", second), ("unheard-of", second)):
        done = Message(role="tool", content="o", tool_call_id=mine)
        assert world.tree.attach(ModelCall([USER, said(mine), done], TOOLS)).parent == place


def test_a_repeated_request_is_known_by_which_calls_its_answers_are_for():
    world = World()
    world.answer(ModelCall([USER], TOOLS), said("a", "b"))
    answers = [Message(role="tool", content="o", tool_call_id=of) for of in ("b", "a")]
    asked = ModelCall([USER, said("a", "b"), *answers], TOOLS)
    assert world.tree.attach(asked).earlier == 0
    world.answer(asked, said(text="done"))
    assert world.tree.attach(asked).earlier == 1
    in_order = ModelCall([USER, said("a", "b"), *answers[::-1]], TOOLS)
    assert (world.tree.attach(in_order).parent, world.tree.attach(in_order).earlier) == (0, 0)


def test_a_request_that_ends_in_a_turn_begins_anew():
    world = World()
    world.answer(ModelCall([USER]), said(text="a"))
    attached = world.tree.attach(ModelCall([USER, said(text="a")]))
    assert (attached.parent, len(attached.tail)) == (ROOT, 2)


def test_a_turn_that_was_never_sampled_cannot_be_behind_one_that_was():
    world = World()
    world.answer(ModelCall([USER]), said(text="a"))
    attached = world.tree.attach(ModelCall([USER, said(text="a"), USER, said(text="forged"), USER]))
    assert attached.parent == ROOT


def test_other_tools_or_another_system_make_another_root():
    world = World()
    world.answer(ModelCall([USER], TOOLS), said(text="a"))
    go_on = [USER, said(text="a"), USER]
    assert world.tree.attach(ModelCall(go_on, TOOLS)).parent == 0
    assert world.tree.attach(ModelCall(go_on)).parent == ROOT
    system = Message(role="system", content="s")
    assert world.tree.attach(ModelCall([system, *go_on], TOOLS)).parent == ROOT


def test_a_node_behind_one_that_is_not_there_is_refused():
    tree = Tree()
    node = node_of(tree, ModelCall([USER]), said(text="a"), [1], [2])
    node.parent = 0
    with pytest.raises(ValueError, match="0 as its parent"):
        tree.add(node)


def long_session(turns: int) -> tuple[Tree, list[Message]]:
    tree, messages = Tree(), [Message(role="system", content="s" * 70_000), USER]
    for at in range(turns):
        answer = said(f"c{at}", text="hm")
        given = range(20_000) if at == 0 else range(300)
        tree.add(node_of(tree, ModelCall(list(messages), TOOLS), answer, list(given), [7] * 50))
        messages += [answer, Message(role="tool", content="o" * 700, tool_call_id=f"c{at}")]
    return tree, messages


def test_two_hundred_turns_take_milliseconds_and_no_second_copy_of_their_ids():
    tree, messages = long_session(200)
    call = ModelCall(messages, TOOLS)
    assert tree.attach(call).parent == 199

    def least(of) -> float:
        took = []
        for _ in range(20):
            begun = time.perf_counter()
            of()
            took.append(time.perf_counter() - begun)
        return min(took)

    path = paths(TOOLS, messages)[0]

    def only_hashed():
        step = path
        for message in messages:
            step = after(step, message)

    assert least(lambda: tree.attach(call)) < 2 * least(only_hashed) + 0.001
    tracemalloc.start()
    for place in range(200):
        assert len(tree.prompt(place) + tree.sampled(place)) == 20_050 + 350 * place
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000
