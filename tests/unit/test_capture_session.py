"""Keys of attempts: nothing of them is stored, so what they say must be nobody's but ours."""

from __future__ import annotations

import random
import string

import pytest

from services.state.capture.session import MODEL, REWARD, key_of, read_key

SECRET = "5e" * 32
IDS = ["r-1", "a", "group.0", "with-many--dashes-", "-", "x" * 128, "rlm-1-other", "1", "tenant:a/b_c~d"]


@pytest.mark.parametrize("rollout_id", IDS)
@pytest.mark.parametrize("kind", [MODEL, REWARD])
@pytest.mark.parametrize("attempt", [1, 10, 999_999_999])
def test_a_key_says_what_it_was_made_for(kind, rollout_id, attempt):
    assert read_key(SECRET, key_of(SECRET, kind, rollout_id, attempt)) == (kind, rollout_id, attempt)


def test_each_attempt_each_kind_and_each_rollout_has_another_key():
    made = {
        key_of(SECRET, kind, rollout_id, attempt)
        for kind in (MODEL, REWARD)
        for rollout_id in IDS
        for attempt in (1, 2, 11)
    }
    assert len(made) == 2 * len(IDS) * 3
    assert len({key.rpartition("-")[2] for key in made}) == len(made)
    assert all(read_key("another" * 8, key) is None for key in made)


def test_a_key_of_one_attempt_does_not_become_another_ones():
    key = key_of(SECRET, MODEL, "r-1", 1)
    mac = key.rpartition("-")[2]
    for text in (
        "rlm-2-r-1",
        "rlm-1-r-2",
        "rlw-1-r-1",
        "rlm-01-r-1",
        "rlm-11--1",
        "rlm-1-r-1-",
        "rlm--1-r-1",
    ):
        assert read_key(SECRET, f"{text}-{mac}") is None, text


def test_no_key_with_a_character_changed_added_or_taken_is_read():
    key = key_of(SECRET, REWARD, "r-1", 12)
    others = string.ascii_letters + string.digits + "-é\0 "
    for at in range(len(key)):
        assert read_key(SECRET, key[:at]) is None and read_key(SECRET, key[at + 1 :]) is None
        assert read_key(SECRET, key[:at] + key[at + 1 :]) is None or at == len(key)
        for other in set(others) - {key[at]}:
            assert read_key(SECRET, key[:at] + other + key[at + 1 :]) is None
            assert read_key(SECRET, key[:at] + other + key[at:]) is None
    assert read_key(SECRET, key + "0") is None and read_key(SECRET, key.upper()) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "-", "--", "---", "rlm", "rlm-1", "rlm-1-", "rlm--r-", "rlm-1-r", "sk-ant-api03-abc",
        "rlm-1-r-" + "0" * 64, "rlm-٣-r-" + "0" * 64, "rlm-²-r-" + "0" * 64, "rlm-" + "9" * 5000 + "-r-0",
        "rlm-1e3-r-0", "rlm- 1-r-0", "rlm-+1-r-0", "rlm-1_0-r-0", "é-1-r-0", "rlm-1-é-" + "0" * 64,
        "rlm-1-r-é", "\ud800", "rlm-1-\ud800-0", "\0", "model-1-r-0", "x" * 1_000_000,
    ],
)  # fmt: skip
def test_what_is_no_key_is_no_error_either(text):
    assert read_key(SECRET, text) is None


def test_text_at_random_is_no_key():
    dice = random.Random(18)
    parts = ["rlm", "rlw", "-", "1", "r", "é", "0" * 64, "\udcff", " ", key_of(SECRET, MODEL, "r", 1)[:-1]]
    for _ in range(5000):
        assert read_key(SECRET, "".join(dice.choices(parts, k=dice.randrange(1, 8)))) is None
