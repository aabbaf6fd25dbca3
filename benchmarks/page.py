"""What it costs to look: the first picture, 128k tokens, how late output is on the screen, a hundred viewers.

Chromium and a whole service with a scripted engine, real sandboxes and rollouts that print. A page is opened
for the first time: nothing of it is cached. More in docs/benchmarks.md#page.
"""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness
from services.state.redis import connect
from tests.helpers import page_records
from tests.helpers.browser import PATIENCE_MS, WIDE, chromium, frame_when, sign_in
from tests.helpers.keys import KEY
from tests.helpers.page_policy import use
from tests.helpers.page_world import HANDLERS, PageWorld, page_stack
from tests.helpers.waiters import Waiters

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

VIEWERS, SHORT_VIEWERS = 100, 10
RUNNING, SHORT_RUNNING = 8, 3
"""Rollouts that print while others look."""
PRINTS = "while :; do echo at=$(date +%s%3N).; sleep 0.$((RANDOM % 4 + 2)); done"
"""Says when it was printed, two to five tenths of a second apart."""
LOOK_S, SHORT_S = 20.0, 1.0
"""For which a hundred look, and for which nobody does before."""
SEEN = """() => {
  window.lags = [];
  const known = new Set();
  const look = () => {
    for (const [, at] of (document.querySelector("main")?.textContent ?? "").matchAll(/at=(\\d{13})\\./g)) {
      if (!known.has(at)) { known.add(at); window.lags.push(Date.now() - Number(at)); }
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""
"""Notes, in each frame, how old the output is that is new in it."""
DRAWN = """(() => {
  const strip = document.querySelector("[role=application] canvas");
  if (!strip?.width) return false;
  const [width, height] = [strip.width, Math.min(strip.height, 200)];
  return strip.getContext("2d").getImageData(0, 0, width, height).data.some(Boolean);
})()"""
"""Whether the strip of tokens has its first rows."""
TEXT = "(document.querySelector('main')?.textContent ?? '')"
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]"


@contextmanager
def opened(browser: Browser, state: Any) -> Iterator[BrowserContext]:
    """A browser of somebody who has signed in, and who has nothing in the cache."""
    context = browser.new_context(viewport=WIDE, storage_state=state)
    context.set_default_timeout(PATIENCE_MS)
    try:
        yield context
    finally:
        context.close()


def first_load(browser: Browser, state: Any, url: str) -> dict[str, float]:
    """The overview from nothing: its first paint, when its figures are there, and what came over the wire."""
    with opened(browser, state) as context:
        page = context.new_page()
        sizes: dict[str, float] = {}
        ended = []
        page.on("requestfinished", lambda request: ended.append(request))  # a method of a list it refuses
        page.goto(f"{url}/#/overview")
        page.get_by_role("main").get_by_text(re.compile(r"\binit\b", re.IGNORECASE)).first.wait_for()
        filled_ms = page.evaluate("performance.now()")
        frame_when(page, PAINTED)
        painted_ms = page.evaluate(f"() => {PAINTED}.startTime")
        page.wait_for_timeout(300)
        for request in ended:
            own = request.sizes()
            kind = "page" if "/v1/" not in request.url else "api"
            sizes[kind] = sizes.get(kind, 0) + own["responseBodySize"] + own["responseHeadersSize"]
        return {
            "painted_ms": painted_ms,
            "filled_ms": filled_ms,
            "kb": sum(sizes.values()) / 1e3,
            "kb_of_files": sizes["page"] / 1e3,
            "requests": float(len(ended)),
        }


def open_tokens(browser: Browser, state: Any, url: str, rollout_id: str) -> float:
    """Milliseconds from the address of 128k tokens to their first screen."""
    with opened(browser, state) as context:
        page = context.new_page()
        page.goto(f"{url}/#/rollouts/{rollout_id}?tab=tokens")
        return frame_when(page, DRAWN)


def lags(browser: Browser, state: Any, url: str, rollout_id: str, count: int) -> list[float]:
    """Milliseconds from a tool's output to the frame that shows it, of so many outputs."""
    with opened(browser, state) as context:
        page = context.new_page()
        page.goto(f"{url}/#/rollouts/{rollout_id}")
        frame_when(page, f"/at=\\d{{13}}/.test({TEXT})")
        page.evaluate(SEEN)
        # What was there before anybody looked is old.
        page.wait_for_timeout(500)
        page.evaluate("() => { window.lags.length = 0; }")
        frame_when(page, f"window.lags.length >= {count}", count * 1000 + PATIENCE_MS)
        return [float(lag) for lag in page.evaluate("window.lags")]


