"""For everybody: by keyboard, on a phone, in the dark, and with a screen reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PHONE, findings

if TYPE_CHECKING:
    from playwright.sync_api import Page

VIEWS = {
    "overview": r"\binit\b",
    "rollouts": "mend-calc.0",
    "rollouts/mend-calc.0": "twice",
    "rollouts/branched": "Mend the program",
    "rollouts/broken": "broken on purpose",
    "groups/mend-calc": "they part in",
    "batches": "draws",
    "batches/draws": "kept",
    "training": "reward",
    "errors": "broken on purpose",
}


def shown(page, route):
    """The view with what it is there for."""
    expect(
        page.get_by_role("main").get_by_text(re.compile(VIEWS[route], re.IGNORECASE)).first
    ).to_be_visible()


def walk(open_view, **options) -> Iterator[tuple[str, Page]]:
    """Each view and each of its tabs, in one page: to open another takes two seconds of a processor."""
    page = open_view("overview", **options)
    for route in VIEWS:
        page.goto(f"{page.url.split('#')[0]}#/{route}")
        shown(page, route)
        yield route, page
        for tab in page.get_by_role("tab").all()[1:] if route.startswith("rollouts/") else ():
            tab.click()
            page.wait_for_timeout(100)
            yield f"{route}, {tab.inner_text()}", page


def test_axe_finds_nothing_serious_in_the_light_and_in_the_dark(open_view):
    found = []
    for where, page in walk(open_view, color_scheme="light", reduced_motion="reduce"):
        here = findings(page)
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        # The rest is as in the light.
        here += findings(page, "color-contrast")
        page.emulate_media(color_scheme="light", reduced_motion="reduce")
        found += [f"{where}: {finding}" for finding in dict.fromkeys(here)]
    assert not found, "\n".join(found)


def test_axe_finds_nothing_serious_where_one_signs_in(contexts, world):
    context, _ = contexts(key=None)
    page = context.new_page()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{world.url}/#/login")
        expect(page.get_by_label("key", exact=False).first).to_be_visible()
        assert not findings(page), scheme


def test_a_phone_needs_no_sideways_scroll_of_the_page(open_view):
    for where, page in walk(open_view, viewport=PHONE, is_mobile=True, has_touch=True):
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{width} pixels at {where}"


def background(page) -> int:
    """How light it is, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) // 3


def test_it_is_dark_where_the_reader_likes_it_dark_and_by_a_switch_that_is_remembered(open_view):
    page = open_view("overview", color_scheme="light")
    assert background(page) > 200
    page.emulate_media(color_scheme="dark")
    page.reload()
    assert background(page) < 60
    switch = page.get_by_role("button", name=re.compile("light|dark|theme", re.IGNORECASE)).first
    for _ in range(3):  # it may have a third place: as the system has it
        switch.click()
        page.wait_for_timeout(50)
        if background(page) > 200:
            break
    assert background(page) > 200
    page.reload()
    shown(page, "overview")
    assert background(page) > 200


@pytest.mark.parametrize(
    ("keys", "route"),
    [("gr", "rollouts"), ("gb", "batches"), ("gt", "training"), ("ge", "errors"), ("go", "overview")],
)
def test_two_keys_lead_to_each_view(open_view, keys, route):
    page = open_view("overview" if route != "overview" else "errors")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    for key in keys:
        page.keyboard.press(key)
    expect(page).to_have_url(re.compile(f"#/{route}"))


def test_rows_are_walked_and_opened_by_keys(open_view):
    page = open_view("rollouts?group_id=mend-calc")
    expect(page.get_by_role("row").nth(4)).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"#/rollouts/mend-calc\.\d"))


def test_search_help_and_their_end_are_keys(open_view):
    page = open_view("overview")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("mend-calc.1")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"mend-calc\.1"))


def test_everything_that_can_be_done_is_reached_by_tab_and_its_focus_is_seen(open_view):
    page = open_view("rollouts/mend-calc.0")
    shown(page, "rollouts/mend-calc.0")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        where = page.evaluate(
            """() => { const one = document.activeElement; const style = getComputedStyle(one);
              return [one.tagName + (one.id || one.textContent || "").slice(0, 30),
                style.outlineStyle !== "none" || style.boxShadow !== "none"]; }"""
        )
        if where[0].startswith("BODY"):
            break
        assert where[1], f"no focus is seen on {where[0]}"
        seen.add(where[0])
    assert len(seen) > 8
    assert any(one.startswith("BUTTONtab-") for one in seen)


def test_a_state_is_told_without_colour(open_view):
    page = open_view("rollouts")
    for name, state in (("mend-calc.0", "completed"), ("broken", "failed")):
        mark = page.get_by_role("row").filter(has_text=name).first
        expect(mark).to_contain_text(state)
        assert mark.locator("svg").count(), "a shape beside the word"
