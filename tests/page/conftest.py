"""One service and one chromium for all tests of the page, and a page that is not forgiven an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
NOWHERE = "#/-"
"""The address of no view, where a page asks for nothing."""


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


class Tab:
    """A tab that one test after the other may have: another takes two seconds of a processor, and to load
    the page anew half a second."""

    def __init__(self, browser: Browser, url: str, state: Any) -> None:
        self.context = browser.new_context(viewport=WIDE, storage_state=state)
        self.context.set_default_timeout(PATIENCE_MS)
        self.witness = Witness(self.context, url)
        self.page = self.context.new_page()
        self._nowhere = f"{url}/{NOWHERE}"
        self.page.goto(self._nowhere)
        self._kept = self.context.storage_state()

    def open(self, route: str) -> Page:
        """The page at a view, in a new document: nothing is left in it of what the last test did."""
        # To go there would load the page only where the address has another path.
        self.page.evaluate("(route) => history.replaceState(null, '', route)", f"#/{route}")
        self.page.reload()
        return self.page

    def leave(self) -> bool:
        """End what the view does, and fail for what was seen; whether the tab keeps nothing of it."""
        for page in self.context.pages:
            if page is not self.page:
                page.close()
        self.page.mouse.move(0, 0)
        self.page.goto(self._nowhere)
        if self.witness.accepts:
            self.page.reload()  # so that no late error comes to the next test, which does not accept it
        clean = self.context.storage_state() == self._kept
        self.witness.require_clean()
        self.witness.forget()
        return clean


@pytest.fixture(scope="package")
def tabs(browser, service, signed_in) -> Iterator[Callable[[str], AbstractContextManager[Tab]]]:
    """Lends a tab that has signed in with a key. Only a tab that is as it was is lent again."""
    kept: dict[str, Tab] = {}

    @contextmanager
    def lent(key: str) -> Iterator[Tab]:
        tab = kept.pop(key, None) or Tab(browser, service.url, signed_in(key))
        try:
            yield tab
            if tab.leave():
                kept.setdefault(key, tab)
        finally:
            if kept.get(key) is not tab:
                tab.context.close()

    yield lent
    for tab in kept.values():
        tab.context.close()


@pytest.fixture
def open_view(contexts, tabs, service) -> Iterator[Callable[..., Page]]:
    """Opens a view by its address, where errors of the form `accept` are what the test is about.

    With options of a context in one of its own, which a test also needs for routes, scripts or a size of the
    window: a tab does not forget these.
    """
    with ExitStack() as lent:

        def open_view(route: str, key: str = KEY, accept: str | None = None, **options: Any) -> Page:
            tab = None if options else lent.enter_context(tabs(key))
            context, witness = (tab.context, tab.witness) if tab else contexts(key, **options)
            if accept is not None:
                witness.accept(accept)
            if tab:
                return tab.open(route)
            page = context.new_page()
            page.goto(f"{service.url}/#/{route}")
            return page

        yield open_view