def viewers(world: PageWorld, ids: list[str], count: int, seconds: float) -> dict[str, float]:
    """Cores that the gateway uses while so many look, less those while nobody does."""
    gateway = world.stack.gateway.pid
    workers = [process.pid for process in world.stack.processes if process.pid != gateway]
    all_ids = ",".join(ids)
    interests = itertools.cycle(
        [
            "topics=overview",
            *(f"rollout={rollout_id}" for rollout_id in ids[:3]),
            f"ids={all_ids}",
            "topics=overview,batches",
            "topics=reports",
        ]
    )
    paths = [f"/v1/live?{interest}" for _, interest in zip(range(count), interests, strict=False)]

    def used(look: Any) -> dict[str, float]:
        before = [harness.cpu_seconds(pids) for pids in ([gateway], workers)]
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            look(0.05)
        after = [harness.cpu_seconds(pids) for pids in ([gateway], workers)]
        return {
            name: (b - a) / (time.monotonic() - began)
            for name, a, b in zip(("gateway", "workers"), before, after, strict=True)
        }

    nobody = used(time.sleep)
    memory_mb = harness.memory_mb([gateway], "pss")
    with Waiters("127.0.0.1", world.stack.port, paths) as waiters:
        if not waiters.read_answers(harness.PATIENCE_S) or set(waiters.statuses()) != {200}:
            raise RuntimeError(f"not all streams began: {waiters.statuses()}")
        waiters.read_until(lambda: False, 1.0)  # what a stream says first is said once
        somebody = used(waiters.read)
        if any(waiters.closed):
            raise RuntimeError("streams were ended while they were read")
        heard = sum(map(len, waiters.received))
        memory_mb = harness.memory_mb([gateway], "pss") - memory_mb
    harness.say(f"cores while nobody looks {nobody}, while {count} do {somebody}")
    return {
        "gateway_cores": max(0.0, somebody["gateway"] - nobody["gateway"]),
        "gateway_cores_without": nobody["gateway"],
        "worker_cores": somebody["workers"] - nobody["workers"],
        "kb_heard": heard / 1e3,
        "gateway_mb_more": memory_mb,
    }


def main(options: harness.Options) -> harness.Report:
    short = options.rounds == 1
    env = {**harness.ENV, "ROLLOUT_HANDLERS": HANDLERS}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        page_stack(Path(directory), env) as (stack, plans, engine),
        chromium() as browser,
    ):
        with connect(stack.redis.url) as redis:
            made = page_records.long_trajectory()
            page_records.write(redis, stack.redis.url, made, id="long")
        stack.start_worker("init,run,eval", "all")
        stack.client.add_backend(engine.url)
        world = PageWorld(stack, plans, "")
        # The tokenizer's texts come with a rollout that needs it.
        world.client.run([world.request("first", [use("finish", "Done.", message="done")], id="first")])
        with browser.new_context(viewport=WIDE) as context:
            sign_in(context.new_page(), world.url, KEY)
            state = context.storage_state()
        loads = [first_load(browser, state, world.url) for _ in range(options.rounds)]
        tokens_ms = [open_tokens(browser, state, world.url, "long") for _ in range(options.rounds)]
        ids = [world.running(PRINTS, tags=["page"]) for _ in range(SHORT_RUNNING if short else RUNNING)]
        late_ms = lags(browser, state, world.url, ids[0], options.count)
        looked = viewers(world, ids, *((SHORT_VIEWERS, SHORT_S) if short else (VIEWERS, LOOK_S)))
    return {
        "results": {
            "first_paint_ms_overview": statistics.median(load["painted_ms"] for load in loads),
            "open_128k_tokens_ms": statistics.median(tokens_ms),
            "live_lag_ms_p95": harness.percentile(late_ms, 0.95),
            "viewers_100_cpu_cores": looked["gateway_cores"],
            "page_kb_gzip": statistics.median(load["kb"] for load in loads),
        },
        "first_load": harness.summaries(loads),
        "open_128k_tokens_ms": harness.summary(tokens_ms),
        "live_lag_ms": {**harness.summary(late_ms), "n": len(late_ms)},
        "viewers": looked,
    }


if __name__ == "__main__":
    harness.run(main, count=100, rounds=5)
