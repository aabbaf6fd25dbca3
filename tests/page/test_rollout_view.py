"""One rollout: what was said, token by token, when, in which attempt and branch, and what it was worth."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.helpers.keys import http


def tab(page, name):
    """Opens a part of the view."""
    page.get_by_role("tab", name=re.compile(name, re.IGNORECASE)).first.click()


def said(page, words):
    return page.get_by_role("main").get_by_text(words)


@pytest.fixture
def counted(world):
    """The sibling that wrote a file: two commands and an end."""
    return next(item.id for item in world.group if "I write." in str(item.trajectory.messages))


@pytest.fixture
def coloured(world):
    """A sibling whose command printed in colours."""
    return next(item.id for item in world.group if "I look around." in str(item.trajectory.messages))


def test_the_conversation_shows_prompt_calls_of_tools_and_what_they_printed(open_view, counted):
    page = open_view(f"rollouts/{counted}")
    for words in (
        "You mend small programs.",
        "Mend calc.py, in which twice(2) is 5.",
        "I count first.",
        "I write.",
    ):
        expect(said(page, words).first).to_be_visible()
    expect(said(page, "execute_bash").first).to_be_visible()
    expect(said(page, "sed -i 's/ + 1//' calc.py && cat calc.py").first).to_be_visible()
    expect(said(page, re.compile(r"\b49\n50\b")).first).to_be_visible()


def test_colours_of_a_terminal_are_colours_and_no_codes(open_view, coloured):
    page = open_view(f"rollouts/{coloured}")
    words = page.get_by_text("red words", exact=True).last
    expect(words).to_be_visible()
    plain = said(page, "and plain ones").last
    colour = "one => getComputedStyle(one).color"
    assert words.evaluate(colour) != plain.evaluate(colour)
    assert (
        "\x1b" not in page.get_by_role("main").inner_text()
        and "[31m" not in page.get_by_role("main").inner_text()
    )


def test_the_rewards_parts_and_what_it_left_are_shown(open_view, counted, world):
    item = world.client.get(counted)
    page = open_view(f"rollouts/{counted}")
    main = page.get_by_role("main")
    expect(main.get_by_text("completed").first).to_be_visible()
    for name in item.reward_components:
        expect(main.get_by_text(name, exact=True).first).to_be_visible()
    tab(page, "artifact|patch|result")
    expect(main.get_by_text("patch.diff").first).to_be_visible()
    expect(main.get_by_text("return x + x + 1").first).to_be_visible()


def test_a_token_tells_its_id_text_logprob_mask_and_version(open_view, counted, world):
    trajectory = world.client.get(counted).trajectory
    page = open_view(f"rollouts/{counted}")
    tab(page, "token")
    turn = next(s for s in trajectory.chains[0].segments if s.sampled)
    # "I count first." begins with the letter I.
    word = page.get_by_role("main").get_by_text(re.compile("count")).first
    expect(word).to_be_visible()
    first = page.get_by_role("main").locator(f"[data-id='{turn.token_ids[0]}']")
    if first.count():
        first.last.hover()
    else:
        word.hover()
    main = page.locator("body")
    for words in ("v1", re.compile(r"-\d+\.\d+|−\d+\.\d+"), re.compile("log.?prob", re.IGNORECASE)):
        expect(main.get_by_text(words).first).to_be_visible()
    expect(main.get_by_text(re.compile("mask", re.IGNORECASE)).first).to_be_visible()


def test_tokens_of_two_policy_versions_are_told_apart(open_view):
    page = open_view("rollouts/branched")
    tab(page, "token")
    main = page.get_by_role("main")
    for version in ("v1", "v2"):
        expect(main.get_by_text(version, exact=True).first).to_be_visible()


def test_the_timeline_has_lanes_of_stages_model_calls_and_tool_calls(open_view, counted):
    page = open_view(f"rollouts/{counted}")
    tab(page, "timeline")
    main = page.get_by_role("main")
    for words in ("queue", "init", "run", "eval", "model", "tool"):
        expect(main.get_by_text(re.compile(rf"\b{words}", re.IGNORECASE)).first).to_be_visible()


def test_attempts_tell_fence_worker_and_why_each_ended(open_view, world):
    page = open_view("rollouts/broken")
    main = page.get_by_role("main")
    expect(main.get_by_text("broken on purpose in init", exact=False).first).to_be_visible()
    tab(page, "attempt|timeline")
    expect(main.get_by_text(re.compile("fence", re.IGNORECASE)).first).to_be_visible()
    expect(main.get_by_text("handler", exact=False).first).to_be_visible()
    expect(main.get_by_text(re.compile("all@testnode")).first).to_be_visible()


def test_branches_of_a_session_are_a_tree_with_what_each_was_for(open_view):
    page = open_view("rollouts/branched")
    tab(page, "branch|tree|session")
    main = page.get_by_role("main")
    for words in ("sub.agent", "compaction", "discarded"):
        expect(main.get_by_text(re.compile(words, re.IGNORECASE)).first).to_be_visible()


def test_the_receipt_and_warnings_are_shown(open_view):
    page = open_view("rollouts/branched")
    main = page.get_by_role("main")
    expect(main.get_by_text("two policy versions sampled this rollout").first).to_be_visible()
    found = main.get_by_text(re.compile("receipt", re.IGNORECASE)).first
    if not found.is_visible():
        tab(page, "receipt|exact|branch|tree|session")
    expect(main.get_by_text(re.compile("receipt", re.IGNORECASE)).first).to_be_visible()
    expect(main.get_by_text(re.compile("drift", re.IGNORECASE)).first).to_be_visible()
    expect(main.get_by_text(re.compile("abab")).first).to_be_visible()


def test_it_is_copied_as_request_python_and_command(contexts, world, counted):
    context, _ = contexts(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{world.url}/#/rollouts/{counted}")
    expect(page.get_by_text("I count first.").first).to_be_visible()
    read = "() => navigator.clipboard.readText()"

    def copied(name):
        opener = page.get_by_role("button", name=re.compile("^copy( as.*)?$", re.IGNORECASE))
        wanted = page.get_by_role("button", name=name).or_(page.get_by_role("menuitem", name=name))
        if not wanted.first.is_visible():
            opener.first.click()
        wanted.first.click()
        return page.evaluate(read)

    assert "rollout show" in copied(re.compile("rollout show|command|shell", re.IGNORECASE))
    assert '"handler"' in copied(re.compile("request", re.IGNORECASE))
    assert "Client(" in copied(re.compile("python", re.IGNORECASE))


def test_a_part_of_the_view_has_an_address_of_its_own(open_view, world, counted):
    page = open_view(f"rollouts/{counted}")
    expect(page.get_by_text("I count first.").first).to_be_visible()
    tab(page, "timeline")
    address = page.url
    assert address != f"{world.url}/#/rollouts/{counted}"
    again = page.context.new_page()
    again.goto(address)
    expect(again.get_by_role("tab", name=re.compile("timeline", re.IGNORECASE))).to_have_attribute(
        "aria-selected", "true"
    )


def test_texts_of_tokens_are_those_of_the_tokenizer(world, counted):
    trajectory = world.client.get(counted).trajectory
    digest = trajectory.tokenizer.rpartition("@")[2]
    answer = http.get(f"{world.url}/v1/tokenizers/{digest}")
    answer.raise_for_status()
    texts = answer.json()["texts"]
    turn = next(s for s in trajectory.chains[0].segments if s.sampled)
    assert "".join(str(texts[i]) for i in turn.token_ids).startswith("I count first.")
    assert "immutable" in answer.headers["Cache-Control"]
