"""Conversations by chance, programs that spell them anew, and what they mean, worked out another way."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from rollout.arrays import pack_ids, pack_logprobs
from rollout.trajectory import Message, ToolCall
from services.capture.call import ModelCall
from services.capture.matching import after
from services.capture.tree import Tree
from services.state.capture.nodes import ROOT, Node
from services.state.turns.entries import to_json

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
few = st.sampled_from(["", "a", "b", " a", "a\n", "ä"])
values = st.recursive(
    st.sampled_from([1, 1.0, True, None, "1", "a", 0.5, 2**60, 2.0**60, 10**400]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
    max_leaves=3,
)
arguments = st.dictionaries(st.sampled_from("xy"), values, max_size=2)


@st.composite
def turns(draw, name: str = "c") -> Message:
    """What a model says: text, thought, calls."""
    calls = [
        ToolCall(id=f"{name}{at}", name=draw(st.sampled_from(["look", "go"])), arguments=draw(arguments))
        for at in range(draw(st.integers(0, 2)))
    ]
    thought = draw(st.none() | st.just("hm"))
    return Message(role="assistant", content=draw(few), reasoning=thought, tool_calls=calls)


@st.composite
def replies(draw, turn: Message) -> list[Message]:
    """What follows a turn: answers of its tools, mostly in its order, or a user."""
    if not turn.tool_calls or draw(st.integers(0, 4)) == 0:
        return [Message(role="user", content=draw(few))]
    answered = turn.tool_calls if draw(st.booleans()) else draw(st.permutations(turn.tool_calls))
    tools = [Message(role="tool", content=draw(few), tool_call_id=call.id) for call in answered]
    return [*tools, *([Message(role="user", content="go on")] if draw(st.integers(0, 4)) == 0 else [])]


@st.composite
def openings(draw) -> list[Message]:
    system = [Message(role="system", content=draw(few))] if draw(st.booleans()) else []
    return [*system, Message(role="user", content=draw(few))]


@st.composite
def respelled(draw, messages: list[Message]) -> list[Message]:
    """The same conversation as another program would send it."""
    renamed = draw(st.booleans())
    out: list[Message] = []
    for message in messages:
        changed = message.model_copy(deep=True)
        if message.role == "assistant":
            if draw(st.booleans()):
                changed.reasoning = None
            if draw(st.booleans()) and message.text.strip():
                changed = Message.model_validate(
                    changed.model_dump() | {"content": f" {message.text.strip()}\n"}
                )
            for call in changed.tool_calls:
                call.id = f"other-{call.id}" if renamed else call.id
                call.arguments = as_javascript(call.arguments) if draw(st.booleans()) else call.arguments
            if changed.tool_calls and changed.text.strip() and draw(st.booleans()):
                out.append(changed.model_copy(update={"tool_calls": []}))
                changed = changed.model_copy(update={"content": []})
            if len(changed.tool_calls) == 2 and draw(st.booleans()):
                out.append(changed.model_copy(update={"tool_calls": changed.tool_calls[:1]}))
                changed = Message(role="assistant", tool_calls=changed.tool_calls[1:])
        elif message.role == "tool" and renamed and message.tool_call_id:
            changed.tool_call_id = f"other-{message.tool_call_id}"
        out.append(changed)
    return out


def as_javascript(value: Any) -> Any:
    """Arguments that were read and written again by a program whose numbers are doubles."""
    if isinstance(value, dict):
        return {name: as_javascript(value[name]) for name in reversed(value)}
    if isinstance(value, list):
        return [as_javascript(entry) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool) and value < 2**1000:
        return float(value)
    return value


def meaning(tools: list[Any], messages: list[Message]) -> list[Any]:
    """What a conversation says, as nested lists: equal if and only if it is the same one."""
    said: list[Any] = [json.dumps(tools, sort_keys=True)]
    for at, message in enumerate(messages):
        if message.role == "assistant":
            text = message.text.strip()
            said += [["text", text]] if text or not message.tool_calls else []
            said += [["call", call.name, _value(call.arguments)] for call in message.tool_calls]
        elif message.role == "tool":
            said.append(["tool", _answered(messages, at), message.text])
        else:
            said.append([message.role, message.text])
    return said


def _value(value: Any) -> Any:
    """With types told apart where Python does not, and doubles where JavaScript has them."""
    if isinstance(value, dict):
        return sorted((name, _value(entry)) for name, entry in value.items())
    if isinstance(value, list):
        return ["list", *map(_value, value)]
    if isinstance(value, bool | str | None):
        return [type(value).__name__, str(value)]
    return ["number", str(value) if value > 1e300 else str(float(value))]


def _answered(messages: list[Message], at: int) -> int:
    """Which call of the turn before an answer is for; the next one where that is not told."""
    begin = max(i for i in range(at + 1) if i == 0 or messages[i - 1].role == "assistant")
    first = begin
    while first and messages[first - 1].role == "assistant":
        first -= 1
    called = [call.id for message in messages[first:begin] for call in message.tool_calls]
    place = sum(message.role == "tool" for message in messages[begin:at])
    name = messages[at].tool_call_id
    return called.index(name) if called.count(name) == 1 else place


def node_of(tree: Tree, call: ModelCall, answer: Message, ids: list[int], sampled: list[int], **more) -> Node:
    """The node of a call that was answered, not yet in the tree."""
    attached = tree.attach(call)
    fields = {
        "call_id": f"call-{len(tree.nodes)}",
        "parent": attached.parent,
        "path": after(attached.path, answer),
        "ids": pack_ids(ids),
        "messages": to_json(attached.tail),
        "tools": json.dumps(call.tools) if attached.parent == ROOT and call.tools else "",
        "sampled": pack_ids(sampled),
        "spans": [("v1", 0, len(sampled))],
        "finish_reason": "stop",
        "message": answer.model_dump_json(exclude_defaults=True),
        "dialect": "chat",
        "backend": "scripted b0",
        "asked": {},
        "body": b"",
        "at_ms": 0,
    }
    logprobs, width = pack_logprobs([-0.5] * len(sampled))
    return Node(**(fields | {"logprobs": logprobs, "width": width} | more))
