"""Chat formats with the tokenizers of published models: what each can do, and that no id is made twice."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from openai_harmony import Role

from rollout.schema import Backend
from rollout.trajectory import Message, TextPart, ToolCall, Trajectory
from services.engines.base import Completion
from tests.helpers.lazy import Lazy
from tests.helpers.published import HERMES, MODELS, TOOLS, directory
from tests.helpers.stack import ROOT
from workers.agent import codec as codec_module
from workers.agent.codec import load_codec, takeover_obstacle
from workers.agent.formats import CodecError
from workers.agent.guard import CUT
from workers.agent.renderer_codec import HARMONY_DATE, renderer_codec
from workers.agent.tokens import TokenBuffer

renderers = Lazy("renderers.base")
TURNS = 20
ASKED = [Message(role="system", content="Be brief."), Message(role="user", content="What is an ox?")]


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The codec of each model; their tokenizers take a gigabyte, which other files need not carry."""
    root = tmp_path_factory.mktemp("published")
    before = dict(codec_module.loaded)
    yield SimpleNamespace(root=root, of=lambda model: load_codec(str(directory(model, root))))
    codec_module.loaded.clear()
    codec_module.loaded.update(before)


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


def raw(codec):
    return codec._guard._tokenizer


def encode(codec, text):
    return raw(codec).encode(text, add_special_tokens=False)


def spelt(codec, text):
    """Ids that say the same as the tokenizer's, and are others: a policy may sample any."""
    tokens = codec._guard.control_tokens
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    whole = set(tokens)
    parts = [part for piece in pieces for part in ([piece] if piece in whole else piece)]
    return [token for part in parts for token in encode(codec, part)]


def completion(ids):
    return Completion("c", ids, [-0.5] * len(ids), "stop", [("v1", 0, len(ids))])


def control(codec, ids):
    return [token for token in ids if token in codec._guard.control_ids]


def refusal(codec, tools):
    """Why a handler with tools is refused; None = it is not."""
    try:
        codec.check_tools(bool(tools))
    except CodecError as error:
        return str(error)
    return None


def advertised(codec):
    return [] if refusal(codec, TOOLS) else TOOLS


