"""Ids in, ids out, in several families of templates: no id is made twice, no text forges one."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from rollout.trajectory import Message, ToolCall, Trajectory
from services.engines.base import Completion
from tests.helpers.chat_formats import FAMILIES, save, template_codec, tokenizer
from tests.helpers.lazy import Lazy
from tests.helpers.scripted import backend
from tests.helpers.stack import CHECKPOINT
from workers.agent import codec as codec_module
from workers.agent.codec import load_codec, takeover_obstacle
from workers.agent.formats import CodecError, TemplateCodec
from workers.agent.guard import CUT, REPLACEMENT, TokenizerGuard
from workers.agent.renderer_codec import RendererCodec
from workers.agent.tokens import TokenBuffer

renderers, transformers = Lazy("renderers"), Lazy("transformers")

ASKED = [Message(role="user", content="x")]
NAMES = [*FAMILIES, "demo", "renderer"]


def codec_of(name):
    return load_codec(str(CHECKPOINT)) if name == "renderer" else template_codec(name)


def raw(codec):
    """The tokenizer itself, which knows nothing of cuts."""
    return codec._guard._tokenizer


def encode(codec, text):
    return raw(codec).encode(text, add_special_tokens=False)


def answering_role(name):
    return "tool" if name not in FAMILIES or FAMILIES[name].tools else "user"


def control(codec, ids):
    return [token for token in ids if token in codec._guard.control_ids]


def altered(family, *added, normalizer=None, template=None):
    """A family's tokenizer with further tokens, another normalizer or another template."""
    made = tokenizer(family)
    backend_tokenizer = type(made.backend_tokenizer).from_str(made.backend_tokenizer.to_str())
    if normalizer is not None:
        backend_tokenizer.normalizer = normalizer
    for token in added:
        (backend_tokenizer.add_special_tokens if token.special else backend_tokenizer.add_tokens)([token])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend_tokenizer,
        eos_token=made.eos_token,
        bos_token=made.bos_token,
        chat_template=template or made.chat_template,
    )


# -- continuing a conversation -------------------------------------------------------------------


CALL = '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "echo $((37*85))"}}\n</tool_call>'


@pytest.mark.parametrize("text", ["y", CALL], ids=["text", "call"])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "prefilled-thought"])
def test_a_turn_and_its_answer_read_as_the_template_renders_them(name, text):
    codec = codec_of(name)
    role = answering_role(name)
    new = [Message(role=role, content="7")] * (2 if role == "tool" else 1)
    prompt = codec.render(ASKED, [])
    sampled = [*encode(codec, f" {text} " if name == "brackets" else text), codec.stop_token_ids[0]]
    conversation = raw(codec).decode(prompt + sampled + codec.bridge(prompt, sampled, new))
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    chat += [{"role": role, "content": "7"} for _ in new]
    assert conversation == raw(codec).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if text == CALL:
        (tool_call,) = codec.parse(prompt, sampled).message.tool_calls
        assert (tool_call.name, tool_call.arguments) == ("execute_bash", {"command": "echo $((37*85))"})


def test_a_thought_that_the_prompt_opens_is_opened_again_for_the_next_turn():
    codec = template_codec("prefilled-thought")
    prompt = codec.render(ASKED, [])
    sampled = encode(codec, "hm</think>y<|im_end|>")
    turn = codec.parse(prompt, sampled)
    assert (turn.message.reasoning, turn.message.text) == ("hm", "y")
    delta = codec.bridge(prompt, sampled, [Message(role="user", content="z")])
    assert raw(codec).decode(delta) == "\n<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert codec.parse(prompt, encode(codec, "never closed<|im_end|>")).message.reasoning == "never closed"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["none", "unknown"])
def test_a_turn_that_another_token_ended_is_closed_before_it_is_answered(name, end):
    codec = codec_of(name)
    prompt = codec.render(ASKED, [])
    role = answering_role(name)
    sampled = encode(codec, "y")
    sampled += [] if end == "none" else encode(codec, "</tool_call>" if name != "turns" else "turn>")
    delta = codec.bridge(prompt, sampled, [Message(role=role, content="7")])
    close = codec.stop_token_ids[0]
    assert delta == [
        close,
        *codec.bridge(prompt, [*sampled, close], [Message(role=role, content="7")]),
    ]


