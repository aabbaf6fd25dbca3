"""What runs is seen as it runs: tool output as it is printed, states, the fleet; and it can be cancelled."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from rollout.schema import State
from tests.helpers.page_policy import bash, use
from tests.helpers.page_world import PageWorld
from tests.helpers.stack import wait_until


@pytest.fixture
def running(world: PageWorld) -> Iterator[str]:
    """A rollout whose command prints a line every tenth of a second."""
    rollout_id = world.running()
    yield rollout_id
    world.client.cancel(rollout_id)


def ticks(page) -> int:
    found = re.findall(r"tick (\d+)", page.get_by_role("main").inner_text())
    return max(map(int, found), default=0)


def wait_for_tick(page, least: int, seconds: float = 30.0) -> int:
    until = time.monotonic() + seconds
    while (seen := ticks(page)) < least and time.monotonic() < until:
        page.wait_for_timeout(50)
    assert seen >= least
    return seen


def test_tool_output_comes_as_it_is_printed(open_view, running):
    page = open_view(f"rollouts/{running}")
    seen = wait_for_tick(page, 1)
    assert wait_for_tick(page, seen + 10) < 400, "the command has not ended"
    expect(page.get_by_role("main").get_by_text("running").first).to_be_visible()


def test_a_rollout_that_ends_is_shown_with_its_reward_without_a_reload(open_view, world):
    rollout_id = world.running("until [ -e end ]; do sleep 0.1; done; echo the last words")
    page = open_view(f"rollouts/{rollout_id}")
    main = page.get_by_role("main")
    expect(main.get_by_text("running").first).to_be_visible()
    world.write(rollout_id, "end")
    expect(main.get_by_text("completed").first).to_be_visible()
    page.get_by_role("tab", name="Reward").click()
    expect(main.get_by_text("cwd_kept").first).to_be_visible()


def test_turns_of_a_conversation_come_one_by_one(open_view, world):
    actions = [bash("sleep 5; echo first", "I do one thing."), bash("sleep 5; echo second", "Then another.")]
    request = world.request("slow", [*actions, use("finish", "All done.", message="ok")], tags=["page"])
    (new,) = world.client.submit([request])
    page = open_view(f"rollouts/{new.id}")
    main = page.get_by_role("main")
    expect(main.get_by_text("I do one thing.").first).to_be_visible()
    expect(main.get_by_text("All done.")).to_have_count(0)
    for words in ("Then another.", "All done."):
        expect(main.get_by_text(words).first).to_be_visible()
    expect(main.get_by_text("completed").first).to_be_visible()


def test_a_row_of_the_list_moves_by_itself(open_view, world):
    rollout_id = world.running(tags=["page", "moves"])
    page = open_view("rollouts?tag=moves")
    row = page.get_by_role("row").filter(has_text=re.compile(rollout_id[-8:]))
    expect(row).to_contain_text("running")
    world.client.cancel(rollout_id)
    expect(row).to_contain_text("cancelled")


def test_the_overview_counts_what_runs(open_view, world, running):
    page = open_view("overview")
    main = page.get_by_role("main")
    expect(main.get_by_text("all@testnode").or_(main.get_by_text("testnode")).first).to_be_visible()
    page.wait_for_timeout(2000)
    asked = "performance.getEntriesByType('resource').map((one) => one.name)"
    before = len(page.evaluate(asked))
    page.wait_for_timeout(3000)
    after = page.evaluate(asked)
    assert len(after) <= before + 1, f"it comes by the one stream, not by asking again: {after[before:]}"


def test_cancel_asks_first_and_then_cancels(open_view, world, running):
    page = open_view(f"rollouts/{running}")
    wait_for_tick(page, 1)
    page.get_by_role("button", name="Cancel", exact=False).first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert world.client.get(running, include="summary").state is State.RUNNING
    page.get_by_role("button", name="Cancel", exact=False).first.click()
    dialog.get_by_role("button", name=re.compile("cancel", re.IGNORECASE)).last.click()
    expect(page.get_by_role("main").get_by_text("cancelled").first).to_be_visible()
    wait_until(
        lambda: world.client.get(running, include="summary").state is State.CANCELLED, 60, "the cancel"
    )
    expect(page.get_by_role("button", name="Cancel", exact=False)).to_have_count(0)


def test_a_stream_that_is_cut_is_told_and_comes_back(contexts, world):
    context, witness = contexts()
    witness.accept("ERR_FAILED")
    page = context.new_page()
    context.route("**/v1/live*", lambda route: route.abort())
    page.goto(f"{world.url}/#/overview")
    expect(page.get_by_text("reconnecting").first).to_be_visible()
    context.unroute("**/v1/live*")
    expect(page.get_by_text("live", exact=True).first).to_be_visible()


def test_a_report_of_a_trainer_is_drawn_as_it_comes(open_view, world):
    page = open_view("training")
    expect(page.get_by_role("main").get_by_text("reward", exact=True).first).to_be_visible()
    world.client.report(1, {"late": 0.5}, run="run-7")
    expect(page.get_by_role("main").get_by_text("late", exact=True).first).to_be_visible()
