"""Two requests have the same digests if and only if they say the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.trajectory import Message, ToolCall
from services.capture.matching import after, paths
from services.state.rollouts.payloads import with_whole_characters
from tests.unit.capture.conversations import TOOLS, meaning, openings, replies, respelled, turns

quick = settings(max_examples=300, deadline=None, derandomize=True)


def turn(text="", *calls, **more):
    made = [ToolCall(id=f"c{at}", name=name, arguments=given) for at, (name, given) in enumerate(calls)]
    return Message(role="assistant", content=text, tool_calls=made, **more)


def answer(text, of=None):
    return Message(role="tool", content=text, tool_call_id=of)


def end(*messages, tools=()):
    return paths(list(tools), list(messages))[-1]


ASKED = Message(role="user", content="x")
CALL = ("look", {"a": 1, "b": [2.0, {"c": "d"}]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([turn("a")], [turn(" a\n")]),
        ([turn("a", reasoning="hm")], [turn("a")]),
        ([turn("a")], [turn("a").model_copy(update={"name": "me"})]),
        ([turn("", CALL)], [turn("", ("look", {"b": [2, {"c": "d"}], "a": 1.0}))]),
        ([turn("", ("f", {"n": 2**60 + 1}))], [turn("", ("f", {"n": 2.0**60}))]),
        ([turn("a", CALL)], [turn("a"), turn("", CALL)]),
        ([turn("", CALL, CALL)], [turn("", CALL), turn("", CALL)]),
        ([turn("", CALL), answer("o", "c0")], [turn("", CALL), answer("o")]),
        ([turn("", CALL), answer("o", "c0")], [turn("", CALL), answer("o", "unheard-of")]),
    ],
)
def test_another_spelling_is_the_same(one, other):
    assert end(ASKED, *one) == end(ASKED, *other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([turn("a")], [turn("b")]),
        ([turn("a  b")], [turn("a b")]),
        ([turn("a"), turn("b")], [turn("ab")]),
        ([turn("")], []),
        ([turn("a"), turn("")], [turn("a")]),
        ([turn("", CALL)], [turn("", ("go", CALL[1]))]),
        ([turn("", ("f", {"a": 1}))], [turn("", ("f", {"a": True}))]),
        ([turn("", ("f", {"a": 1}))], [turn("", ("f", {"a": "1"}))]),
        ([turn("", ("f", {"a": 10**400}))], [turn("", ("f", {"a": 10**400 + 1}))]),
        ([turn("a"), Message(role="user", content="y")], [turn("a"), Message(role="user", content="y ")]),
        ([turn("a"), Message(role="user", content="y")], [turn("a"), answer("y")]),
        ([turn("", CALL), answer("o"), answer("p")], [turn("", CALL), answer("p"), answer("o")]),
        ([turn('a", "c')], [turn("a", ("c", {}))]),
        ([turn("call\n[]")], [turn("", ("", {}))]),
    ],
)
def test_another_meaning_is_another_path(one, other):
    assert end(ASKED, *one) != end(ASKED, *other)


def test_tools_and_their_order_count_but_not_the_order_of_their_fields():
    other = [{"function": dict(reversed(TOOLS[0]["function"].items())), "type": "function"}]
    second = [{"type": "function", "function": {"name": "go"}}]
    assert end(ASKED, tools=TOOLS) == end(ASKED, tools=other)
    assert end(ASKED, tools=TOOLS) != end(ASKED)
    assert end(ASKED, tools=[*TOOLS, *second]) != end(ASKED, tools=[*second, *TOOLS])


def test_answers_of_parallel_calls_that_were_exchanged_are_not_the_same():
    both = turn("", CALL, CALL)
    asked = [answer("o", "c0"), answer("p", "c1")]
    assert end(both, *asked) != end(both, answer("o", "c1"), answer("p", "c0"))
    assert end(both, *asked) != end(both, *reversed(asked))
    renamed = both.model_copy(deep=True)
    for call in renamed.tool_calls:
        call.id = f"x{call.id}"
    exchanged = [answer("o", "xc1"), answer("p", "xc0")]
    assert end(renamed, *exchanged) == end(both, answer("o", "c1"), answer("p", "c0"))


@pytest.mark.parametrize("odd", ["\ud800", 10**400, float("inf"), [[1.0, {"x": "\ud800"}]]])
def test_what_json_can_hardly_say_has_a_digest_all_the_same(odd):
    said = turn(str(odd), ("look", {"a": odd}))
    kept = turn(str(odd).replace("\ud800", "?"), ("look", with_whole_characters({"a": odd})))
    assert end(ASKED, said) == end(ASKED, kept) != end(ASKED, turn(str(odd), CALL))


def test_a_path_goes_on_with_an_answer():
    asked = [ASKED, turn("", CALL), answer("o", "c0")]
    digests = paths(TOOLS, asked)
    assert len(digests) == 4 and len({*digests}) == 4
    assert all(len(digest) == 16 for digest in digests)
    assert after(digests[-1], turn("done", CALL)) == end(*asked, turn("done", CALL), tools=TOOLS)


@st.composite
def conversations(draw):
    messages = draw(openings())
    for at in range(draw(st.integers(0, 2))):
        said = draw(turns(f"c{at}-"))
        messages += [said, *draw(replies(said))]
    return messages[draw(st.integers(0, 1)) :]


@quick
@given(conversations(), conversations(), st.data())
def test_digests_are_equal_exactly_where_the_meaning_is(one, other, data):
    again = data.draw(respelled(one))
    assert meaning(TOOLS, again) == meaning(TOOLS, one)
    assert end(*again, tools=TOOLS) == end(*one, tools=TOOLS)
    assert (end(*one) == end(*other)) == (meaning([], one) == meaning([], other))
