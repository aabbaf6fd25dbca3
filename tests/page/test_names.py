"""Names and texts that somebody chose to harm the page: it goes on, and soon."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from rollout.batch import BatchRequest
from rollout.schema import RolloutRequest
from tests.helpers.keys import http

SOON_MS = 1500
NAMES = ("constructor", "toString", "valueOf")
"""What every object of JavaScript has, too."""


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("terminal", r"m.settled('\r'.repeat(500_000) + 'x')"),
        ("terminal", r"m.settled('\r'.repeat(500_000) + 'x\n')"),
        ("terminal", r"m.settled('\x1b['.repeat(250_000))"),
        ("terminal", r"m.settled('x\b'.repeat(250_000))"),
        ("outcome", "m.shownJson(`[${('['.repeat(3000) + ']'.repeat(3000) + ',').repeat(200)}1]`)"),
        ("words", r"m.visible('\u202e'.repeat(500_000))"),
    ],
)
def test_a_text_made_to_be_slow_is_read_soon(open_view, module, call):
    page = open_view("rollouts")
    # Again where the machine may have been busy with something else.
    script = f"""async () => {{ const m = await import("/page/views/{module}.js");
        let took = Infinity;
        for (let n = 0; n < 3 && took >= {SOON_MS}; n++) {{
          const began = performance.now(); {call}; took = performance.now() - began;
        }}
        return took; }}"""
    assert page.evaluate(script) < SOON_MS


def test_ids_of_a_stream_fit_into_an_address(open_view, world):
    page = open_view("rollouts")
    ids = [f"019f0000-0000-7000-8000-{number:012d}.{number}" for number in range(300)]
    script = "async (ids) => (await import('/page/api.js')).idsOf(ids)"
    few, many = (page.evaluate(script, some) for some in (ids[:3], ids))
    assert few == ",".join(ids[:3]) and 50 < len(many.split(",")) < 200
    with http.stream("GET", f"{world.url}/v1/live", params={"ids": many}) as answer:
        assert answer.status_code == 200


def test_runs_and_metrics_may_be_called_like_what_every_object_has(open_view, world):
    for run in NAMES:
        world.client.report(0, {"reward": 0.5}, run=run)
        world.client.report(1, dict.fromkeys(NAMES, 0.25) | {"__proto__": 1.0}, run=run)
    page = open_view(f"training?runs={','.join(NAMES)}")
    for name in NAMES:
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
    page.get_by_role("tab", name="Table").click()
    expect(page.get_by_role("table").first).to_be_visible()
    expect(page.get_by_text("This view failed")).to_have_count(0)


def test_a_batch_and_a_view_may_be_called_so_too(open_view, world):
    prompts = [RolloutRequest(handler="lottery", task={"rewards": [1.0], "number": 0})]
    world.client.batches.create(BatchRequest(id="constructor", prompts=prompts, n=1, groups=1))
    page = open_view("batches")
    expect(page.get_by_role("link", name="constructor")).to_be_visible()
    expect(page.get_by_text("This view failed")).to_have_count(0)
    for name in ("constructor", "__proto__", "toString/x"):
        page.goto(f"{world.url}/#/{name}")
        expect(page.get_by_role("heading", name="No such view")).to_be_visible()


def test_a_name_that_runs_the_other_way_turns_nothing_beside_it(open_view):
    page = open_view("rollouts/hostile")
    inline = "main :is(a, b, code, span)"
    expect(page.locator(inline).first).to_be_visible()
    # In one call, for what is drawn anew between two has no style.
    styles = page.evaluate(f"""() => [...document.querySelectorAll("{inline}")].map(
        (one) => getComputedStyle(one).unicodeBidi)""")
    assert styles and set(styles) <= {"isolate", "isolate-override", "plaintext"}