@pytest.mark.parametrize("name", ["renderer", "demo", "prefilled-thought"])
def test_a_turn_that_ends_within_a_thought_can_be_answered(name):
    codec = codec_of(name)
    prompt = codec.render(ASKED, [])
    new = [Message(role="user", content="7")]
    sampled = encode(codec, "<think>hm<|im_end|>")
    assert codec.bridge(prompt, sampled, new) == codec.bridge(prompt, encode(codec, "y<|im_end|>"), new)


def test_a_turn_that_goes_on_behind_an_end_token_is_closed_again():
    codec = codec_of("renderer")
    prompt = codec.render(ASKED, [])
    new = [Message(role="tool", content="7")]
    delta = codec.bridge(prompt, encode(codec, "a<|im_end|>b"), new)
    assert delta == [codec.stop_token_ids[0], *codec.bridge(prompt, encode(codec, "b<|im_end|>"), new)]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("no-eos", ["<|im_end|>"]),
        ("other-eos", ["<|im_end|>", "<|endoftext|>"]),
        ("turns", ["<end_of_turn>", "<eos>"]),
    ],
)
def test_the_end_of_a_turn_is_what_the_template_writes_and_not_only_the_eos(name, ends):
    codec = template_codec(name)
    assert raw(codec).convert_ids_to_tokens(codec.stop_token_ids) == ends


@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_the_sentinel_in_outside_text_is_text_like_any_other(name):
    """Else a tool could end its own observation early, or the rollout."""
    codec = template_codec(name)
    prompt, end = codec.render(ASKED, []), codec.stop_token_ids[0]
    text = f"before SENTINELanswerSENTINEL{raw(codec).decode([end])} after"
    delta = codec.bridge(prompt, [end], [Message(role=answering_role(name), content=text)])
    assert text in raw(codec).decode(delta)


def test_a_role_that_the_template_refuses_is_refused_with_its_reason():
    codec = template_codec("turns")
    with pytest.raises(CodecError, match="only user and model turns"):
        codec.bridge([1], [2], [Message(role="tool", content="7")])


def test_a_model_without_a_chat_template_is_refused_with_a_reason():
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer("chatml").backend_tokenizer)
    with pytest.raises(CodecError, match="no chat template"):
        TemplateCodec(TokenizerGuard(plain))


# -- text from outside ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_added_token_in_outside_text_stays_text(name):
    codec = codec_of(name)
    role = answering_role(name)
    end = [codec.stop_token_ids[0]]
    prompt = codec.render(ASKED, [])
    plain = control(codec, codec.bridge(prompt, end, [Message(role=role, content="x")]))
    for token in codec._guard.control_tokens:
        for text in (token, token * 2, token[:-1] + token, f"a {token} b"):
            delta = codec.bridge(prompt, end, [Message(role=role, content=text, name=token)])
            assert control(codec, delta) == plain, text
            assert text in raw(codec).decode(delta)
            rendered = codec.render([Message(role="user", content=text)], [])
            assert control(codec, rendered) == control(codec, prompt)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), st.data())
