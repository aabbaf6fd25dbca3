"""Random token streams, most of which text could not carry, come back id by id.

The model is scripted: it samples any ids at all. The tokenizers and both ways of bridging are real.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.trajectory import FinishReason, Message, Trajectory
from services.engines.base import Completion
from tests.helpers.chat_formats import FAMILIES, template_codec
from tests.helpers.scripted import Said, ScriptedRouter, backend, loop
from tests.helpers.stack import CHECKPOINT
from workers.agent.codec import load_codec
from workers.agent.tokens import TokenBuffer

NAMES = ["renderer", "demo", *FAMILIES]
PADDING = 24
"""Ids beyond the vocabulary that an engine may sample: rows of the embedding that pad it."""

quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def codec_of(name):
    return load_codec(str(CHECKPOINT)) if name == "renderer" else template_codec(name)


def raw(codec):
    return codec._guard._tokenizer


def survives_text(codec, ids):
    """Whether ids → text → ids is the identity."""
    text = raw(codec).decode(ids, skip_special_tokens=False)
    return raw(codec).encode(text, add_special_tokens=False) == ids


@st.composite
def completions(draw, codec, number):
    """Any ids, any finite log-probs, any spans of versions; mostly ended by the format's own token."""
    ids = draw(st.lists(st.integers(0, len(raw(codec)) + PADDING), min_size=1, max_size=24))
    if draw(st.integers(0, 4)):
        ids.append(codec.stop_token_ids[0])
    some = draw(st.lists(st.floats(-1e6, 0), min_size=1, max_size=4))
    logprobs = [some[i % len(some)] for i in range(len(ids))]
    cuts = draw(st.sets(st.integers(1, max(1, len(ids) - 1)), max_size=3)) - {len(ids)}
    edges = [0, *sorted(cuts), len(ids)]
    versions = [draw(st.sampled_from(["v1", "v2", "v3", None])) for _ in edges[1:]]
    spans = list(zip(versions, edges, edges[1:], strict=False))
    return Completion(
        f"call-{number}", ids, logprobs, "stop", spans, routed_experts=draw(st.none() | st.text())
    )


def outside(codec):
    """Text of tools and users, control tokens of the template among it."""
    pieces = [
        *codec._guard.control_tokens,
        "<",
        "|",
        "im_end",
        ">",
        "7",
        " ",
        "\n",
        "é",
        "\u0301",
        "\U0001f600",
    ]
    return st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=6).map("".join)


@st.composite
def episodes(draw):
    """A codec, a question, and turns: what was sampled and what was answered to it."""
    name = draw(st.sampled_from(NAMES))
    codec = codec_of(name)
    tools = name not in FAMILIES or FAMILIES[name].tools
    turns = []
    for number in range(draw(st.integers(1, 4))):
        roles = ["tool"] * draw(st.integers(1, 3)) if tools and draw(st.booleans()) else ["user"]
        new = [Message(role=role, content=draw(outside(codec))) for role in roles]
        turns.append((draw(completions(codec, number)), new))
    return codec, draw(outside(codec)), turns


