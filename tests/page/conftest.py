"""One service and one chromium for all tests of the page, and a page that is not forgiven an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.browser import PATIENCE_MS, WIDE, Witness, browser_missing, chromium, sign_in
from tests.helpers.keys import KEY
from tests.helpers.page_world import PageWorld, page_world
from tests.helpers.sandboxes import leftovers
from tests.helpers.stack import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

NOWHERE = "#/-"
"""The address of no view, where a page asks for nothing."""


# Of this package: while Playwright drives, its loop runs in this thread, where other tests run their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if reason := browser_missing():
        pytest.skip(reason)
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
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


class Tab:
    """A tab that one test after the other may have: another takes two seconds of a processor, and to load
    the page anew a third of one."""

    def __init__(self, browser: Browser, url: str, key: str, state: Any = None) -> None:
        self.context = browser.new_context(viewport=WIDE, storage_state=state)
        self.context.set_default_timeout(PATIENCE_MS)
        self.witness = Witness(self.context, url)
        self.page = self.context.new_page()
        if state is None:
            sign_in(self.page, url, key)
        self._nowhere = f"{url}/{NOWHERE}"
        self.page.goto(self._nowhere)
        self.state = self.context.storage_state()
        """What a browser keeps of a person who has signed in."""

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
        clean = self.context.storage_state() == self.state
        self.witness.require_clean()
        self.witness.forget()
        return clean


class Tabs:
    """A tab for each key, and what it keeps of who signed in there."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser, self._url = browser, url
        self._kept: dict[str, Tab] = {}
        self._states: dict[str, Any] = {}

    def state(self, key: str) -> Any:
        """For contexts that begin as one in which a person has signed in."""
        if key not in self._states:
            self._kept[key] = Tab(self._browser, self._url, key)
            self._states[key] = self._kept[key].state
        return self._states[key]

    @contextmanager
    def lent(self, key: str) -> Iterator[Tab]:
        """A tab that nobody else has. Only one that is as it was is lent again."""
        state = self.state(key)
        tab = self._kept.pop(key, None) or Tab(self._browser, self._url, key, state)
        try:
            yield tab
            if tab.leave():
                self._kept.setdefault(key, tab)
        finally:
            if self._kept.get(key) is not tab:
                tab.context.close()

    def close(self) -> None:
        for tab in self._kept.values():
            tab.context.close()


@pytest.fixture(scope="package")
def tabs(browser, service) -> Iterator[Tabs]:
    tabs = Tabs(browser, service.url)
    yield tabs
    tabs.close()


@pytest.fixture
def contexts(browser, service, tabs) -> Iterator[Callable[..., tuple[BrowserContext, Witness]]]:
    """Makes contexts, each with a witness, whom nothing escapes."""
    opened: list[tuple[BrowserContext, Witness]] = []

    def make(key: str | None = KEY, **options: Any) -> tuple[BrowserContext, Witness]:
        state = tabs.state(key) if key is not None else None
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
def open_view(contexts, tabs, service) -> Iterator[Callable[..., Page]]:
    """Opens a view by its address, where errors of the form `accept` are what the test is about.

    With options of a context in one of its own, which a test also needs to sign out, and for routes, scripts
    or a size of the window: a tab does not forget these.
    """
    with ExitStack() as lent:

        def open_view(route: str, key: str = KEY, accept: str | None = None, **options: Any) -> Page:
            tab = None if options else lent.enter_context(tabs.lent(key))
            context, witness = (tab.context, tab.witness) if tab else contexts(key, **options)
            if accept is not None:
                witness.accept(accept)
            if tab:
                return tab.open(route)
            page = context.new_page()
            page.goto(f"{service.url}/#/{route}")
            return page

        yield open_view
