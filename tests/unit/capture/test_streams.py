"""However an answer is cut into deltas, a stream says the same as the answer that is whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.trajectory import Message, ToolCall
from services.capture.call import Answer, ModelCall
from services.capture.dialects.anthropic import Anthropic
from services.capture.dialects.chat import Chat
from services.capture.dialects.gemini import Gemini
from services.capture.dialects.responses import Responses

DIALECTS = [Chat(), Responses(), Anthropic(), Gemini(), Gemini(sse=False)]
TEXT = st.text(st.sampled_from('ab \n\r\t"\\\x00\x7f\x85\u2028\u2029é🦀:{}'), max_size=12)
CALL = ModelCall([Message(role="user", content="Go.")], model="m", stream=True)


def answer(text="", reasoning="", calls=(), finish="stop") -> Answer:
    made = [ToolCall(id=f"id{at}", name=name, arguments=given) for at, (name, given) in enumerate(calls)]
    said = Message(role="assistant", content=text, reasoning=reasoning or None, tool_calls=made)
    return Answer("c", said, finish, prompt_tokens=9, sampled_tokens=5, cached_tokens=4, created=1)


def events(sent: bytes) -> list[dict]:
    """What an SSE reader makes of bytes; one that ends lines wherever Python does."""
    told = [line.removeprefix("data: ") for line in sent.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(data) for data in told if data != "[DONE]"]


def without(value: dict, *names: str) -> dict:
    return {name: inner for name, inner in value.items() if name not in names}


def assembled(dialect, sent: bytes) -> dict:
    """The whole answer that a program puts together of a stream."""
    if dialect.name == "responses":
        return events(sent)[-1]["response"]
    if dialect.name == "chat":
        whole: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
        for told in events(sent):
            for name, piece in told["choices"][0]["delta"].items():
                if name == "tool_calls":
                    whole[name] += [without(call, "index") for call in piece]
                elif name in whole:
                    whole[name] += piece
        return whole
    if dialect.name == "anthropic":
        blocks: list[dict] = []
        for told in events(sent):
            if told["type"] == "content_block_start":
                blocks.append(told["content_block"])
            elif told["type"] == "content_block_delta":
                delta = without(told["delta"], "type")
                [(name, piece)] = delta.items()
                blocks[told["index"]][name] = blocks[told["index"]].get(name, "") + piece
        for block in blocks:
            if "partial_json" in block:
                block["input"] = json.loads(block.pop("partial_json"))
        return {"content": blocks}
    told = events(sent) if dialect.stream_type == "text/event-stream" else json.loads(sent)
    joined: list[dict] = []
    for part in (part for chunk in told for part in chunk["candidates"][0]["content"]["parts"]):
        if joined and "text" in part and joined[-1].keys() == part.keys():
            joined[-1]["text"] += part["text"]
        elif part != {"text": ""}:
            joined.append(part)
    return {"parts": joined, "last": without(told[-1], "candidates")}


def expected(dialect, whole: dict) -> dict:
    """The same of an answer that was not streamed."""
    if dialect.name == "chat":
        said = whole["choices"][0]["message"]
        names = {"content": "", "reasoning_content": "", "tool_calls": []}
        return {name: said.get(name) or empty for name, empty in names.items()}
    if dialect.name == "anthropic":
        return {"content": whole["content"]}
    if dialect.name == "gemini":
        parts = whole["candidates"][0]["content"]["parts"]
        return {"parts": parts, "last": without(whole, "candidates")}
    return whole


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"{dialect.name} {dialect.stream_type}")
@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(TEXT, max_size=4),
    reasoning=st.lists(TEXT, max_size=3),
    unsent=TEXT,
    calls=st.lists(
        st.tuples(st.just("f"), st.dictionaries(TEXT, TEXT | st.integers(), max_size=2)), max_size=2
    ),
    finish=st.sampled_from(["stop", "length"]),
)
def test_stream_says_what_the_whole_answer_says(dialect, text, reasoning, unsent, calls, finish):
    whole = answer("".join(text) + unsent, "".join(reasoning), calls, finish)
    stream = dialect.stream(CALL, whole.call_id, whole.created, whole.prompt_tokens)
    sent = stream.begin()
    for piece in reasoning:
        sent += stream.delta(reasoning=piece) + stream.heartbeat()
    for piece in text:
        sent += stream.heartbeat() + stream.delta(text=piece)
    sent += stream.end(whole)
    assert assembled(dialect, sent) == expected(dialect, json.loads(dialect.answer(CALL, whole)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answer_that_does_not_begin_with_what_was_streamed_is_an_error(dialect):
    stream = dialect.stream(CALL, "c", 1, 9)
    stream.begin()
    stream.delta(text="Hello ")
    with pytest.raises(ValueError, match="no beginning"):
        stream.end(answer("Hello"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_halves_of_surrogate_pairs_and_what_is_no_number_are_told_as_json(dialect):
    said = answer(calls=[("f", {"x": "\ud800", "y": float("nan"), "z": 10**30})])
    told = json.loads(dialect.answer(CALL, said), parse_constant=lambda name: pytest.fail(name))
    text = json.dumps(told)
    assert "ud800" in text
    assert "1000000000000000000000000000000" in text
    assert "NaN" not in text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_that_a_program_acts_on_is_sent_before_the_end(dialect):
    stream = dialect.stream(CALL, "c", 1, 9)
    before = stream.begin() + stream.delta(reasoning="Hm.") + stream.delta(text="One.") + stream.heartbeat()
    acts = {"message_delta", "message_stop", "response.completed", "response.incomplete"}
    listed = json.loads(before + b"]") if before.startswith(b"[") else []
    told_before = [*events(before), *listed]
    assert told_before
    for told in told_before:
        assert told.get("type") not in acts
        assert all(choice["finish_reason"] is None for choice in told.get("choices", []))
        assert all("finishReason" not in candidate for candidate in told.get("candidates", []))
