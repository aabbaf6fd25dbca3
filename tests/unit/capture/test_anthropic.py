"""Messages, as Anthropic's own SDK speaks and checks it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from services.capture.call import Refusal
from services.capture.dialects.anthropic import Anthropic
from tests.helpers.lazy import Lazy
from tests.unit.capture.toy import Turn

anthropic = Lazy("anthropic")

TOOL = {"name": "bash", "description": "Run.", "input_schema": {"type": "object", "properties": {"cmd": {}}}}
ASKED = [{"role": "user", "content": "List the files."}]
FULL = Turn(
    "Let me look, naïve 🦀.", "I think,\nso I am.", [("bash", {"cmd": "ls"}), ("bash", {"cmd": "é", "n": 1})]
)


@cache
def published() -> TypeAdapter:
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)


@pytest.fixture
def client(toy):
    with anthropic.Anthropic(base_url=toy.url, api_key="k", max_retries=0) as client:
        yield client


def read(*messages, **fields):
    return Anthropic().read(
        json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields}).encode()
    )


def results(said: Any) -> dict:
    blocks = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "a.py"}
        for block in said.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": blocks}


def test_whole_answer_is_of_the_published_type_and_comes_back_as_the_same_message(toy, client):
    toy.says(FULL, Turn("Done."))
    said = client.messages.create(model="m7", max_tokens=50, messages=ASKED, tools=[TOOL], system="Be brief.")
    anthropic.types.Message.model_validate(said.to_dict(), strict=True)
    assert (said.model, said.stop_reason, said.id) == ("m7", "tool_use", "msg_c1")
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (said.usage.input_tokens, said.usage.cache_read_input_tokens, said.usage.output_tokens) == (
        41,
        60,
        20,
    )
    history = [*ASKED, {"role": "assistant", "content": said.content}, results(said)]
    client.messages.create(model="m7", max_tokens=50, messages=history, tools=[TOOL], system="Be brief.")
    first, second = toy.calls
    assert first.max_tokens == 50
    assert first.tools == [
        {
            "type": "function",
            "function": {"name": "bash", "description": "Run.", "parameters": TOOL["input_schema"]},
        }
    ]
    assert [entry.role for entry in second.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert second.messages[2] == FULL.message()
    assert [entry.tool_call_id for entry in second.messages[3:]] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "turn", [FULL, Turn("Plain words."), Turn(reasoning="Hm."), Turn("", "", [("bash", {})])]
)
def test_stream_adds_up_to_the_answer(toy, client, turn):
    toy.says(turn, Turn("Done."))
    with client.messages.stream(model="m7", max_tokens=50, messages=ASKED, tools=[TOOL]) as stream:
        said = stream.get_final_message()
    anthropic.types.Message.model_validate(said.to_dict(), strict=True)
    assert said.stop_reason == ("tool_use" if turn.calls else "end_turn")
    assert (said.usage.input_tokens, said.usage.cache_read_input_tokens, said.usage.output_tokens) == (
        41,
        60,
        20,
    )
    client.messages.create(
        model="m7",
        max_tokens=5,
        messages=[*ASKED, {"role": "assistant", "content": said.content}, results(said), *ASKED],
    )
    assert toy.calls[1].messages[1] == turn.message()


def test_events_are_of_the_published_types_and_blocks_follow_each_other(toy, client):
    toy.says(FULL)
    list(client.messages.create(model="m7", max_tokens=50, messages=ASKED, tools=[TOOL], stream=True))
    blocks, is_open = [], False
    for entry in toy.streams[0].decode().split("\n\n")[:-1]:
        name, data = entry.split("\n", 1)
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        if told["type"] == "ping":
            continue
        published().validate_python(told, strict=True)
        if told["type"] == "content_block_start":
            assert not is_open
            assert told["index"] == len(blocks)
            blocks.append(told["content_block"]["type"])
            is_open = True
        elif told["type"] == "content_block_delta":
            assert is_open
            assert told["index"] == len(blocks) - 1
        elif told["type"] == "content_block_stop":
            is_open = False
    assert blocks == ["thinking", "text", "tool_use", "tool_use"]
    assert not is_open


def test_beta_client_is_answered_too(toy, client):
    toy.says(Turn("Hello."))
    said = client.beta.messages.create(model="m", max_tokens=5, messages=ASKED, betas=["x"])
    assert said.content[0].text == "Hello."


def test_tokens_are_counted(toy, client):
    counted = client.messages.count_tokens(model="m", messages=ASKED, system="Be brief.", tools=[TOOL])
    assert counted.input_tokens == 321
    assert toy.calls[0].messages[0].text == "Be brief."


def test_cut_answer_says_max_tokens(toy, client):
    toy.says(Turn("Hel", finish="length"))
    assert client.messages.create(model="m", max_tokens=5, messages=ASKED).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("refusal", "error", "kind"),
    [
        (Refusal("invalid", "no"), "BadRequestError", "invalid_request_error"),
        (Refusal("unauthorized", "no"), "AuthenticationError", "authentication_error"),
        (Refusal("ended", "no"), "APIStatusError", "invalid_request_error"),
        (Refusal("too_large", "no"), "APIStatusError", "request_too_large"),
        (Refusal("busy", "no"), "RateLimitError", "rate_limit_error"),
        (Refusal("unavailable", "no"), "InternalServerError", "overloaded_error"),
        (Refusal("internal", "no"), "InternalServerError", "api_error"),
        (
            Refusal("context", "no", tokens=900, most_tokens=800),
            "BadRequestError",
            "invalid_request_error",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Refusal) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_arrive_as_the_errors_of_the_sdk(toy, client, refusal, error, kind, stream):
    toy.says(Turn(refused=refusal))
    with pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(model="m", max_tokens=5, messages=ASKED, stream=stream)
    assert caught.value.status_code == refusal.status
    assert caught.value.body["error"]["type"] == kind
    if refusal.kind == "context":
        assert caught.value.body["error"]["message"] == "prompt is too long: 900 tokens > 800 maximum"


def test_error_in_the_middle_of_a_stream_is_raised(toy, client):
    toy.says(Turn("Some text.", breaks=Refusal("unavailable", "the engine is gone")))
    with pytest.raises(anthropic.APIStatusError, match="the engine is gone"):
        list(client.messages.create(model="m", max_tokens=5, messages=ASKED, stream=True))


def test_results_of_tools_come_before_what_the_user_says():
    call = read(
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                {"type": "text", "text": "One."},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                {"type": "tool_use", "id": "b", "name": "f", "input": {"x": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>", "cache_control": {"type": "ephemeral"}},
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
                },
                {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": "Exit code 1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "is_error": True,
                    "content": "<tool_use_error>no",
                },
                {"type": "tool_result", "tool_use_id": "d"},
                {"type": "text", "text": "Go on."},
            ],
        },
    )
    assert call.messages[1].reasoning == "Hm."
    assert [call.arguments for call in call.messages[1].tool_calls] == [{}, {"x": [1]}]
    assert [(entry.role, entry.tool_call_id, entry.text) for entry in call.messages[2:]] == [
        ("tool", "a", "1\n2"),
        ("tool", "b", "Error: Exit code 1"),
        ("tool", "c", "<tool_use_error>no"),
        ("tool", "d", ""),
        ("user", None, "<system-reminder>\nGo on."),
    ]


def test_line_of_the_system_text_that_differs_each_time_is_left_out():
    def system(cch):
        return read(
            *ASKED,
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"},
                {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "\nBe brief."},
            ],
        ).messages[0]

    assert system("a1").text == "You are Claude Code.\nBe brief."
    assert system("a1") == system("b2")


def test_tools_of_the_vendors_servers_are_left_out():
    call = read(*ASKED, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}])
    assert [tool["function"]["name"] for tool in call.tools] == ["bash"]
    assert read(*ASKED, tools=[TOOL], tool_choice={"type": "none"}).tools == []


def test_messages_of_the_system_among_others_are_a_users():
    call = read(*ASKED, {"role": "system", "content": "Agents:\n- claude"}, system="Be brief.")
    assert [(entry.role, entry.text) for entry in call.messages] == [
        ("system", "Be brief."),
        ("user", "List the files."),
        ("user", "Agents:\n- claude"),
    ]


def test_what_programs_ask_for_is_recorded():
    asked = {
        "temperature": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "tool_choice": {"type": "tool", "name": "bash"},
    }
    assert read(*ASKED, metadata={"user_id": "u"}, tools=[TOOL], **asked).asked == asked


def test_turns_of_the_assistant_that_follow_each_other_are_one():
    call = read(
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "One."}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]},
    )
    assert [entry.role for entry in call.messages] == ["user", "assistant", "tool"]
    assert (call.messages[1].text, call.messages[1].tool_calls[0].name) == ("One.", "f")


@pytest.mark.parametrize(
    ("messages", "fields", "named"),
    [
        ([], {}, "messages"),
        ([{"role": "user", "content": None}], {}, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], {}, "messages[0].content[0].type"),
        ([*ASKED, {"role": "assistant", "content": "I beg"}], {}, "messages"),
        ([{"role": "robot", "content": "x"}], {}, "messages[0].role"),
        (ASKED, {"max_tokens": -1}, "max_tokens"),
        (ASKED, {"system": [{"type": "image"}]}, "system[0].type"),
        (ASKED, {"tools": [{"input_schema": {}}]}, "tools[0]"),
        (ASKED, {"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ],
)
def test_what_is_not_served_is_refused_by_the_name_of_its_field(messages, fields, named):
    with pytest.raises(Refusal) as caught:
        read(*messages, **fields)
    assert caught.value.kind == "invalid"
    assert f"`{named}`" in str(caught.value)
