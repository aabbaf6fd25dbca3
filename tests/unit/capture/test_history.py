"""What a history saves to read is read as it is without: in every dialect, however a body differs."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks._talk import DIALECTS, Shape, Talk
from rollout.trajectory import Message
from services.capture.dialects.anthropic import Anthropic
from services.capture.dialects.chat import Chat
from services.capture.dialects.gemini import Gemini
from services.capture.dialects.responses import Responses
from services.capture.history import Histories, History
from services.capture.matching import paths

READERS = {"chat": Chat(), "responses": Responses(), "anthropic": Anthropic(), "gemini": Gemini()}
ENTRIES = {"chat": "messages", "responses": "input", "anthropic": "messages", "gemini": "contents"}


def entries(name: str, body: bytes) -> list[dict[str, Any]]:
    return json.loads(body)[ENTRIES[name]]


def changed(name: str, body: bytes, change: Any) -> bytes:
    whole = json.loads(body)
    change(whole[ENTRIES[name]])
    return json.dumps(whole, separators=(",", ":")).encode()


def talk(turns: int) -> Talk:
    made = Talk(Shape(600, 600), 1)
    for _ in range(turns):
        made.answer()
    return made


def odd(items: list[dict[str, Any]], rng: random.Random) -> None:
    items[rng.randrange(len(items))]["odd"] = rng.random()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_that_goes_on_says_what_it_says_when_all_of_it_is_read(name: str, seed: int):
    """Of a program that appends, begins anew, cuts its history, changes something in it or repeats it."""
    rng, conversation, histories = random.Random(seed), talk(0), Histories()
    for _ in range(25):
        body = conversation.body(name)
        match rng.randrange(6):
            case 0:
                body = changed(name, body, lambda items: items.__setitem__(0, dict(items[-1])))
            case 1:
                body = changed(name, body, lambda items: items.__delitem__(slice(rng.randrange(1, 4), None)))
            case 2:
                body = changed(name, body, lambda items: items.pop(rng.randrange(len(items))))
            case 3:
                body = changed(name, body, lambda items: items.append(items[rng.randrange(len(items))]))
            case 4:
                body = changed(name, body, lambda items: odd(items, rng))
        try:
            alone = READERS[name].read(body)
        except Exception as error:
            with pytest.raises(type(error)):
                READERS[name].read(body, recent=histories.of("s"))
            continue
        call = READERS[name].read(body, recent=histories.of("s"))
        assert call == alone
        assert paths(call.tools, call.messages, call.history) == paths(alone.tools, alone.messages)
        histories.keep("s", call.history, len(body))
        conversation.answer()


@pytest.mark.parametrize("name", DIALECTS)
def test_what_was_read_before_is_not_read_again(name: str):
    before, conversation = READERS[name].read(talk(5).body(name)), talk(6)
    call = READERS[name].read(conversation.body(name), recent=[before.history])
    kept = len(before.messages)
    assert len(call.messages) == kept + 2
    assert all(ours is theirs for ours, theirs in zip(call.messages, before.messages, strict=False))


def test_tools_that_changed_change_all_digests():
    before, after = (talk(turns) for turns in (3, 4))
    first = Chat().read(before.body("chat"))
    paths(first.tools, first.messages, first.history)
    call = Chat().read(after.body("chat"), recent=[first.history])
    other = [*call.tools, {"type": "function", "function": {"name": "more"}}]
    assert paths(other, call.messages, call.history) == paths(other, call.messages)


def test_histories_keep_the_latest_ones_within_their_bytes():
    histories = Histories(most_bytes=100)
    made = [History(lead=[str(number)], messages=[Message(role="user", content="x")]) for number in range(8)]
    for number, history in enumerate(made):
        histories.keep("one", history, 10)
        assert histories.of("one")[-1] is history
        assert len(histories.of("one")) == min(number + 1, 4)
    assert histories.of("one") == made[4:]
    histories.keep("two", made[0], 70)
    assert histories.of("one") == []
    assert histories.of("two") == [made[0]]


def test_a_history_takes_the_place_of_the_one_that_it_goes_on_from():
    histories = Histories()
    for turns in (1, 2, 3):
        call = Chat().read(talk(turns).body("chat"), recent=histories.of("s"))
        histories.keep("s", call.history, 100)
    assert [len(history.messages) for history in histories.of("s")] == [8]