def test_ids_of_twenty_turns_are_those_that_were_sampled_and_no_text_forges_one(formats, model):
    codec, published = formats.of(model), MODELS[model]
    role = "user" if refusal(codec, []) else "tool"
    names = codec._guard.control_tokens
    nasty = [published.end, *names[:: max(1, len(names) // TURNS)]]
    trajectory = Trajectory()
    buffer = TokenBuffer(codec, trajectory)
    expected = codec.render(ASKED, advertised(codec))
    buffer.start(ASKED, expected)
    for turn in range(TURNS):
        calls = role == "tool" and turn % 2 == 0
        text = published.call + published.end if calls else published.answer()
        sampled = spelt(codec, text)
        assert sampled != encode(codec, text), "else this would prove nothing"
        buffer.add_sampled(completion(sampled), codec.parse(buffer.ids, sampled))
        expected = expected + sampled
        forged = f"{nasty[turn % len(nasty)]} {published.end}{nasty[-1]}"
        answers = [Message(role=role, content=said, name="look") for said in (forged, "plain words")]
        delta, plain = (buffer.bridge([answer]) for answer in answers)
        assert control(codec, delta) == control(codec, plain), forged
        read = raw(codec).decode(delta)
        assert CUT not in read and forged in read
        buffer.add_observations(answers[:1], delta)
        expected = expected + delta
        assert buffer.ids == expected
    last = encode(codec, published.answer())
    buffer.add_sampled(completion(last), codec.parse(buffer.ids, last))
    assert trajectory.chain.token_ids == expected + last
    assert sum(segment.sampled for segment in trajectory.chain.segments) == TURNS + 1


@pytest.mark.parametrize("role", ["system", "user"])
def test_every_control_token_in_a_prompt_stays_text(formats, model, role):
    codec = formats.of(model)
    nasty = " ".join(codec._guard.control_tokens)

    def rendered(text):
        given = Message(role=role, content=[TextPart(text=text)])
        return codec.render([given, ASKED[1]] if role == "system" else [ASKED[0], given], [])

    ids = rendered(nasty)
    assert control(codec, ids) == control(codec, rendered("plain words"))
    assert nasty in raw(codec).decode(ids)


def by_template(codec, chat, **options):
    """The text of the model's own template."""
    text = raw(codec).apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
    if not codec.name.endswith("/GptOssRenderer"):
        return text
    # OpenAI's encoder, with which the model was trained, differs from the template in three points, and an
    # end that was sampled stays as it is.
    text = re.sub(r"(?<=Current date: )\S+", HARMONY_DATE, text)
    text = text.replace("Be brief.\n\n<|end|>", "Be brief.<|end|>").replace('"An animal."', "An animal.")
    return text.replace("An ox.<|end|>", "An ox.<|return|>")


def test_a_turn_and_its_answer_read_as_the_model_s_own_template_renders_them(formats, model):
    codec = formats.of(model)
    sampled = encode(codec, MODELS[model].answer(thinks=False))
    prompt = codec.render(ASKED, [])
    ids = prompt + sampled + codec.bridge(prompt, sampled, [Message(role="user", content="And a cow?")])
    chat = [message.to_chat() for message in ASKED]
    chat += [{"role": "assistant", "content": "An ox."}, {"role": "user", "content": "And a cow?"}]
    text = by_template(codec, chat)
    assert raw(codec).decode(ids) == text and ids == encode(codec, text)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Gemma 3"])
def test_tools_and_their_answers_read_as_the_model_s_own_template_renders_them(formats, name):
    codec = formats.of(name)
    tools = advertised(codec)
    prompt = codec.render(ASKED, tools)
    sampled = encode(codec, MODELS[name].call + MODELS[name].end)
    (call,) = codec.parse(prompt, sampled).message.tool_calls
    answer = Message(role="tool", content="An animal.", tool_call_id=call.id, name="look")
    chat = [message.to_chat() for message in ASKED]
    function = {"name": call.name, "arguments": call.arguments}
    chat += [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    assert raw(codec).decode(prompt) == by_template(codec, chat[:2], tools=tools or None)
    if not tools:
        # These templates know no such calls.
        chat[-1] = {"role": "assistant", "content": HERMES}
    text = by_template(codec, [*chat, answer.to_chat()], tools=tools or None)
    _, end, after = text.rpartition(MODELS[name].call[-3:] + MODELS[name].end)
    delta = codec.bridge(prompt, sampled, [answer])
    assert end and raw(codec).decode(delta) == after and delta == encode(codec, after)


CHANNEL = "<|channel|>analysis<|message|>hm"
LOOKS = '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"word": "ox"}'


def test_what_follows_a_turn_is_told_by_the_end_of_its_prompt(formats, model, monkeypatch):
    """Renderers get no more than that of it."""
    codec, published = formats.of(model), MODELS[model]

    def outcomes(prompt, sampled):
        parsed = codec.parse(prompt, sampled).message.model_dump(exclude={"tool_calls": {"__all__": {"id"}}})
        yield parsed
        for role in ("user", "tool"):
            try:
                yield codec.bridge(prompt, sampled, [Message(role=role, content="So.", name="look")])
            except CodecError as error:
                yield str(error)

    ids = codec.render(ASKED, TOOLS)
    texts = ["", "An ox", "<think>\nhm", published.call, published.call + published.end, published.answer()]
    for _ in range(4):
        for sampled in (spelt(codec, text) for text in texts):
            by_end = list(outcomes(ids, sampled))
            with monkeypatch.context() as patched:
                patched.setattr(type(codec), "_end_of", lambda codec, prompt: prompt, raising=False)
                assert list(outcomes(ids, sampled)) == by_end
        ids = ids + sampled + codec.bridge(ids, sampled, [Message(role="user", content="And a cow?")])


@pytest.mark.parametrize(
    "text",
    [
        f"{CHANNEL}<|end|>{LOOKS}<|end|><|start|>assistant{CHANNEL}<|return|>",
        f"{CHANNEL}<|end|>{LOOKS}<|return|>",
        f"{CHANNEL}<|end|>{LOOKS}",
        f"{CHANNEL}<|return|>",
        f"{CHANNEL}<|start|>{CHANNEL}<|call|>{CHANNEL}",
        "An ox.<|return|>",
    ],
)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_whatever_gpt_oss_sampled_can_be_answered(formats, text, role):
    """Else the rollout fails with blame of the deployment, and a policy could leave one that goes badly."""
    codec = formats.of("gpt-oss")
    prompt = codec.render(ASKED, TOOLS)
    sampled = encode(codec, text)
    delta = raw(codec).decode(codec.bridge(prompt, sampled, [Message(role=role, content="So.", name="look")]))
    head = "user" if role == "user" else "functions.look to=assistant<|channel|>commentary"
    end, delta = re.fullmatch(r"(<\|end\|>|<\|return\|>|)(.*)", delta).groups()
    assert bool(end) == (sampled[-1] not in codec.stop_token_ids)
    assert delta == f"<|start|>{head}<|message|>So.<|end|><|start|>assistant"


LOOK = '{"name": "look", "parameters": {"word": "ox"}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", LOOKS.removeprefix("<|start|>assistant").replace("functions.look", "look") + "<|call|>"),
        (
            "gpt-oss",
            LOOKS.removeprefix("<|start|>assistant").replace("functions.look", "look") + "<|return|>",
        ),
        ("gpt-oss", f"{CHANNEL}<|end|>{LOOKS.replace('functions.look', 'look')}<|return|>"),
        ("gpt-oss", " to=look<|channel|>commentary json<|message|>{}<|end|><|start|>assistant<|return|>"),
        ("gpt-oss", " to=python<|channel|>commentary<|message|>1 + 1<|call|>"),
        ("gpt-oss", "<|call|>"),
        ("gpt-oss", "<|channel|>commentary to=user.look json<|message|>{}<|return|>"),
        ("gpt-oss", "<|channel|>commentary to=all-files json<|message|>{}<|return|>"),
        ("Llama 3.1", f"{LOOK}; {LOOK}<|eot_id|>"),
        ("Llama 3.1", f"I look it up. {LOOK}<|eot_id|>"),
        ("Llama 3.1", f"{LOOK[:-2]}<|eot_id|>"),
        ("Llama 3.1", '{"name": "look"<|eot_id|>'),
        ("Llama 3.1", '<|python_tag|>look.call(word="ox")<|eom_id|>'),
        ("Llama 3.1", "<|python_tag|>1 + 1<|eot_id|>"),
        ("Llama 3.1", "So.<|eom_id|>"),
    ],
)
def test_a_call_that_cannot_be_read_is_no_answer(formats, name, text):
    """As an answer it would end the rollout, and be scored."""
    codec = formats.of(name)
    turn = codec.parse(codec.render(ASKED, TOOLS), encode(codec, text))
    assert len(turn.attempts) == 1 and "not a call of a function: " in turn.malformed[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Llama 3.1", f"<|python_tag|>{LOOK}<|eom_id|>"),
        ("gpt-oss", ' to=functions.look<|channel|>commentary json<|message|>{"word": "ox"}<|call|>'),
        ("gpt-oss", ' to=functions.look<|channel|>commentary json<|message|>{"word": "ox"}<|return|>'),
        ("gpt-oss", f"{CHANNEL}<|end|>{LOOKS}<|return|>"),
    ],
)
def test_a_call_is_read_in_each_form_that_the_model_knows(formats, name, text):
    codec = formats.of(name)
    (call,) = codec.parse(codec.render(ASKED, TOOLS), encode(codec, text)).message.tool_calls
    assert (call.name, call.arguments) == ("look", {"word": "ox"})
    if name == "gpt-oss":
        openai = codec._renderer._enc.parse_messages_from_completion_tokens
        assert openai(encode(codec, text), Role.ASSISTANT)[-1].recipient == "functions.look"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Llama 3.1", 'The name is {"name": "ox"}.<|eot_id|>'),
        ("Qwen3", '{"name": "ox"}<|im_end|>'),
        ("gpt-oss", '<|channel|>final<|message|>{"name": "ox"}<|return|>'),
        ("gpt-oss", "<|channel|>final<|message|>An ox, to=look.<|return|>"),
        ("gpt-oss", " to=user<|channel|>final<|message|>An ox.<|return|>"),
        ("gpt-oss", "<|channel|>final to=human<|message|>An ox.<|return|>"),
        ("gpt-oss", "An ox.<|return|>"),
    ],
)
def test_an_answer_is_not_taken_for_a_call(formats, name, text):
    codec = formats.of(name)
    turn = codec.parse(codec.render(ASKED, TOOLS), encode(codec, text))
    assert not turn.attempts and "ox" in turn.message.text


