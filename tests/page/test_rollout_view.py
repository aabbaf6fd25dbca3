"""One rollout: what was said, token by token, when, in which attempt and branch, and what it was worth."""

from __future__ import annotations

import json
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
        "mend calc.py, in which twice(2) is 5.",
        "I count first.",
        "I write.",
    ):
        expect(said(page, words).first).to_be_visible()
    expect(said(page, "execute_bash").first).to_be_visible()
    expect(said(page, "sed -i 's/ + 1//' calc.py && cat calc.py").first).to_be_visible()
    expect(said(page, re.compile(r"\b49\n50\b")).first).to_be_visible()


def test_colours_of_a_terminal_are_colours_and_no_codes(open_view, coloured):
    page = open_view(f"rollouts/{coloured}")
    output = page.get_by_role("group", name="output").filter(has_text="and plain ones").first
    words = output.get_by_text("red words", exact=True)
    expect(words).to_be_visible()
    colour = "one => getComputedStyle(one).color"
    assert words.evaluate(colour) != output.evaluate(colour)
    assert "\x1b" not in output.inner_text() and "[31m" not in output.inner_text()


def test_the_rewards_parts_and_what_it_left_are_shown(open_view, counted, world):
    item = world.client.get(counted)
    page = open_view(f"rollouts/{counted}")
    main = page.get_by_role("main")
    expect(main.get_by_text("completed").first).to_be_visible()
    tab(page, "reward")
    for name in (*item.reward_components, "patch.diff"):
        expect(main.get_by_text(name, exact=True).first).to_be_visible()
    for words in ("return x + x + 1", "return x + x"):
        expect(main.get_by_text(words).first).to_be_visible()


def fact(page, name):
    """What is said of the token that one looks at."""
    return page.locator("dl").get_by_text(name, exact=True).locator("xpath=following-sibling::dd")


def test_a_token_tells_its_id_text_logprob_mask_and_version(open_view, counted, world):
    (chain,) = world.client.get(counted).trajectory.chains
    page = open_view(f"rollouts/{counted}")
    tab(page, "token")
    strip = page.get_by_label(re.compile("^Tokens of chain 0"))
    strip.focus()
    page.keyboard.press("ArrowRight")
    expect(fact(page, "mask")).to_contain_text("0")
    expect(fact(page, "log-prob")).to_have_text("–")
    for _ in chain.segments:
        page.keyboard.press("]")
        if fact(page, "mask").inner_text().startswith("1"):
            break
    at = int(fact(page, "position").inner_text().split(",")[0].replace("\u202f", ""))
    prompt = len(chain.prompt_ids)
    assert at == prompt, "the first that was sampled"
    expect(fact(page, "id")).to_have_text(str(chain.token_ids[at]))
    expect(fact(page, "text")).to_have_text('"I"')
    expect(fact(page, "version")).to_contain_text("v1")
    shown = float(fact(page, "log-prob").inner_text().replace("−", "-"))
    assert shown == pytest.approx(chain.logprobs[0], abs=1e-3)
    page.keyboard.press("ArrowRight")
    expect(fact(page, "id")).to_have_text(str(chain.token_ids[at + 1]))


def test_the_token_under_the_pointer_is_told(open_view, counted):
    page = open_view(f"rollouts/{counted}")
    tab(page, "token")
    strip = page.get_by_label(re.compile("^Tokens of chain 0"))
    expect(strip).to_be_visible()
    box = strip.bounding_box()
    page.mouse.move(box["x"] + 130, box["y"] + 12)
    expect(fact(page, "id")).to_be_visible()
    expect(fact(page, "mask")).to_contain_text("given")


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
    for words in ("waiting", "INIT", "RUN", "EVAL", "model", "tools"):
        expect(main.get_by_text(words, exact=True).first).to_be_visible()
    main.get_by_text("As a table", exact=False).click()
    table = main.get_by_role("table").last
    expect(table.get_by_text("execute_bash").first).to_be_visible()