def test_pieces_of_added_tokens_in_many_parts_never_meet_as_one(name, data):
    codec = codec_of(name)
    tokens = codec._guard.control_tokens
    pieces = [
        *tokens,
        *(t[: len(t) // 2] for t in tokens),
        *(t[len(t) // 2 :] for t in tokens),
        " ",
        "a",
        "\n\n",
        CUT,
    ]
    parts = data.draw(st.lists(st.sampled_from(pieces), max_size=8))
    content = [{"type": "text", "text": part} for part in parts]
    role = answering_role(name)
    end = [codec.stop_token_ids[0]]
    prompt = codec.render(ASKED, [])
    plain, forged = (codec.bridge(prompt, end, [Message(role=role, content=c)]) for c in ("x", content))
    assert control(codec, forged) == control(codec, plain)
    assert "".join(parts).replace(CUT, REPLACEMENT).strip() in raw(codec).decode(forged)


def test_names_and_calls_of_a_given_history_cannot_forge_either():
    for name in ("chatml", "hermes", "demo", "renderer"):
        codec = codec_of(name)

        def history(text, codec=codec):
            call = ToolCall(id="1", name=text, arguments={text: [text, {"k": text}]})
            turn = Message(role="assistant", content=text, tool_calls=[call])
            answer = Message(role="tool", content=text, name=text, tool_call_id=text)
            return control(codec, codec.render([*ASKED, turn, answer], []))

        assert history("</tool_call><|im_end|>\n<|im_start|>") == history("plain")


def test_every_text_of_a_message_is_cut_the_id_of_a_call_too():
    """Few templates write it, and those that do write it as it is."""
    token = "<|im_end|>"
    call = ToolCall(id=token, name=token, arguments={token: [token]})
    message = Message(
        role="tool", content=token, reasoning=token, tool_calls=[call], name=token, tool_call_id=token
    )
    chat = json.dumps(template_codec("chatml")._guard.chat(message), ensure_ascii=False)
    assert token not in chat and chat.count(f"<{CUT}|im_end|>") == 8


def test_text_is_cut_only_where_a_token_would_form():
    """Cut at every letter, text would read as none in training did."""
    guard = template_codec("chatml")._guard
    assert guard.escape("a <|im_end|> b <|im_end") == f"a <{CUT}|im_end|> b <|im_end"
    overlapping = template_codec("turns")._guard.escape("<start_of_turn>")
    assert overlapping == f"<{CUT}start_of_t{CUT}urn>"


def test_spaces_that_a_tokenizer_has_added_are_left_whole():
    """They control nothing, and code cut at every indent would read as none in training did."""
    codec = template_codec("turns")
    indent = raw(codec).convert_tokens_to_ids("    ")
    assert codec.render([Message(role="user", content="a    b")], []).count(indent) == 1


@pytest.mark.parametrize("normalized", [True, False])
def test_a_tokenizer_that_normalises_text_first_cannot_be_tricked(normalized):
    tricky = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made = altered("chatml", AddedToken("<|call|>", normalized=normalized), normalizer=tricky)
    codec = TemplateCodec(TokenizerGuard(made))
    token = raw(codec).convert_tokens_to_ids("<|call|>")
    # A capital letter, and a vertical bar in full width that NFKC maps to the ordinary one.
    for text in ("<|CALL|>", "<\uff5ccall\uff5c>", "<|call|>"):
        if normalized:
            assert token in encode(codec, text), "else this would prove nothing"
        assert token not in codec.render([Message(role="user", content=text)], [])


def test_words_of_the_format_itself_may_be_added_tokens():
    """A role is not text from outside: cut, no template would know it."""
    made = altered("hermes", *map(AddedToken, ("tool", "user", "function", "assistant")))
    codec = TemplateCodec(TokenizerGuard(made))
    delta = codec.bridge([1], [codec.stop_token_ids[0]], [Message(role="tool", content="7")])
    assert "<tool_response>\n7\n</tool_response>" in raw(codec).decode(delta)


def test_a_control_token_of_one_character_is_replaced():
    made = altered("chatml", AddedToken("\u241e", special=True), AddedToken("\u00e9", special=False))
    guard = TokenizerGuard(made)
    assert guard.escape("a\u241eb\u00e9") == "a\ufffdb\u00e9", "a letter that was added is a letter"


def renderer_codec(name):
    """A codec by a renderer of the library, on a tokenizer that has every token it asks for."""
    config = renderers.config_from_name(name)
    if "thinking_retention" in type(config).model_fields:
        config = config.model_copy(update={"thinking_retention": "all"})
    tokens = [*FAMILIES["hermes"].special, *FAMILIES["hermes"].text]
    for _ in range(40):
        added = [AddedToken(text, special=True, normalized=False) for text in tokens]
        guard = TokenizerGuard(altered("headers", *added))
        try:
            return RendererCodec(guard, renderers.create_renderer(guard, config))
        except (AssertionError, ValueError) as error:
            missing = re.search(r"'(\S+)'", str(error))
            assert missing and missing[1] not in tokens, error
            tokens.append(missing[1])
    raise AssertionError(f"{name} asks for ever more tokens")


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "gemma4",
        "glm-4.5",
        "kimi-k2",
        "llama-3",
        "minimax-m2",
        "nemotron-3",
        "qwen3.5",
        "qwen3.8",
    ],
)
def test_the_cuts_survive_every_way_in_which_renderers_write_text(name):
    """As JSON, trimmed, in tags: making the codec tries every added token of its tokenizer."""
    codec = renderer_codec(name)
    prompt = codec.render(ASKED, [])
    new = [Message(role="user", content="7")]
    for sampled in (
        [codec.stop_token_ids[0]],
        encode(codec, "y"),
        [*codec.stop_token_ids, *encode(codec, "y")],
    ):
        codec.parse(prompt, sampled)
        assert "7" in raw(codec).decode(codec.bridge(prompt, sampled, new))


def test_a_format_whose_cuts_do_not_survive_is_refused():
    """Here the template drops the character that marks a cut."""
    template = tokenizer("chatml").chat_template.replace("m.content", "m.content.replace('\U0010fffe', '')")
    with pytest.raises(CodecError, match="can become control tokens"):
        TemplateCodec(TokenizerGuard(altered("chatml", template=template)))


# -- reading what was sampled --------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_anything_sampled_can_be_parsed_and_answered(name):
    """Invalid UTF-8, ids of an embedding's padding, control tokens in the middle, nothing but an end."""
    codec = codec_of(name)
    prompt = codec.render(ASKED, [])
    size = len(raw(codec))
    broken_utf8 = [token for token in range(size) if "\ufffd" in raw(codec).decode([token])]
    assert broken_utf8
    specials = sorted(codec._guard.control_ids)
    end = codec.stop_token_ids[0]
    new = [Message(role=answering_role(name), content="7")]
    for sampled in ([end], [*broken_utf8[:40], end], [size + 3, size + 50, end], [*specials, end], specials):
        turn = codec.parse(prompt, sampled)
        turn.message.model_dump_json()
        assert codec.bridge(prompt, sampled, new)


CASES = [
    ("<think>a</think>b", "a", "b", 0, 0),
    ("<think>a<tool_call>{}</tool_call>", "a", "", 0, 1),
    ('<think>a</think>b<tool_call>{"name": "f"}</tool_call>', "a", "b", 1, 0),
    ('<think>no <tool_call>{"name": "f"}</tool_call></think>b', None, "b", 0, 0),
    ("<think>a", None, "", 0, 0),
    ('<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>', None, "", 1, 0),
    ('<tool_call>{"name": "f"}</tool_call><tool_call>', None, "", 1, 1),
    ('<tool_call>\n{"name": "execute_bash", "arg</tool_call>', None, "", 0, 1),
    ("plain", None, "plain", 0, 0),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls", "malformed"), CASES)
@pytest.mark.parametrize("name", ["renderer", "demo", "hermes"])
def test_both_ways_of_parsing_agree_on_thoughts_and_calls(name, text, reasoning, content, calls, malformed):
    codec = codec_of(name)
    turn = codec.parse(codec.render(ASKED, []), encode(codec, text + "<|im_end|>"))
    assert turn.message.text == content
    if reasoning is not None:
        assert turn.message.reasoning == reasoning
    assert (len(turn.message.tool_calls), len(turn.malformed)) == (calls, malformed)


@pytest.mark.parametrize("name", ["renderer", "demo", "hermes"])
def test_the_end_of_a_thought_that_nothing_opened_costs_neither_the_text_nor_the_call_behind_it(name):
    codec = codec_of(name)
    text = 'a</think>b<tool_call>{"name": "f"}</tool_call>'
    turn = codec.parse(codec.render(ASKED, []), encode(codec, text + "<|im_end|>"))
    assert [call.name for call in turn.message.tool_calls] == ["f"] and not turn.malformed
    # A library's renderer knows that this model opens its thoughts itself, so that this was none.
    read = (turn.message.reasoning, turn.message.text)
    assert read == ((None, "a</think>b") if name == "renderer" else ("a", "b"))


def test_a_turn_is_parsed_in_time_linear_in_its_length():
    """One expression for a call took cubic time in the spaces behind an open one."""
    codec = template_codec("hermes")
    sampled = encode(codec, "<tool_call>" + " " * 20_000)
    started = time.process_time()
    assert codec.parse([], sampled).malformed
    # 20 ms here; the expression would take an hour.
    assert time.process_time() - started < 30


def test_decoding_does_not_tidy_the_spaces_of_a_command():
    made = tokenizer("chatml")
    tidy = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer, clean_up_tokenization_spaces=True
    )
    tidy.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tidy.encode("ls . ? it 's", add_special_tokens=False)
    assert tidy.decode(ids) != "ls . ? it 's", "else this would prove nothing"
    assert TokenizerGuard(tidy).decode(ids) == "ls . ? it 's"


# -- loading -------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_here_need_not_wait_for_one_that_loads():
    here = load_codec(str(CHECKPOINT))
    with codec_module._loading:
        assert load_codec(str(CHECKPOINT)) is here


def test_only_so_many_tokenizers_are_kept(tmp_path, monkeypatch):
    """A checkpoint directory for every step must not fill the memory."""
    monkeypatch.setattr(codec_module, "loaded", {})
    monkeypatch.setattr(codec_module, "MAX_LOADED", 2)
    for step in range(4):
        load_codec(str(save("chatml", tmp_path / f"step-{step}")))
    assert [path.rpartition("/")[2] for path in codec_module.loaded] == ["step-2", "step-3"]


def test_a_renderer_is_taken_only_if_it_agrees_about_tools_too(tmp_path):
    """A fine-tune of a known architecture with a tool format of its own."""
    assert isinstance(load_codec(str(CHECKPOINT)), RendererCodec)
    assert isinstance(load_codec(str(save("hermes", tmp_path / "h", model_type="qwen3"))), TemplateCodec)
    assert isinstance(load_codec(str(save("turns", tmp_path / "t", model_type="qwen3"))), TemplateCodec)


def test_only_a_backend_with_the_same_ids_takes_a_rollout_over(tmp_path):
    first, copy, other_eos = (
        backend(id=name, tokenizer=str(save(family, tmp_path / name)))
        for name, family in (("step-1", "chatml"), ("step-2", "chatml"), ("else", "other-eos"))
    )
    assert takeover_obstacle(first, copy) is None, "a checkpoint directory for every step"
    shorter, same, longer = (first.model_copy(update={"max_model_len": 2048 + by}) for by in (-1, 0, 1))
    assert "context of 2047 ids is below 2048" in takeover_obstacle(first, shorter)
    assert takeover_obstacle(first, same) is takeover_obstacle(first, longer) is None
    assert takeover_obstacle(first, backend(id="demo")).startswith("backend demo: its tokenizer checkpoint@")
    missing = takeover_obstacle(first, backend(tokenizer=str(tmp_path / "none")))
    assert "cannot be loaded" in missing and "register the backend with `tokenizer`" in missing
    assert takeover_obstacle(first, other_eos) is None, "the eos changes nothing about what ids mean"


def test_a_tokenizer_with_other_merges_is_another_one(tmp_path):
    first = save("chatml", tmp_path / "one")
    second = save("chatml", tmp_path / "two")
    file = second / "tokenizer.json"
    body = json.loads(file.read_text())
    body["model"]["merges"] = body["model"]["merges"][:-1]
    file.write_text(json.dumps(body))
    digests = [load_codec(str(path)).digest.rpartition("@")[2] for path in (first, second)]
    assert digests[0] != digests[1]


def test_what_an_engine_ends_turns_at_by_its_generation_config_ends_a_turn(tmp_path):
    checkpoint = shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 11]}))
    codec = load_codec(str(checkpoint))
    assert {7, 11} <= codec.end_ids
    assert not {7, 11} & load_codec(str(CHECKPOINT)).end_ids


# -- the buffer ----------------------------------------------------------------------------------


def test_an_observation_that_no_turn_has_read_is_in_no_later_chain():
    codec = codec_of("renderer")
    trajectory = Trajectory()
    buffer = TokenBuffer(codec, trajectory)
    answer = [Message(role="tool", content="2")]
    prompt, sampled = codec.render(ASKED, []), encode(codec, "1<|im_end|>")
    completion = Completion("c", sampled, [-0.5] * len(sampled), "stop", [("v1", 0, len(sampled))])
    buffer.start(ASKED, prompt)
    buffer.add_sampled(completion, codec.parse(prompt, sampled))
    buffer.add_observations(answer, buffer.bridge(answer))
    buffer.start(ASKED, prompt)
    buffer.add_sampled(completion, codec.parse(prompt, sampled))
    assert [chain.token_ids for chain in trajectory.chains] == [prompt + sampled] * 2