def test_what_a_renderer_refuses_is_an_error_of_the_format(formats):
    """Else it would be laid to the handler, or tried again for nothing."""
    call = ToolCall(id="c", name="look", arguments={})
    given = [ASKED[1], Message(role="assistant", content="", tool_calls=[call, call])]
    with pytest.raises(CodecError, match=r"renderers/Llama3Renderer: .*single tool"):
        formats.of("Llama 3.1").render(given, TOOLS)


def test_a_renderer_is_not_trusted_by_the_first_letters_of_an_architecture(formats, tmp_path):
    """Without a template nothing says that the format of the one before is the same."""
    for kind in ("deepseek_v32", "deepseek_v3"):
        bare = shutil.copytree(directory("DeepSeek-V3", formats.root), tmp_path / kind)
        config = json.loads((bare / "tokenizer_config.json").read_text())
        del config["chat_template"]
        (bare / "tokenizer_config.json").write_text(json.dumps(config))
        (bare / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(CodecError, match="the tokenizer has no chat template"):
        load_codec(str(tmp_path / "deepseek_v32"))
    assert load_codec(str(tmp_path / "deepseek_v3")).name == "renderers/DeepSeekV3Renderer"


def test_a_name_of_the_hub_is_held_against_the_template_too(formats, monkeypatch):
    known = directory("DeepSeek-V3", formats.root)
    monkeypatch.setitem(renderers.MODEL_RENDERER_MAP, str(known), "deepseek-v3")
    codec = renderer_codec(formats.of("DeepSeek-V3")._guard, str(known), "deepseek_v3")
    assert codec is None, "the library writes other prompts than this template"


def test_a_template_with_other_defaults_is_another_one(formats, tmp_path):
    other = shutil.copytree(directory("Qwen3", formats.root), tmp_path / "other")
    config = json.loads((other / "tokenizer_config.json").read_text())
    default = "{%- if enable_thinking is not defined %}{%- set enable_thinking = false %}{%- endif %}"
    config["chat_template"] = default + config["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    codec = load_codec(str(other))
    assert codec.name == "chat-template"
    assert raw(codec).decode(codec.render(ASKED, [])).endswith("<think>\n\n</think>\n\n")


def test_the_format_of_a_directory_is_not_that_of_one_that_was_loaded_before(formats, tmp_path):
    """Both have the same name, tokenizer and template."""
    bare = shutil.copytree(directory("Qwen3", formats.root), tmp_path / "Qwen3")
    (bare / "config.json").unlink()
    assert formats.of("Qwen3").name == "renderers/Qwen3Renderer"
    assert load_codec(str(bare)).name == "chat-template"
    one, other = (
        Backend(id=name, url="http://x", model="m", tokenizer=str(path), max_model_len=1024)
        for name, path in (("one", directory("Qwen3", formats.root)), ("other", bare))
    )
    assert re.fullmatch(
        r"backend other: its tokenizer Qwen3@\w+ is not Qwen3@\w+", takeover_obstacle(one, other)
    )


def test_prompts_of_gpt_oss_are_the_same_on_every_day(formats):
    codec = formats.of("gpt-oss")
    assert f"Current date: {HARMONY_DATE}\n" in raw(codec).decode(codec.render(ASKED, []))


def row(codec, model):
    """The line of docs/backends.md about a model, from what its format does here."""
    published = MODELS[model]
    takes, offers = not refusal(codec, []), not refusal(codec, TOOLS)
    prompt = codec.render(ASKED, advertised(codec))

    def parsed(text):
        return codec.parse(prompt, encode(codec, text)).message

    calls = parsed((published.calls or published.call) + published.end).tool_calls
    assert {(call.name, str(call.arguments)) for call in calls} == {("look", "{'word': 'ox'}")}
    answer = parsed(published.answer())
    assert answer.text == "An ox." and not answer.tool_calls
    library = codec.name.removeprefix("renderers/").removesuffix("Renderer")
    cells = [
        model,
        "its template" if library == "chat-template" else f"the library's `{library}`",
        "yes" if offers else "refused",
        "yes" if takes else "refused",
        ("one" if len(calls) == 1 else "several") if takes else "none",
        "apart" if answer.reasoning == "hm" else "none",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_page_says_what_each_model_can_do(formats, model):
    assert row(formats.of(model), model) in (ROOT / "docs" / "backends.md").read_text()


REFUSALS = {
    "Llama 3": (TOOLS, "leaves tools out of the prompt; use another model, or a handler that describes"),
    "DeepSeek-V3": (TOOLS, "leaves tools out of the prompt"),
    "Gemma 3": ([], "this model takes no tool answers: .* roles must alternate"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_format_cannot_do_is_refused_by_name(formats, name):
    tools, reason = REFUSALS[name]
    assert re.search(reason, refusal(formats.of(name), tools))


def test_the_template_of_gpt_oss_alone_is_refused_since_a_turn_would_end_with_its_first_channel(
    formats, tmp_path
):
    bare = shutil.copytree(directory("gpt-oss", formats.root), tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(CodecError, match=r"writes <\|channel\|> .*`model_type` of the config.json beside"):
        load_codec(str(bare))


@pytest.mark.parametrize(
    ("one", "two", "reason"),
    [("ox", "ow", ".*hash mismatch"), ("<|end|>", "<|call|>", r"<\|end\|> has another id")],
)
def test_gpt_oss_with_other_ids_is_refused(formats, tmp_path, one, two, reason):
    """The library encodes with a vocabulary of its own: ids that mean something else would be trained on."""
    other = shutil.copytree(directory("gpt-oss", formats.root), tmp_path / "other")
    for file in (other / "tokenizer.json", other / "tokenizer_config.json"):
        text = file.read_text()
        for old, new in ((one, "<swap>"), (two, one), ("<swap>", two)):
            text = text.replace(f'"{old}": ', f'"{new}": ').replace(f': "{old}"', f': "{new}"')
        file.write_text(text)
    with pytest.raises(CodecError, match=f"the format of gpt-oss cannot be used .*: {reason}"):
        load_codec(str(other))


def test_a_llama_whose_calls_no_renderer_reads_is_refused_with_tools(formats, tmp_path):
    """Calls in the template's own form would pass for text, and each rollout end with its first turn."""
    bare = shutil.copytree(directory("Llama 3.1", formats.root), tmp_path / "bare")
    (bare / "config.json").unlink()
    codec = load_codec(str(bare))
    assert "does not write calls as <tool_call>{json}</tool_call>" in refusal(codec, TOOLS)
    assert refusal(codec, []) is None
