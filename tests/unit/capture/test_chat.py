"""Chat Completions, as OpenAI's own SDK speaks and checks it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.capture.call import Refusal
from services.capture.dialects.chat import Chat
from tests.helpers.lazy import Lazy
from tests.unit.capture.toy import Turn

openai = Lazy("openai")

TOOL = {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {"cmd": {}}}}
TOOLS = [{"type": "function", "function": TOOL}]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List the files."}]
FULL = Turn(
    "Let me look, naïve 🦀.", "I think,\nso I am.", [("bash", {"cmd": "ls"}), ("bash", {"cmd": "é", "n": 1})]
)


@pytest.fixture
def client(toy):
    with openai.OpenAI(base_url=f"{toy.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def collected(chunks: list[Any]) -> dict:
    """The message that a program makes of a stream."""
    said = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
        for choice in chunk.choices:
            said["content"] += choice.delta.content or ""
            said["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(said["tool_calls"])
                said["tool_calls"].append(call.to_dict(exclude_unset=True))
                del said["tool_calls"][-1]["index"]
    return said


def read(**fields):
    return Chat().read(json.dumps({"model": "m", "messages": ASKED, **fields}).encode())


def test_whole_answer_is_of_the_published_type_and_comes_back_as_the_same_message(toy, client):
    toy.says(FULL, Turn("Done."))
    answer = client.chat.completions.create(model="m7", messages=ASKED, tools=TOOLS, temperature=0.3)
    openai.types.chat.ChatCompletion.model_validate(answer.to_dict(), strict=True)
    assert (answer.model, answer.choices[0].finish_reason, answer.id) == ("m7", "tool_calls", "chatcmpl-c1")
    assert answer.usage.prompt_tokens_details.cached_tokens == 60
    assert answer.usage.total_tokens == 101 + 20
    told = answer.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "a.py"} for call in told.tool_calls]
    client.chat.completions.create(model="m7", messages=[*ASKED, told, *results], tools=TOOLS)
    first, second = toy.calls
    assert first.asked == {"temperature": 0.3}
    assert first.tools == TOOLS
    assert [entry.role for entry in second.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert second.messages[2] == FULL.message()
    assert second.messages[3].tool_call_id == "call_0"
    assert second.messages[3].text == "a.py"


def test_stream_adds_up_to_the_answer(toy, client):
    toy.says(FULL, Turn("Done."))
    stream = client.chat.completions.create(
        model="m7", messages=ASKED, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    said = collected(chunks)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 60
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "tool_calls"
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in said["tool_calls"]]
    client.chat.completions.create(model="m7", messages=[*ASKED, said, *results])
    assert toy.calls[1].messages[2] == FULL.message()


def test_streams_helper_of_the_sdk_follows(toy, client):
    toy.says(FULL)
    with client.chat.completions.stream(model="m7", messages=ASKED, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == FULL.text
    assert [json.loads(call.function.arguments) for call in final.choices[0].message.tool_calls] == [
        {"cmd": "ls"},
        {"cmd": "é", "n": 1},
    ]


def test_usage_of_a_stream_is_sent_to_whom_asks_alone(toy, client):
    toy.says(Turn("Hello there."))
    chunks = list(client.chat.completions.create(model="m", messages=ASKED, stream=True))
    assert all(chunk.choices for chunk in chunks)
    assert collected(chunks)["content"] == "Hello there."


def test_cut_answer_says_length(toy, client):
    toy.says(Turn("Hel", finish="length"), Turn("", finish="length"))
    assert client.chat.completions.create(model="m", messages=ASKED).choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(model="m", messages=ASKED, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("refusal", "error", "code"),
    [
        (Refusal("invalid", "no"), "BadRequestError", None),
        (Refusal("unauthorized", "no"), "AuthenticationError", "invalid_api_key"),
        (Refusal("busy", "no"), "RateLimitError", "rate_limit_exceeded"),
        (Refusal("ended", "no"), "APIStatusError", "session_ended"),
        (Refusal("unavailable", "no"), "InternalServerError", None),
        (Refusal("internal", "no"), "InternalServerError", None),
        (Refusal("too_large", "no"), "APIStatusError", "request_too_large"),
        (
            Refusal("context", "no", tokens=900, most_tokens=800),
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
        client.chat.completions.create(model="m", messages=ASKED, stream=stream)
    assert caught.value.status_code == refusal.status
    assert caught.value.code == code
    if refusal.kind == "context":
        assert "maximum context length is 800 tokens" in caught.value.message
        assert "resulted in 900 tokens" in caught.value.message


def test_error_in_the_middle_of_a_stream_is_raised(toy, client):
    toy.says(Turn("Some text.", breaks=Refusal("unavailable", "the engine is gone")))
    seen = []
    with pytest.raises(openai.APIError, match="the engine is gone"):
        seen.extend(client.chat.completions.create(model="m", messages=ASKED, stream=True))
    assert seen


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}
                ]
            },
            "messages[0].content[1].type",
        ),
        (
            {
                "messages": [
                    *ASKED,
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": 3}}]},
                ]
            },
            "messages[2].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "patch"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_what_is_not_served_is_refused_by_the_name_of_its_field(fields, named):
    with pytest.raises(Refusal) as caught:
        read(**fields)
    assert caught.value.kind == "invalid"
    assert f"`{named}`" in str(caught.value)


def test_values_that_change_nothing_are_taken():
    call = read(
        n=1, logprobs=False, logit_bias={}, tools=[], tool_choice="auto", response_format={"type": "text"},
        parallel_tool_calls=True, store=False, metadata={"a": "b"}, modalities=["text"], max_tokens=None,
    )  # fmt: skip
    assert (call.tools, call.max_tokens, call.asked) == ([], None, {"tool_choice": "auto"})


def test_tools_that_may_not_be_called_are_not_offered():
    assert read(tools=TOOLS, tool_choice="none").tools == []
    assert read(tools=TOOLS, tool_choice="required").tools == TOOLS


def test_what_leads_of_the_system_is_one_message_and_what_comes_later_a_users():
    call = read(
        messages=[
            {"role": "system", "content": "One."},
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Two."}, {"type": "text", "text": "Three."}],
            },
            {"role": "user", "content": "Go."},
            {"role": "system", "content": "Hurry."},
        ]
    )
    assert [(entry.role, entry.text) for entry in call.messages] == [
        ("system", "One.\n\nTwo.\nThree."),
        ("user", "Go."),
        ("user", "Hurry."),
    ]


def test_the_newer_limit_goes_before_the_older():
    assert read(max_completion_tokens=7, max_tokens=9).max_tokens == 7


def test_long_parameters_are_recorded_by_their_length():
    assert read(stop=["x" * 3000]).asked["stop"].endswith("bytes>")
    assert read(stop=["x"]).asked["stop"] == ["x"]


def test_half_of_a_surrogate_pair_is_replaced_and_a_whole_one_kept():
    body = rb'{"messages":[{"role":"user","content":"cut \ud83d, whole \ud83e\udd80, \\ud83d, low \udd80"}]}'
    assert Chat().read(body).messages[0].text == "cut \ufffd, whole 🦀, \\ud83d, low \ufffd"
