"""Output that would like to be more than text is text; and what is very long opens and scrolls."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import expect

from tests.helpers import page_records
from tests.helpers.page_world import PageWorld
from tests.helpers.stack import wait_until

SCREENSHOT_S = 10.0
"""A page that draws is not stuck."""
FLOOD = "head -c 10000000 /dev/zero | tr '\\0' W; echo; echo after the flood; sleep 30"
SAYS = r"""printf '<b id=harm>bold</b><script>window.harmed=1</script>\n'; printf '\033[2J\033[31mred\n'
printf '\342\200\256txet desrever\342\200\254 \000nul\n'; printf 'after all of it\n'; sleep 30"""


def harmless(page) -> None:
    """Nothing of it ran, was loaded, or became a part of the page."""
    assert page.evaluate("window.harmed") is None
    assert page.locator("#harm, main img, main script, main iframe, main a[href*=evil]").count() == 0
    assert page.evaluate("document.dir || 'ltr'") == "ltr"


def test_hostile_output_of_a_record_is_shown_as_text_and_harms_nothing(open_view):
    page = open_view("rollouts/hostile")
    main = page.get_by_role("main")
    expect(main.get_by_text("after the hostile lines").first).to_be_visible()
    expect(main.get_by_text(page_records.HTML).first).to_be_visible()
    expect(main.get_by_text("red", exact=True).first).to_be_visible()
    harmless(page)
    for name in page.get_by_role("tab").all():
        name.click()
        page.wait_for_timeout(200)
        harmless(page)


def test_text_that_runs_the_other_way_stays_within_its_own_lines(open_view):
    page = open_view("rollouts/hostile")
    words = page.get_by_role("main").get_by_text("after the hostile lines").last
    expect(words).to_be_visible()
    styles = words.evaluate(
        """(one) => { const out = []; for (let at = one; at && at.tagName !== "MAIN"; at = at.parentElement)
          out.push(getComputedStyle(at).unicodeBidi); return out; }"""
    )
    assert {"isolate", "isolate-override", "plaintext"} & set(styles), styles


def test_ten_megabytes_in_one_line_are_cut_for_display_and_the_page_stays_quick(open_view):
    page = open_view("rollouts/hostile")
    expect(page.get_by_role("main").get_by_text(re.compile("W{50}")).first).to_be_visible()
    began = time.monotonic()
    page.screenshot(timeout=SCREENSHOT_S * 1000)
    page.mouse.wheel(0, 2000)
    assert page.evaluate("document.querySelector('main').textContent.length") < 3_000_000
    assert time.monotonic() - began < SCREENSHOT_S
    expect(page.get_by_text(re.compile("show (more|all)", re.IGNORECASE)).first).to_be_attached()


@pytest.mark.parametrize(("command", "last"), [(SAYS, "after all of it"), (FLOOD, "after the flood")])
def test_hostile_output_as_it_is_printed_is_text_too(open_view, world: PageWorld, command, last):
    rollout_id = world.running(command)
    try:
        page = open_view(f"rollouts/{rollout_id}")
        expect(page.get_by_role("main").get_by_text(last).first).to_be_visible()
        harmless(page)
        began = time.monotonic()
        page.screenshot(timeout=SCREENSHOT_S * 1000)
        assert time.monotonic() - began < SCREENSHOT_S
    finally:
        world.client.cancel(rollout_id)
        wait_until(lambda: world.client.get(rollout_id, include="summary").state.terminal, 60, "its end")


def scrolled_to(page, words: str, most: int = 400) -> bool:
    """Whether wheel and eye get to it."""
    page.mouse.move(640, 500)
    for _ in range(most):
        found = page.get_by_role("main").get_by_text(words, exact=False)
        if found.count() and found.last.is_visible():
            return True
        page.mouse.wheel(0, 3000)
        page.wait_for_timeout(30)
    return False


def test_two_hundred_turns_with_128k_tokens_open_and_scroll_to_the_end(open_view):
    page = open_view("rollouts/long")
    expect(page.get_by_role("main").get_by_text("output of turn 0").first).to_be_visible()
    nodes = "document.querySelectorAll('*').length"
    assert page.evaluate(nodes) < 20_000
    assert scrolled_to(page, "output of turn 199")
    assert page.evaluate(nodes) < 20_000, "what is out of sight is not kept"


def test_128k_tokens_are_a_strip_that_scrolls_to_the_last(open_view):
    page = open_view("rollouts/long?tab=tokens")
    strip = page.get_by_label(re.compile("^Tokens of chain 0: 128"))
    expect(strip).to_be_visible()
    assert page.evaluate("document.querySelectorAll('*').length") < 20_000
    box = strip.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    for _ in range(20):
        page.mouse.wheel(0, 50_000)
    strip.focus()
    page.keyboard.press("Control+End")
    expect(page.get_by_text("128,016", exact=False).first).to_be_visible()
    drawn = """(one) => one.getContext("2d").getImageData(0, 0, one.width, one.height).data.some(Boolean)"""
    assert strip.locator("canvas").evaluate(drawn), "its end is drawn"
    page.screenshot(timeout=SCREENSHOT_S * 1000)
