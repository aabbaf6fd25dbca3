"""An image that a tool shows a model which reads text alone."""

from __future__ import annotations

import json

import pytest

from services.capture.dialects.anthropic import Anthropic
from services.capture.dialects.chat import Chat
from services.capture.dialects.fields import Dialect
from services.capture.dialects.gemini import Gemini
from services.capture.dialects.responses import Responses

TEXT, IMAGE = {"type": "text", "text": "a.png:"}, {"type": "image", "source": {"data": "AAAA"}}
PNG = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}


def anthropic(*parts) -> dict:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}]}


def gemini(result: dict, *beside: dict) -> dict:
    given = {"functionResponse": {"name": "f", "response": {"output": "a.png:"}, **result}}
    return {"contents": [{"role": "user", "parts": [given, *beside]}]}


CHAT_IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
RESPONSES = [{"type": "input_text", "text": "a.png:"}, {"type": "input_image", "image_url": "data:"}]
CASES = {
    "chat": (Chat(), {"messages": [{"role": "tool", "tool_call_id": "c", "content": [TEXT, CHAT_IMAGE]}]}),
    "anthropic": (Anthropic(), {"max_tokens": 9, "messages": [anthropic(TEXT, IMAGE)]}),
    "responses": (
        Responses(),
        {"input": [{"type": "function_call_output", "call_id": "c", "output": RESPONSES}]},
    ),
    "gemini": (Gemini(), gemini({"parts": [PNG]})),
    "gemini, beside the result": (Gemini(), gemini({}, PNG)),
}


@pytest.mark.parametrize(("dialect", "body"), CASES.values(), ids=CASES)
def test_what_a_tool_shows_beside_text_is_named_and_the_call_is_served(dialect: Dialect, body: dict):
    call = dialect.read(json.dumps({"model": "m", **body}).encode())
    assert call.messages[0].role == "tool"
    text = "\n".join(entry.text for entry in call.messages)
    named, rest = text.removeprefix("a.png:\n[").split(": ", 1)
    assert named in ("image", "image_url", "input_image", "content")
    assert rest == "it is not shown, for this model reads text alone]"
