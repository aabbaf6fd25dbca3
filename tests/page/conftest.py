"""One service and one chromium for all tests of the page, and a page that is not forgiven an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.browser import PATIENCE_MS, WIDE, Witness, browser_missing, chromium, sign_in
from tests.helpers.keys import KEY
from tests.helpers.page_world import PageWorld, page_world
from tests.helpers.sandboxes import leftovers
from tests.helpers.stack import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

EXPECTED_MS = 10_000.0
"""For what is to be seen, also beside other tests."""


# Of this package: while Playwright drives, its loop runs in this thread, where other tests run their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if reason := browser_missing():
        pytest.skip(reason)
    from playwright.sync_api import expect

    expect.set_options(timeout=EXPECTED_MS)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def service(tmp_path_factory, browser) -> Iterator[PageWorld]:
    with page_world(tmp_path_factory.mktemp("page")) as world:
        yield world
        world.client.cancel_many(tag="page")
        wait_until(lambda: leftovers(world.stack.sandbox_dir) == [], 120, "all sandboxes to be gone")


@pytest.fixture
def world(service) -> PageWorld:
    return service


@pytest.fixture(scope="package")
def signed_in(browser, service) -> Callable[[str], Any]:
    """What a browser keeps of a person who has signed in with a key, which is done once for each."""
    kept: dict[str, Any] = {}

    def state(key: str) -> Any:
        if key not in kept:
            context = browser.new_context(viewport=WIDE)
            context.set_default_timeout(PATIENCE_MS)
            sign_in(context.new_page(), service.url, key)
            kept[key] = context.storage_state()
            context.close()
        return kept[key]

    return state


@pytest.fixture
def contexts(browser, service, signed_in) -> Iterator[Callable[..., tuple[BrowserContext, Witness]]]:
    """Makes contexts, each with a witness, whom nothing escapes."""
    opened: list[tuple[BrowserContext, Witness]] = []

    def make(key: str | None = KEY, **options: Any) -> tuple[BrowserContext, Witness]:
        state = signed_in(key) if key is not None else None
        context = browser.new_context(**{"viewport": WIDE, "storage_state": state, **options})
        context.set_default_timeout(PATIENCE_MS)
        opened.append((context, Witness(context, service.url)))
        return opened[-1]

    yield make
    for context, _ in opened:
        context.close()
    for _, witness in opened:
        witness.require_clean()


@pytest.fixture
def open_view(contexts, service) -> Callable[..., Page]:
    """Opens a view by its address; `key` and options of the context are those of `contexts`."""

    def open_view(route: str, **options: Any) -> Page:
        context, _ = contexts(**options)
        page = context.new_page()
        page.goto(f"{service.url}/#/{route}")
        return page

    return open_view
