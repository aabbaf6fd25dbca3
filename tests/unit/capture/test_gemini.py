"""Gemini, as Google's own SDK speaks and checks it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from services.capture.call import Refusal
from services.capture.dialects.gemini import Gemini
from tests.helpers.lazy import Lazy
from tests.unit.capture.toy import Turn

genai = Lazy("google.genai")
errors, types = Lazy("google.genai.errors"), Lazy("google.genai.types")

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
FULL = Turn(
    "Let me look, naïve 🦀.", "I think,\nso I am.", [("bash", {"cmd": "ls"}), ("bash", {"cmd": "é", "n": 1})]
)


def config(**fields) -> Any:
    bash = types.FunctionDeclaration(name="bash", description="Run.", parameters_json_schema=SCHEMA)
    manual = types.AutomaticFunctionCallingConfig(disable=True)
    return types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[bash])], automatic_function_calling=manual, **fields
    )


@pytest.fixture
def client(toy):
    client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=toy.url))
    yield client
    client.close()


def read(*contents, **fields):
    body = json.dumps({"contents": contents, **fields}).encode()
    return Gemini().read(body, model="m", stream=False)


def user(*parts) -> dict:
    return {"role": "user", "parts": list(parts)}


def model(*parts) -> dict:
    return {"role": "model", "parts": list(parts)}


def results(*calls: Any) -> list[Any]:
    return [
        types.Part(
            function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": "a.py"})
        )
        for call in calls
    ]


def test_whole_answer_is_of_the_published_type_and_comes_back_as_the_same_message(toy, client):
    toy.says(FULL, Turn("Done."))
    chat = client.chats.create(model="m7", config=config(system_instruction="Be brief.", temperature=0.5))
    answer = chat.send_message("List the files.")
    assert answer.text == FULL.text
    assert (answer.model_version, answer.response_id) == ("m7", "c1")
    assert answer.candidates[0].finish_reason == types.FinishReason.STOP
    assert answer.usage_metadata.cached_content_token_count == 60
    assert answer.usage_metadata.total_token_count == 101 + 20
    chat.send_message(results(*answer.function_calls))
    first, second = toy.calls
    assert first.model == "m7"
    assert first.asked == {"temperature": 0.5}
    assert first.tools == [
        {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}
    ]
    assert [entry.role for entry in second.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert second.messages[2] == FULL.message()
    assert [entry.tool_call_id for entry in second.messages[3:]] == ["call_0", "call_1"]
    assert [entry.text for entry in second.messages[3:]] == ["a.py", "a.py"]


@pytest.mark.parametrize("turn", [FULL, Turn("Plain words."), Turn("", "", [("bash", {})])])
def test_stream_adds_up_to_the_answer(toy, client, turn):
    toy.says(turn, Turn("Done."))
    chat = client.chats.create(model="m7", config=config())
    chunks = list(chat.send_message_stream("List the files."))
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert chunks[-1].usage_metadata.cached_content_token_count == 60
    calls = [call for chunk in chunks for call in chunk.function_calls or []]
    chat.send_message([*results(*calls), "Go on."])
    assert toy.calls[1].messages[1] == turn.message()
    assert toy.calls[1].messages[-1].text == "Go on."


def test_answers_have_no_field_that_the_published_type_does_not_know(toy, client):
    toy.says(FULL, FULL)
    url = f"{toy.url}/v1beta/models/m7:"
    body = {"contents": [user({"text": "List the files."})]}
    whole = requests.post(f"{url}generateContent", json=body, timeout=10).json()
    pieces = requests.post(f"{url}streamGenerateContent", json=body, timeout=10).json()
    for told in [whole, *pieces]:
        known = types.GenerateContentResponse.model_validate(told)  # forbids what it does not know
        again = known.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert again == told
    parts = [part for piece in pieces for part in piece["candidates"][0]["content"]["parts"]]
    assert "".join(part.get("text", "") for part in parts if "thought" not in part) == FULL.text
    assert [part["functionCall"]["args"] for part in parts if "functionCall" in part] == [
        {"cmd": "ls"},
        {"cmd": "é", "n": 1},
    ]


def test_text_with_ends_of_lines_of_other_kinds_passes_through_a_stream(toy, client):
    toy.says(Turn("one\u2028two\u2029three\x85four\rfive\nsix"))
    chunks = client.models.generate_content_stream(model="m", contents="Go.")
    assert "".join(chunk.text or "" for chunk in chunks) == "one\u2028two\u2029three\x85four\rfive\nsix"


def test_tokens_are_counted(toy, client):
    assert client.models.count_tokens(model="m", contents="Count me.").total_tokens == 321
    assert toy.calls[0].messages[0].text == "Count me."
    wrapped = json.dumps(
        {"generateContentRequest": {"model": "models/m", "contents": [user({"text": "Hi."})]}}
    )
    assert Gemini().read(wrapped.encode(), model="m").messages[0].text == "Hi."


def test_cut_answer_says_max_tokens(toy, client):
    toy.says(Turn("Hel", finish="length"))
    answer = client.models.generate_content(model="m", contents="Go.")
    assert answer.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS


@pytest.mark.parametrize(
    ("refusal", "error", "status"),
    [
        (Refusal("invalid", "no"), "ClientError", "INVALID_ARGUMENT"),
        (Refusal("unauthorized", "no"), "ClientError", "UNAUTHENTICATED"),
        (Refusal("ended", "no"), "ClientError", "FAILED_PRECONDITION"),
        (Refusal("busy", "no"), "ClientError", "RESOURCE_EXHAUSTED"),
        (Refusal("unavailable", "no"), "ServerError", "UNAVAILABLE"),
        (Refusal("internal", "no"), "ServerError", "INTERNAL"),
        (Refusal("context", "no", tokens=900, most_tokens=800), "ClientError", "INVALID_ARGUMENT"),
    ],
    ids=lambda value: value.kind if isinstance(value, Refusal) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_arrive_as_the_errors_of_the_sdk(toy, client, refusal, error, status, stream):
    toy.says(Turn(refused=refusal))
    with pytest.raises(getattr(errors, error)) as caught:
        if stream:
            list(client.models.generate_content_stream(model="m", contents="Go."))
        else:
            client.models.generate_content(model="m", contents="Go.")
    assert (caught.value.code, caught.value.status) == (refusal.status, status)
    if refusal.kind == "context":
        assert (
            "input token count (900) exceeds the maximum number of tokens allowed (800)"
            in caught.value.message
        )


def test_error_in_the_middle_of_a_stream_is_raised(toy, client):
    toy.says(Turn("Some text.", breaks=Refusal("unavailable", "the engine is gone")))
    with pytest.raises(errors.ServerError, match="the engine is gone"):
        list(client.models.generate_content_stream(model="m", contents="Go."))


def test_error_in_the_middle_of_a_list_closes_it(toy):
    toy.says(Turn("Some text.", breaks=Refusal("unavailable", "the engine is gone")))
    body = {"contents": [user({"text": "Go."})]}
    told = requests.post(f"{toy.url}/v1beta/models/m:streamGenerateContent", json=body, timeout=10).json()
    assert told[-1]["error"] == {"code": 503, "message": "the engine is gone", "status": "UNAVAILABLE"}


def test_schemas_of_openapi_are_told_as_json_schema():
    parameters = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["STRING", "OBJECT"], "description": "Which type."},
            "many": {"type": "ARRAY", "minItems": "1", "items": {"type": "INTEGER", "nullable": True}},
            "one": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}]},
        },
        "required": ["type"],
    }
    declared = {"functionDeclarations": [{"name": "f", "parameters": parameters}]}
    call = read(
        user({"text": "Go."}),
        tools=[declared, {"googleSearch": {}}, {"functionDeclarations": [{"name": "g"}]}],
    )
    assert call.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["STRING", "OBJECT"], "description": "Which type."},
            "many": {"type": "array", "minItems": 1, "items": {"type": ["integer", "null"]}},
            "one": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        },
        "required": ["type"],
    }
    assert call.tools[1]["function"] == {
        "name": "g",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    [rest] = read(user({"text": "Go."}), tools=[{"function_declarations": [{"name": "h"}]}]).tools
    assert rest["function"]["name"] == "h"


def test_calls_without_ids_are_paired_with_their_results_by_name_and_order():
    call = read(
        user({"text": "Go."}),
        model({"functionCall": {"name": "f", "args": {"x": 1}}}, {"functionCall": {"name": "g"}}),
        model({"functionCall": {"name": "f", "args": {"x": 2}}}),
        user(
            {"functionResponse": {"name": "g", "response": {"output": "G"}}},
            {"functionResponse": {"name": "f", "response": {"output": "F1"}}},
            {"text": "And?"},
            {"functionResponse": {"name": "f", "response": {"error": "F2"}}},
        ),
        model({"functionCall": {"name": "f", "id": "own"}}),
        user({"functionResponse": {"name": "f", "id": "own", "response": {"a": 1, "b": [2]}}}),
    )
    made = call.messages[1].tool_calls
    assert [(one.name, one.id) for one in made] == [("f", "call_0"), ("g", "call_1"), ("f", "call_2")]
    assert [(entry.role, entry.tool_call_id, entry.text) for entry in call.messages[2:6]] == [
        ("tool", "call_1", "G"),
        ("tool", "call_0", "F1"),
        ("tool", "call_2", "Error: F2"),
        ("user", None, "And?"),
    ]
    assert (call.messages[7].tool_call_id, call.messages[7].text) == ("own", '{"a":1,"b":[2]}')


def test_what_programs_ask_for_is_recorded():
    generation = {
        "temperature": 1, "topP": 0.95, "topK": 64, "thinkingConfig": {"includeThoughts": True},
        "responseMimeType": "application/json", "responseJsonSchema": {"type": "object"},
    }  # fmt: skip
    call = read(user({"text": "Who speaks next?"}), generationConfig=generation | {"maxOutputTokens": 7})
    assert (call.asked, call.max_tokens) == (generation, 7)
    declared = [{"functionDeclarations": [{"name": "f"}]}]
    forced = {"functionCallingConfig": {"mode": "ANY"}}
    assert read(user({"text": "Go."}), tools=declared, toolConfig=forced).asked == {"toolConfig": forced}
    never = {"functionCallingConfig": {"mode": "NONE"}}
    assert read(user({"text": "Go."}), tools=declared, toolConfig=never).tools == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [user({"inlineData": {"mimeType": "image/png", "data": ""}})]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "robot", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [model({"functionCall": {"args": {}}})]}, "contents[0].parts[0].functionCall"),
        ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"responseLogprobs": True}}, "generationConfig.responseLogprobs"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"maxOutputTokens": -1}}, "generationConfig.maxOutputTokens"),
        ({"system_instruction": {"parts": [{"text": "x"}]}}, "system_instruction"),
        ({"cachedContent": "c"}, "cachedContent"),
        ({"systemInstruction": {"parts": [{"fileData": {}}]}}, "systemInstruction.parts[0]"),
        ({"tools": [{"functionDeclarations": [{"name": ""}]}]}, "tools[0].functionDeclarations[0].name"),
    ],
)
def test_what_is_not_served_is_refused_by_the_name_of_its_field(fields, named):
    with pytest.raises(Refusal) as caught:
        read(user({"text": "Go."}), **fields)
    assert caught.value.kind == "invalid"
    assert f"`{named}`" in str(caught.value)
