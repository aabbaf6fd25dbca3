"""Chat formats with the tokenizers of published models: what each can do, and that no id is made twice."""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import pytest

from rollout.trajectory import Message, TextPart, Trajectory
from services.engines.base import Completion
from tests.helpers.published import MODELS, TOOLS, directory
from tests.helpers.stack import ROOT
from workers.agent import codec as codec_module
from workers.agent.codec import load_codec
from workers.agent.formats import CodecError
from workers.agent.guard import CUT
from workers.agent.tokens import TokenBuffer

TURNS = 20
ASKED = [Message(role="system", content="Be brief."), Message(role="user", content="What is an ox?")]


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The codec of each model; their tokenizers take a gigabyte, which other files need not carry."""
    root = tmp_path_factory.mktemp("published")
    before = dict(codec_module._codecs)
    yield SimpleNamespace(root=root, of=lambda model: load_codec(str(directory(model, root))))
    codec_module._codecs.clear()
    codec_module._codecs.update(before)


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
        buffer.add_sampled(completion(sampled))
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
    buffer.add_sampled(completion(last))
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


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt-oss"])
def test_a_turn_and_its_answer_read_as_the_model_s_own_template_renders_them(formats, name):
    """That of gpt-oss is but near to the encoder that the model was trained with."""
    codec = formats.of(name)
    sampled = encode(codec, MODELS[name].answer(thinks=False))
    prompt = codec.render(ASKED, [])
    ids = prompt + sampled + codec.bridge(prompt, sampled, [Message(role="user", content="And a cow?")])
    chat = [message.to_chat() for message in ASKED]
    chat += [{"role": "assistant", "content": "An ox."}, {"role": "user", "content": "And a cow?"}]
    text = raw(codec).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert raw(codec).decode(ids) == text and ids == encode(codec, text)


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


def test_gpt_oss_with_other_ids_is_refused(formats, tmp_path):
    """The library encodes with a vocabulary of its own: ids that mean something else would be trained on."""
    other = shutil.copytree(directory("gpt-oss", formats.root), tmp_path / "other")
    file = other / "tokenizer.json"
    text = file.read_text()
    swapped = text
    for old, new in (("ox", "<swap>"), ("ow", "ox"), ("<swap>", "ow")):
        swapped = swapped.replace(f'"{old}": ', f'"{new}": ')
    assert swapped != text
    file.write_text(swapped)
    with pytest.raises(CodecError, match=r"the format of gpt-oss cannot be used .*: .*hash mismatch"):
        load_codec(str(other))


def test_a_llama_whose_calls_no_renderer_reads_is_refused_with_tools(formats, tmp_path):
    """Calls in the template's own form would pass for text, and each rollout end with its first turn."""
    bare = shutil.copytree(directory("Llama 3.1", formats.root), tmp_path / "bare")
    (bare / "config.json").unlink()
    codec = load_codec(str(bare))
    assert "does not write calls as <tool_call>{json}</tool_call>" in refusal(codec, TOOLS)
    assert refusal(codec, []) is None
