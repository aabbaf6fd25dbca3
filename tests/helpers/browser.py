"""Debian's chromium driven by Playwright, and a witness of what a page must never do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

FLAGS = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
PATIENCE_MS = 20_000.0
"""For anything on a machine that is busy with other tests."""
INNER = ("data", "blob", "about")
"""Schemes of addresses that no host is asked for."""
_SECRET = re.compile(r"rlt_[0-9a-f]{8,}_")


def browser_missing() -> str | None:
    """Why no browser can be driven here, as a reason to skip; None when one can."""
    if shutil.which("chromium") is None:
        return "no chromium on PATH: run `make setup-tests`, or apt-get install chromium"
    for package in ("playwright", "axe_playwright_python"):
        if importlib.util.find_spec(package) is None:
            return f"no {package}: run `make setup`"
    return None


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A browser without a window, with an empty profile.

    Raises:
        RuntimeError: `browser_missing()` says why.
    """
    if reason := browser_missing():
        raise RuntimeError(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="chromium-") as home:
        program = shutil.which("chromium")
        # What it writes beside its profile, such as reports of crashes, is nobody's to find.
        env = {**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
        browser = playwright.chromium.launch(executable_path=program, args=[*FLAGS, *flags], env=env)
        try:
            yield browser
        finally:
            browser.close()


class Witness:
    """What the pages of a context did that no page of ours may do."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._accepted: list[re.Pattern[str]] = []
        self.errors: list[str] = []
        """The console's, those of a Content-Security-Policy among them, and exceptions that nobody caught."""
        self.elsewhere: list[str] = []
        """Addresses of other hosts that were asked for."""
        self.requests: list[str] = []
        self.secrets: list[str] = []
        """Addresses with a key in them."""
        context.on("console", self._heard)
        context.on("weberror", lambda error: self.errors.append(f"exception: {error.error}"))
        context.on("request", self._asked)
        context.on("page", lambda page: page.on("crash", lambda _: self.errors.append("the page crashed")))

    def accept(self, pattern: str) -> None:
        """Errors of this form are what the test is about: chromium writes one for each refused request."""
        self._accepted.append(re.compile(pattern))

    @property
    def accepts(self) -> bool:
        """Whether some errors are accepted."""
        return bool(self._accepted)

    def forget(self) -> None:
        """Begin anew: what comes is another test's."""
        for seen in (self._accepted, self.errors, self.elsewhere, self.requests, self.secrets):
            seen.clear()

    def _heard(self, message: ConsoleMessage) -> None:
        text = f"{message.type}: {message.text} ({message.location.get('url', '')})"
        if message.type == "error" and not any(pattern.search(text) for pattern in self._accepted):
            self.errors.append(text)

    def _asked(self, request: Request) -> None:
        address = urlsplit(request.url)
        self.requests.append(request.url)
        if address.scheme not in INNER and address.netloc != self._host:
            self.elsewhere.append(request.url)
        if _SECRET.search(request.url):
            self.secrets.append(request.url)

    def require_clean(self) -> None:
        """Fail with what was seen."""
        assert not self.errors, "\n".join(self.errors)
        assert not self.elsewhere, f"requests to other hosts: {self.elsewhere}"
        assert not self.secrets, f"keys in addresses: {self.secrets}"


def sign_in(page: Page, url: str, key: str) -> None:
    """Give the page its key, as a person does."""
    page.goto(f"{url}/#/login")
    page.get_by_label(re.compile("key", re.IGNORECASE)).first.fill(key)
    page.get_by_role("button", name=re.compile("sign in|log in|open", re.IGNORECASE)).first.click()
    page.wait_for_url(lambda address: not urlsplit(address).fragment.startswith("/login"))


def frame_when(page: Page, condition: str, timeout_ms: float = PATIENCE_MS) -> float:
    """The page's clock in the first frame in which an expression holds, ms since the page was asked for.

    Playwright's own way is `eval`, which our Content-Security-Policy forbids.
    """
    look = f"""() => new Promise((done, fail) => {{
      setTimeout(() => fail(new Error("not in time: " + {json.dumps(condition)})), {timeout_ms});
      const look = () => ({condition}) ? done(performance.now()) : requestAnimationFrame(look);
      look();
    }})"""
    return page.evaluate(look)


def findings(page: Page, *rules: str) -> list[str]:
    """What axe-core calls serious or critical in the page as it is, by these rules or by all."""
    from importlib.resources import files

    if not page.evaluate("'axe' in window"):
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    look = "async (rules) => (await axe.run(document, rules.length ? {runOnly: rules} : {})).violations"
    found: list[dict[str, Any]] = page.evaluate(look, list(rules))
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]} {node.get('failureSummary', '')[:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]
