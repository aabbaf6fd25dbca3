"""Responses, as OpenAI's own SDK speaks and checks it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from services.capture.call import Refusal
from services.capture.dialects.responses import Responses
from tests.helpers.lazy import Lazy
from tests.unit.capture.toy import Turn

openai = Lazy("openai")

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
TOOL = {"type": "function", "name": "bash", "description": "Run.", "strict": False, "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "text"}}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Agents.",
    "tools": [TOOL | {"name": "spawn"}],
}
ASKED = [{"role": "user", "content": "List the files."}]
FULL = Turn(
    "Let me look, naïve 🦀.", "I think,\nso I am.", [("bash", {"cmd": "ls"}), ("bash", {"cmd": "é", "n": 1})]
)


@cache
def published() -> TypeAdapter:
    return TypeAdapter(openai.types.responses.ResponseStreamEvent)


@pytest.fixture
def client(toy):
    with openai.OpenAI(base_url=f"{toy.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def read(*items, **fields):
    return Responses().read(json.dumps({"model": "m", "input": items, **fields}).encode())


def outputs(response: Any) -> list[dict]:
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    return [
        {"type": kinds[item.type], "call_id": item.call_id, "output": "a.py"}
        for item in response.output
        if item.type in kinds
    ]


def test_whole_answer_is_of_the_published_type_and_comes_back_as_the_same_message(toy, client):
    toy.says(FULL, Turn("Done."))
    response = client.responses.create(
        model="m7", input="List the files.", instructions="Be brief.", tools=[TOOL], max_output_tokens=50
    )
    openai.types.responses.Response.model_validate(response.to_dict(), strict=True)
    assert (response.model, response.status, response.id) == ("m7", "completed", "resp_c1")
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.usage.input_tokens_details.cached_tokens == 60
    assert response.usage.total_tokens == 101 + 20
    history = [*ASKED, *response.output, *outputs(response)]
    client.responses.create(model="m7", input=history, instructions="Be brief.", tools=[TOOL])
    first, second = toy.calls
    assert (first.max_tokens, first.messages[1].text) == (50, "List the files.")
    assert first.tools == [
        {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}
    ]
    assert [entry.role for entry in second.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert second.messages[2] == FULL.message()
    assert [entry.tool_call_id for entry in second.messages[3:]] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "turn", [FULL, Turn("Plain words."), Turn(reasoning="Hm."), Turn("", "", [("bash", {})])]
)
def test_stream_adds_up_to_the_answer(toy, client, turn):
    toy.says(turn, turn)
    with client.responses.stream(model="m7", input=ASKED, tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert final.output_text == turn.text
    client.responses.create(model="m7", input=[*ASKED, *final.output, *outputs(final)], tools=[TOOL])
    assert toy.calls[1].messages[1] == turn.message()


def test_events_are_of_the_published_types_and_say_together_what_the_last_one_says(toy, client):
    toy.says(FULL)
    events = list(client.responses.create(model="m7", input=ASKED, tools=[TOOL, PATCH], stream=True))
    for at, event in enumerate(events):
        assert published().validate_python(event.to_dict(), strict=True).sequence_number == at
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    final = events[-1].response
    assert events[-1].type == "response.completed"
    deltas = ["", "", "", ""]
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.output_index] += event.delta
            assert final.output[event.output_index].id == event.item_id
    assert deltas == [FULL.reasoning, FULL.text, '{"cmd":"ls"}', '{"cmd":"é","n":1}']
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output


def test_custom_tools_and_those_of_a_namespace_are_called_as_what_they_are(toy, client):
    patch = Turn(calls=[("apply_patch", {"input": "*** Begin"}), ("multi_agent_v1__spawn", {"cmd": "x"})])
    for stream in (False, True):
        toy.says(patch, Turn("Done."))
        tools = [TOOL, PATCH, AGENTS, {"type": "web_search", "external_web_access": True}]
        if stream:
            events = list(client.responses.create(model="m", input=ASKED, tools=tools, stream=True))
            for event in events:
                published().validate_python(event.to_dict(), strict=True)
            response = events[-1].response
        else:
            response = client.responses.create(model="m", input=ASKED, tools=tools)
        custom, spawn = response.output
        assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", "*** Begin")
        assert (spawn.type, spawn.namespace, spawn.name) == ("function_call", "multi_agent_v1", "spawn")
        names = [tool["function"]["name"] for tool in toy.calls[-1].tools]
        assert names == ["bash", "apply_patch", "multi_agent_v1__spawn"]
        client.responses.create(model="m", input=[*ASKED, *response.output, *outputs(response)], tools=tools)
        assert toy.calls[-1].messages[1] == patch.message()


def test_cut_answer_is_incomplete(toy, client):
    toy.says(Turn("Hel", finish="length"), Turn("Hel", finish="length"))
    response = client.responses.create(model="m", input=ASKED)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model="m", input=ASKED, stream=True))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("refusal", "error", "code"),
    [
        (Refusal("invalid", "no"), "BadRequestError", None),
        (Refusal("unauthorized", "no"), "AuthenticationError", "invalid_api_key"),
        (Refusal("busy", "no"), "RateLimitError", "rate_limit_exceeded"),
        (Refusal("ended", "no"), "APIStatusError", "session_ended"),
        (Refusal("unavailable", "no"), "InternalServerError", None),
        (
            Refusal("context", "no", tokens=9, most_tokens=8),
            "BadRequestError",
            "context_length_exceeded",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Refusal) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_arrive_as_the_errors_of_the_sdk(toy, client, refusal, error, code, stream):
    toy.says(Turn(refused=refusal))
    with pytest.raises(getattr(openai, error)) as caught:
        client.responses.create(model="m", input=ASKED, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (refusal.status, code)
    if refusal.kind == "context":
        assert "exceeds the context window" in caught.value.message


def test_error_in_the_middle_of_a_stream_is_raised_and_told_as_a_failed_response_too(toy, client):
    toy.says(Turn("Some text.", breaks=Refusal("unavailable", "the engine is gone")))
    with pytest.raises(openai.APIError, match="the engine is gone"):
        list(client.responses.create(model="m", input=ASKED, stream=True))
    last = json.loads(toy.streams[0].decode().strip().split("\ndata: ")[-1])
    assert published().validate_python(last).response.error.code == "server_error"
    assert last["type"] == "response.failed"


def test_items_of_codex_are_read_as_turns():
    call = read(
        {
            "type": "message",
            "id": "msg_beac2b26",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are a coding agent."}],
        },
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<skills>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA", "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "a"},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "***"},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "call_id": "a", "output": "a.py\n"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "local_shell_call_output", "call_id": "c", "output": "a.py"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hurry."}]},
        instructions="First of all.",
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        parallel_tool_calls=True,
    )  # fmt: skip
    assert [entry.role for entry in call.messages] == [
        "system", "user", "user", "assistant", "tool", "tool", "tool", "user",
    ]  # fmt: skip
    assert call.messages[0].text == "First of all.\n\nYou are a coding agent.\n\n<skills>"
    said = call.messages[3]
    assert (said.text, said.reasoning) == ("I look.", None)
    assert [(made.id, made.name, made.arguments) for made in said.tool_calls] == [
        ("a", "exec_command", {"cmd": "ls"}),
        ("b", "apply_patch", {"input": "***"}),
        ("c", "local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    assert [(entry.tool_call_id, entry.text) for entry in call.messages[4:7]] == [
        ("a", "a.py\n"),
        ("b", "ok"),
        ("c", "a.py"),
    ]
    assert call.asked == {"reasoning": {"summary": "auto"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": 4}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]}, "tools[0].tools[0]"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_the_name_of_its_field(fields, named):
    with pytest.raises(Refusal) as caught:
        read(*ASKED, **fields)
    assert caught.value.kind == "invalid"
    assert f"`{named}`" in str(caught.value)


def test_tools_that_may_not_be_called_are_not_offered():
    assert read(*ASKED, tools=[TOOL, PATCH, AGENTS], tool_choice="none").tools == []