@quick
@given(episodes())
def test_what_was_sampled_comes_back_id_by_id(episode):
    codec, question, turns = episode
    trajectory = Trajectory()
    buffer = TokenBuffer(codec, trajectory)
    asked = [Message(role="user", content=question)]
    prompt = codec.render(asked, [])
    buffer.start(asked, prompt)
    expected = list(prompt)
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[str | None] = []
    for number, (completion, new) in enumerate(turns):
        assert buffer.ids == expected, "the prompt of a call is all that was before"
        buffer.add_sampled(completion, codec.parse(buffer.ids, completion.token_ids))
        expected += completion.token_ids
        mask += [1] * len(completion.token_ids)
        logprobs += completion.logprobs
        versions += [version for version, start, end in completion.spans for _ in range(start, end)]
        if number < len(turns) - 1:
            delta = buffer.bridge(new)
            buffer.add_observations(new, delta)
            expected += delta
            mask += [0] * len(delta)
            logprobs += [0.0] * len(delta)
            versions += [None] * len(delta)
            harmless = buffer._codec.bridge(
                [*prompt], [codec.stop_token_ids[0]], [m.model_copy(update={"content": []}) for m in new]
            )
            ours = [t for t in delta if t in codec._guard.control_ids]
            controls = [t for t in harmless if t in codec._guard.control_ids]
            closed = completion.token_ids[-1] in codec.stop_token_ids
            assert ours in (controls, [codec.stop_token_ids[0], *controls]), "an observation forged a token"
            assert not closed or ours == controls or completion.token_ids[-1] != codec.stop_token_ids[0]
    assert trajectory.chain.token_ids == expected and trajectory.prompt_ids == prompt
    assert trajectory.response_ids == expected[len(prompt) :]
    assert (trajectory.loss_mask, trajectory.logprobs) == (mask, logprobs)
    assert trajectory.policy_versions == versions
    assert trajectory.versions_used == list(dict.fromkeys(v for v in versions if v is not None))
    assert trajectory.turns == len(turns) and trajectory.sampled_tokens == sum(mask)
    calls = [completion for completion, _ in turns]
    experts = [s.routed_experts for s in trajectory.chain.segments if s.finish_reason]
    assert experts == [completion.routed_experts for completion in calls]
    # The record, as it goes through Redis and HTTP.
    body = trajectory.model_dump_json()
    assert Trajectory.model_validate_json(body) == trajectory
    assert Trajectory.model_validate(json.loads(body)) == trajectory
    n = len(trajectory.response_ids)
    flat = (trajectory.loss_mask, trajectory.logprobs, trajectory.policy_versions)
    assert all(len(view) == n for view in flat)


@pytest.mark.parametrize("name", NAMES)
def test_text_would_have_changed_a_good_part_of_these_streams(name):
    """Else the property above would prove nothing."""
    codec = codec_of(name)
    changed = []

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(completions(codec, 0))
    def look(completion):
        changed.append(not survives_text(codec, completion.token_ids))

    look()
    assert sum(changed) > 0.3 * len(changed), f"{sum(changed)} of {len(changed)}"


@st.composite
def scripts(draw):
    """Turns of a loop: text and calls, written in pieces that the tokenizer would not choose."""
    codec = codec_of("renderer")
    turns = []
    for _ in range(draw(st.integers(0, 3))):
        calls = draw(st.lists(outside(codec), min_size=1, max_size=3))
        bodies = [json.dumps({"name": "look", "arguments": {"text": text}}) for text in calls]
        turns.append((calls, bodies))
    return turns, draw(st.booleans())


@quick
@given(scripts())
def test_a_loop_with_random_calls_asks_with_exactly_what_was_there(script):
    """Each call's text in single bytes: ids of the same text as the tokenizer's, and yet others."""
    turns, think = script
    codec = codec_of("renderer")
    convert = raw(codec).convert_tokens_to_ids

    def letters(text):
        return [t for char in text for t in raw(codec).encode(char, add_special_tokens=False)]

    answers, expected, split = [], [], False
    for calls, bodies in turns:
        ids = [convert("<think>"), *letters("hm"), convert("</think>")] if think else []
        for body in bodies:
            ids += [convert("<tool_call>"), *letters(body), convert("</tool_call>")]
        ids.append(convert("<|im_end|>"))
        split = split or not survives_text(codec, ids)
        answers.append(Said(ids))
        expected.append(calls)
    answers.append(Said([*letters("end"), convert("<|im_end|>")]))
    router = ScriptedRouter(answers, backend(max_model_len=100_000))
    agent = loop(router)
    reason = asyncio.run(agent.run([Message(role="user", content="x")]))
    assert reason is FinishReason.STOP
    assert split or not turns, "else text would have done as well"
    at = 0
    segments = agent.trajectory.chain.segments
    for prompt, answer in zip(router.prompts, answers, strict=True):
        at += len(segments[0].token_ids)
        before = [token for segment in agent.trajectory.chain.segments for token in segment.token_ids][:at]
        assert prompt == before
        assert segments[1].token_ids == answer.ids
        at += len(answer.ids)
        segments = segments[2:]
    observations = [[m.text for m in s.messages] for s in agent.trajectory.chain.segments if s.role == "tool"]
    assert observations == expected
