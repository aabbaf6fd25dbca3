"""A rollout or a group as one HTML file, which opens without a server, a request or an error."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest
from playwright.sync_api import expect

from tests.helpers.browser import WIDE, Witness, findings
from tests.helpers.keys import KEY, http
from tests.helpers.stack import ROOT


@pytest.fixture(scope="module")
def offline(browser):
    """A context without a network, and its witness."""
    context = browser.new_context(viewport=WIDE)
    context.set_offline(True)
    yield context, Witness(context, "file://")
    context.close()


@pytest.fixture
def opened(offline, tmp_path):
    """Opens a file as a person does who has got it by mail; nothing but the file is asked for."""
    context, witness = offline

    def opened(text: str):
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        page = context.new_page()
        page.goto(path.as_uri())
        return page

    yield opened
    for page in context.pages:
        page.close()
    try:
        witness.require_clean()
        assert [url for url in witness.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    finally:
        witness.forget()


def exported(world, path: str) -> str:
    answer = http.get(f"{world.url}{path}")
    answer.raise_for_status()
    assert answer.headers["content-type"].startswith("text/html")
    return answer.text


def test_a_rollout_opens_from_a_file_with_all_of_its_parts(opened, world):
    counted = next(item.id for item in world.group if "I write." in str(item.trajectory.messages))
    page = opened(exported(world, f"/v1/rollouts/{counted}/page"))
    main = page.get_by_role("main")
    for words in ("I count first.", "I write.", "completed"):
        expect(main.get_by_text(words).first).to_be_visible()
    for tab in page.get_by_role("tab").all():
        tab.click()
        page.wait_for_timeout(100)
        expect(main.get_by_role("alert")).to_have_count(0)
    page.get_by_role("tab", name=re.compile("token", re.IGNORECASE)).first.click()
    expect(main.get_by_text("v1", exact=True).first).to_be_visible()
    assert page.get_by_role("button", name="Sign out").count() == 0
    assert not findings(page)


def test_a_group_opens_from_a_file_and_leads_to_its_members(opened, world):
    page = opened(exported(world, "/v1/groups/mend-calc/page"))
    main = page.get_by_role("main")
    for box in main.get_by_role("checkbox").all():
        box.check()
    expect(main.get_by_text("I give up at once.").first).to_be_visible()
    page.get_by_role("link", name="#0").first.click()
    expect(page.get_by_role("tab").first).to_be_visible()
    expect(page.get_by_role("main").get_by_role("alert")).to_have_count(0)


def test_hostile_output_harms_no_file_either(opened, world):
    text = exported(world, "/v1/rollouts/hostile/page")
    page = opened(text)
    expect(page.get_by_role("main").get_by_text("after the hostile lines").first).to_be_visible()
    assert page.evaluate("window.harmed") is None
    assert page.locator("main img, main script").count() == 0


def test_a_file_holds_no_key_and_no_address_of_another_host(world):
    text = exported(world, "/v1/rollouts/mend-calc.0/page")
    assert KEY not in text and "rlt_" not in text.replace("rlt_…", "")
    assert world.url not in text


def test_the_button_and_the_command_give_the_same_file(open_view, world, tmp_path):
    page = open_view("rollouts/mend-calc.0")
    expect(page.get_by_role("tab").first).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save page").click()
    by_button = download.value.path().read_text()
    target = tmp_path / "by_command.html"
    argv = [
        sys.executable,
        "-m",
        "rollout.cli",
        "export",
        "mend-calc.0",
        "--url",
        world.url,
        "-o",
        str(target),
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    embedded = re.compile(r'id="embedded">')
    assert embedded.search(by_button) and embedded.search(target.read_text())
    assert abs(len(by_button) - len(target.read_text())) < 2000


def test_an_export_needs_a_key(world):
    assert httpx.get(f"{world.url}/v1/rollouts/mend-calc.0/page").status_code == 401
