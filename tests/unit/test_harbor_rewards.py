"""What a verifier's reward file may say."""

from __future__ import annotations

import json

import pytest

from workers.handlers.harbor.rewards import MAX_KEYS, NoReward, choose, parse

JSON, TEXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"


@pytest.mark.parametrize(
    ("path", "text", "rewards"),
    [
        (TEXT, "1", {"reward": 1.0}),
        (TEXT, " 0.25\n", {"reward": 0.25}),
        (TEXT, "-1e-3", {"reward": -0.001}),
        (JSON, "0.5", {"reward": 0.5}),
        (JSON, '{"reward": 1, "style": 0.5}', {"reward": 1.0, "style": 0.5}),
        (JSON, '{"passed": 0}', {"passed": 0.0}),
    ],
)
def test_a_number_is_a_reward_and_so_are_several_by_name(path, text, rewards):
    assert parse(text, path) == rewards


@pytest.mark.parametrize(
    "text", ["", " \n", "nan", "inf", "-Infinity", "true", "1_0", "0x1", "1 0", "1e999", "١"]
)
def test_a_text_that_is_no_finite_number_is_no_reward(text):
    with pytest.raises(NoReward):
        parse(text, TEXT)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "true", '"1"', "[1]", "{}", "NaN", "1e999", "1" + "0" * 400, "{", "[" * 30_000),
        *(
            '{"reward": true}',
            '{"reward": null}',
            '{"reward": {"a": 1}}',
            '{"reward": NaN}',
            '{"a": 1, "b": "1"}',
        ),
        json.dumps({"a" * 300: 1}),
        *('{"half a pair \\ud800": 1}', '{"\\u001b[2J": 1}'),
        json.dumps({f"k{number}": 1 for number in range(MAX_KEYS + 1)}),
    ],
)
def test_json_that_is_no_finite_number_or_numbers_by_name_is_no_reward(text):
    with pytest.raises(NoReward):
        parse(text, JSON)


def test_the_score_is_the_one_named_or_the_only_one_or_reward():
    several = {"reward": 0.5, "style": 1.0}
    assert choose({"style": 1.0}, None) == 1.0
    assert choose(several, None) == 0.5
    assert choose(several, "style") == 1.0
    for rewards, key in (({"a": 1.0, "b": 0.0}, None), (several, "speed")):
        with pytest.raises(NoReward, match="reward"):
            choose(rewards, key)


def test_why_there_is_no_reward_can_be_recorded():
    for text in ('{"\\ud800": "x"}', '{"a": "\\ud800"}', '{"a": ["\\ud800"]}'):
        with pytest.raises(NoReward) as refused:
            parse(text, JSON)
        assert str(refused.value).encode()