def test_attempts_tell_fence_worker_and_why_each_ended(open_view, world):
    page = open_view("rollouts/broken")
    main = page.get_by_role("main")
    expect(main.get_by_text("broken on purpose in init", exact=False).first).to_be_visible()
    tab(page, "attempt")
    expect(main.get_by_text(re.compile("fence", re.IGNORECASE)).first).to_be_visible()
    expect(main.get_by_text(re.compile("all@testnode")).first).to_be_visible()
    expect(
        main.get_by_text(re.compile("Ended: failed.*handler|handler.*ValueError", re.DOTALL)).first
    ).to_be_visible()


def test_branches_of_a_session_are_a_tree_with_what_each_was_for(open_view):
    page = open_view("rollouts/branched")
    tab(page, "branch")
    main = page.get_by_role("main")
    for words in ("sub agent", "compaction", "discarded"):
        expect(main.get_by_text(words).locator("visible=true").first).to_be_visible()
    expect(main.get_by_text("left chain 0 after 17 tokens")).to_be_visible()


def test_chains_of_other_policies_say_whose_they_are_and_count_for_no_turns_of_the_agents(open_view):
    page = open_view("rollouts/judged")
    main = page.get_by_role("main")
    expect(said(page, "Turn 0.").first).to_be_visible()
    page.get_by_label("Chain").select_option("0")
    expect(said(page, "I judge it so.").first).to_be_visible()
    assert "0: judge of strict" in page.get_by_label("Chain").inner_text()
    tab(page, "branch")
    for words in ("judge (strict)", "opponent (rival)"):
        expect(main.get_by_text(words).first).to_be_visible()
    assert main.get_by_text("not trained").count() == 1, "the judge; the request has the rival trained"


def test_a_fork_says_which_rollout_it_left_and_what_it_shares(open_view, world):
    branch = world.client.get("forked").trajectory.branch
    page = open_view("rollouts/forked")
    main = page.get_by_role("main")
    expect(main.get_by_text(f"at turn 1, {branch.tokens} tokens shared")).to_be_visible()
    messages = main.get_by_role("article")
    expect(messages.nth(1)).to_have_class(re.compile("msg-shared"))
    expect(messages.nth(1)).to_contain_text(re.compile("tokens, shared"))
    expect(messages.nth(3)).to_contain_text(re.compile("turn 2"))
    expect(messages.nth(3)).not_to_have_class(re.compile("msg-shared"))
    messages.nth(1).get_by_role("button", name="Show these tokens").click()
    strip = page.get_by_label(re.compile("^Tokens of chain 0"))
    strip.focus()
    page.keyboard.press("ArrowRight")
    expect(fact(page, "mask")).to_have_text("0, shared")
    tab(page, "request")
    expect(main.get_by_text("ForkRequest(").first).to_be_visible()
    main.get_by_role("link", name="branched", exact=True).click()
    expect(said(page, "I never was used.").first).to_be_visible()
    assert page.url.endswith("#/rollouts/branched")


def test_the_receipt_and_warnings_are_shown(open_view):
    page = open_view("rollouts/branched")
    main = page.get_by_role("main")
    tab(page, "receipt")
    expect(main.get_by_text("No drift", exact=False)).to_be_visible()
    expect(main.get_by_text("ab" * 32).first).to_be_visible()
    tab(page, "reward")
    expect(main.get_by_text("two policy versions sampled this rollout").first).to_be_visible()


def test_it_is_copied_as_request_python_and_command(contexts, world, counted):
    context, _ = contexts(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{world.url}/#/rollouts/{counted}")
    page.get_by_text("Copy as").click()

    def copied(name: str) -> str:
        page.get_by_role("button", name=name).first.click()
        expect(page.get_by_role("button", name="Copied").first).to_be_visible()
        return page.evaluate("() => navigator.clipboard.readText()")

    assert copied("Command") == f"rollout show {counted}"
    assert json.loads(copied("Request"))["handler"] == "mend"
    compile(python := copied("Python"), "copied", "exec")
    assert "RolloutRequest(" in python and world.url in python


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
