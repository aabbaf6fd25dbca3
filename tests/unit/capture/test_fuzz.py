"""Whatever a body says, a dialect reads a call or refuses it; and what it reads can be stored."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.trajectory import Message
from services.capture.call import ModelCall, Refusal
from services.capture.dialects.anthropic import Anthropic
from services.capture.dialects.chat import Chat
from services.capture.dialects.gemini import Gemini
from services.capture.dialects.responses import Responses

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "STRING", "enum": ["a"], "nullable": True}}}
BODIES = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {}}]},
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": [1, {"y": null}]}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "temperature": 0.5,
        "stop": ["x"],
        "max_tokens": 5,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "modalities": ["text"],
    },
    "responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D."}]},
            {"role": "user", "content": "Go."},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
            {"type": "function_call", "call_id": "a", "name": "f", "namespace": "n", "arguments": '{"x": 1}'},
            {"type": "custom_tool_call", "call_id": "b", "name": "p", "input": "***"},
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "ok"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
            {"type": "custom", "name": "p", "format": {"type": "text"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            {"type": "web_search"},
        ],
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "high"},
        "max_output_tokens": 5,
        "stream": True,
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "One."},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": "no"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "tools": [
            {"name": "f", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stream": True,
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "Be brief."}], "role": "user"},
        "contents": [
            {"role": "user", "parts": [{"text": "Go."}]},
            {
                "role": "model",
                "parts": [
                    {"text": "Hm.", "thought": True, "thoughtSignature": "s"},
                    {"functionCall": {"name": "f", "args": {"x": [1]}, "id": "a"}},
                    {"functionCall": {"name": "f"}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"name": "f", "id": "a", "response": {"output": "1"}}},
                    {"functionResponse": {"name": "f", "response": {"error": {"code": 1}}}},
                    {"text": "And?"},
                ],
            },
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}, {"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {
            "temperature": 1,
            "maxOutputTokens": 5,
            "candidateCount": 1,
            "responseModalities": ["TEXT"],
            "thinkingConfig": {"includeThoughts": True},
        },
    },
}
DIALECTS = {"chat": Chat(), "responses": Responses(), "anthropic": Anthropic(), "gemini": Gemini()}
WORDS = [
    "",
    "text",
    "tool",
    "assistant",
    "system",
    "user",
    "function",
    "none",
    "{}",
    "[",
    '{"a":1e999}',
    "\x00",
    "𝄞",
]
WORDS += ["tool_result", "message", "reasoning", "image", "null", "9" * 400, "x" * 5000, "../", "\u2028"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value, path=()):
    """Paths of all values within a value."""
    yield path
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*path, key))


def changed(value, path, change):
    """A value in which that at a path is another."""
    if not path:
        return change(value)
    out = value.copy()
    out[path[0]] = changed(value[path[0]], path[1:], change)
    return out


def check(name: str, body: bytes) -> ModelCall | Refusal:
    """What a dialect makes of a body."""
    try:
        call = DIALECTS[name].read(body, model="m", stream=True)
    except Refusal as refusal:
        assert refusal.kind == "invalid"
        assert len(str(refusal)) < 500
        str(refusal).encode()
        return refusal
    assert call.messages
    assert all(entry.role != "system" for entry in call.messages[1:])
    assert type(call.stream) is bool
    assert call.max_tokens is None or call.max_tokens > 0
    for entry in call.messages:
        assert Message.model_validate_json(entry.model_dump_json()) == entry
    stored = json.dumps([call.tools, call.asked, call.model]).encode()
    assert len(stored) < 2 * len(body) + 5000
    return call


@pytest.mark.parametrize("name", DIALECTS)
def test_bodies_are_read_before_they_are_changed(name):
    call = check(name, json.dumps(BODIES[name]).encode())
    assert isinstance(call, ModelCall)
    assert call.tools
    assert call.asked
    assert any(entry.tool_calls for entry in call.messages)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_changed_bodies_are_read_or_refused(name, data):
    body = BODIES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(places(body), key=str)))
        how = data.draw(st.sampled_from(["put", "list", "twice", "drop"]))
        if how == "put" or not path:
            drawn = data.draw(VALUES)
            body = changed(body, path, lambda _, drawn=drawn: drawn)
        elif how == "list":
            body = changed(body, path, lambda value: [value])
        elif how == "twice":
            body = changed(
                body, path, lambda value: value * 2 if isinstance(value, list | str) else {"a": value}
            )
        else:
            body = changed(
                body,
                path[:-1],
                lambda value, key=path[-1]: (
                    {k: v for k, v in value.items() if k != key}
                    if isinstance(value, dict)
                    else [v for i, v in enumerate(value) if i != key]
                ),
            )
    check(name, json.dumps(body).encode())


@pytest.mark.parametrize("name", DIALECTS)
def test_damaged_bytes_are_read_or_refused(name):
    whole = json.dumps(BODIES[name], ensure_ascii=False).encode()
    dice = random.Random(1)
    refused = 0
    for _ in range(1500):
        body = bytearray(whole)
        at = dice.randrange(len(body))
        match dice.randrange(4):
            case 0:
                body[at] = dice.randrange(256)
            case 1:
                del body[at:]
            case 2:
                del body[at : at + dice.randrange(1, 40)]
            case _:
                body[at:at] = dice.choice(
                    [b"\\ud800", b'"', b"[" * 50, b"{", b"\xff", b"\xed\xa0\x80", b"null", b","]
                )
        refused += isinstance(check(name, bytes(body)), Refusal)
    assert refused > 500


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_nested_too_deeply_is_refused_wherever_it_is(name):
    deep = b"[" * 5000 + b"]" * 5000
    less = b'{"a":' * 150 + b"1" + b"}" * 150
    for path in places(BODIES[name]):
        marked = json.dumps(changed(BODIES[name], path, lambda _: "@@")).encode()
        check(name, marked.replace(b'"@@"', deep))
        check(name, marked.replace(b'"@@"', less))
    schema = json.dumps(BODIES[name]).encode().replace(b'["a"]', less)
    assert "nested too deeply" in str(check(name, schema))


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'"x"', b"{}", b"1", b"\xef\xbb\xbf{}", b"{" * 100_000]
)
def test_bodies_that_are_no_objects_are_refused(name, body):
    assert isinstance(check(name, body), Refusal)
