"""Each view with real rollouts: what is seen, its filters and links, and what it says where nothing is."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from rollout.schema import RolloutRequest
from tests.helpers.page_world import RUN


def link(page, name):
    return page.get_by_role("main").get_by_role("link", name=name)


def test_the_overview_shows_stages_backends_nodes_and_what_has_failed(open_view, world):
    page = open_view("overview")
    main = page.get_by_role("main")
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    for words in ("init", "run", "eval", "testnode", "queued"):
        expect(main.get_by_text(re.compile(rf"\b{words}\b", re.IGNORECASE)).first).to_be_visible()
    backend = world.client.backends()[0]
    expect(main.get_by_text(backend.id).first).to_be_visible()
    expect(main.get_by_text("v1", exact=True).first).to_be_visible()
    expect(main.get_by_text("handler", exact=False).first).to_be_visible(), "the blame of what failed"
    expect(page.get_by_text("live", exact=True).first).to_be_visible()


def test_rollouts_are_listed_with_state_reward_and_handler(open_view):
    page = open_view("rollouts")
    for words in ("mend-calc.0", "broken", "branched"):
        expect(link(page, words).first).to_be_visible()
    row = page.get_by_role("row").filter(has_text="mend-calc.0")
    expect(row).to_contain_text("completed")
    expect(row).to_contain_text("mend")
    expect(page.get_by_role("row").filter(has_text="broken")).to_contain_text("failed")


@pytest.mark.parametrize(
    ("query", "there", "gone"),
    [
        ("state=failed", "broken", "mend-calc.0"),
        ("handler=mend", "mend-calc.0", "broken"),
        ("tag=step:1", "mend-calc.1", "branched"),
        ("group_id=mend-calc", "mend-calc.2", "long"),
        ("policy_version=v2", "branched", "mend-calc.0"),
        ("blame=handler", "broken", "mend-calc.0"),
        ("drop=true", "broken", "mend-calc.0"),
        ("reward_min=0.4&reward_max=0.6", "mend-calc.1", "mend-calc.2"),
    ],
)
def test_a_filter_in_the_address_holds_and_is_shown(open_view, query, there, gone):
    page = open_view(f"rollouts?{query}")
    expect(link(page, there).first).to_be_visible()
    expect(link(page, gone)).to_have_count(0)
    value = query.partition("=")[2].partition("&")[0]
    fields = page.locator("select, input").evaluate_all("all => all.map((one) => one.value)")
    assert value in fields or page.get_by_role("main").get_by_text(value).count(), (
        "what is filtered by is seen"
    )


def test_a_filter_that_is_chosen_goes_into_the_address(open_view):
    page = open_view("rollouts")
    expect(link(page, "mend-calc.0").first).to_be_visible()
    page.get_by_role("main").get_by_role("button", name="failed").click()
    expect(link(page, "mend-calc.0")).to_have_count(0)
    expect(link(page, "broken").first).to_be_visible()
    assert "state=failed" in page.url
    page.go_back()
    expect(link(page, "mend-calc.0").first).to_be_visible()


def test_a_list_longer_than_a_page_goes_on_by_its_cursor(open_view, world):
    many = RolloutRequest(id="many", handler="chatty", n=120, tags=["many", "page"])
    world.client.run([many], include="summary")
    page = open_view("rollouts?tag=many")
    expect(link(page, re.compile(r"many\.\d")).first).to_be_visible()
    seen: set[str] = set()
    while True:
        names = link(page, re.compile(r"many\.\d+")).evaluate_all("all => all.map((one) => one.textContent)")
        assert names and not seen & set(names), "each is shown once"
        seen |= set(names)
        further = page.get_by_role("link", name=re.compile("^Next"))
        if not further.count():
            break
        further.click()
        expect(page.get_by_text(names[0], exact=True)).to_have_count(0)
        expect(page.get_by_role("region", name="Rollouts")).to_have_attribute("aria-busy", "false")
    assert len(seen) == 120, "two whole pages and a rest"


def test_a_group_shows_siblings_side_by_side_and_where_they_first_differ(open_view):
    page = open_view("groups/mend-calc")
    main = page.get_by_role("main")
    for number in range(4):
        row = main.get_by_role("row").filter(has=page.get_by_role("link", name=f"#{number}"))
        expect(row).to_contain_text(("1", "0.5", "0", "1")[number])
        if not (box := row.get_by_role("checkbox")).is_checked():
            box.check()
    for words in ("I look around.", "I count first.", "I give up at once."):
        expect(main.get_by_text(words).first).to_be_visible()
    expect(main.get_by_text("Where they first differ")).to_be_visible()
    expect(main.get_by_text(re.compile(r"they part in turn 1"))).to_be_visible()


def test_a_batch_is_a_funnel_from_submitted_to_kept_with_reasons(open_view):
    page = open_view("batches")
    link(page, "draws").first.click()
    expect(page).to_have_url(re.compile(r"#/batches/draws"))
    main = page.get_by_role("main")
    for words in ("kept", "filtered", "uniform_reward", "done"):
        expect(main.get_by_text(re.compile(words.replace("_", "[_ ]"), re.IGNORECASE)).first).to_be_visible()


def test_what_a_trainer_reports_is_drawn_by_run_and_metric(open_view, world):
    page = open_view("training")
    main = page.get_by_role("main")
    run = main.get_by_role("button", name=re.compile(f"^{RUN}"))
    expect(run).to_be_visible()
    if run.get_attribute("aria-pressed") == "false":  # another test's run is newer
        run.click()
    for metric in ("reward", "gap", "staleness"):
        expect(main.get_by_text(metric, exact=True).first).to_be_visible()
    expect(main.locator("canvas, svg").first).to_be_visible()


def test_errors_are_counted_by_reason_with_examples_that_lead_to_the_rollout(open_view):
    page = open_view("errors")
    main = page.get_by_role("main")
    expect(main.get_by_text("broken on purpose in init", exact=False).first).to_be_visible()
    link(page, "broken").first.click()
    expect(page).to_have_url(re.compile("#/rollouts/broken"))


@pytest.mark.parametrize(
    "route",
    [
        "rollouts/no-such-one",
        "groups/no-such-group",
        "batches/no-such-batch",
        "nonsense",
        "rollouts?state=nonsense",
    ],
)
def test_what_is_not_there_is_said_so_and_the_way_on_is_shown(open_view, route):
    page = open_view(route, accept="40[04]")
    said = re.compile(
        "not there|no such|not known|not found|nothing|no rollout|unknown|not fit|400", re.IGNORECASE
    )
    expect(page.get_by_role("main").get_by_text(said).first).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("rollouts", re.IGNORECASE)).first).to_be_visible()


def test_a_list_without_a_match_says_what_to_do(open_view):
    page = open_view("rollouts?tag=nobodys")
    expect(
        page.get_by_role("main").get_by_text(re.compile("no rollout|nothing|none", re.IGNORECASE)).first
    ).to_be_visible()
