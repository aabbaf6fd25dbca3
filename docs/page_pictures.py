"""Pictures of the page, light and dark, of rollouts that mend a program: `python -m docs.page_pictures`.

The model says what is written here; what its commands print, and all the rest, is real.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.batch import BatchRequest
from rollout.schema import Rollout, RolloutRequest
from services.state.redis import connect
from tests.helpers import page_records
from tests.helpers.browser import PATIENCE_MS, browser_missing, chromium, sign_in
from tests.helpers.fake_engine import fake_engine
from tests.helpers.keys import KEY
from tests.helpers.page_policy import CHECK, bash, use
from tests.helpers.page_world import ENGINE, HANDLERS, PageWorld, page_stack
from tests.helpers.stack import wait_until
from workers.agent.replay import Action

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
SIZE = {"width": 1180, "height": 680}
SIZES = {"page-overview": {"width": 1280, "height": 740}, "page-tokens": {"width": 1180, "height": 590}}
"""The overview needs its width, and a strip of tokens has much on each line."""
SLOTS = 8
"""Of each stage: fewer than there are rollouts, so that some wait."""
STEP_MS = 8.0
"""Of the engine, for a token: as slow as a real one."""
CROSSING_S = 0.6
"""From the start of RUN to a change of the weights, in the middle of a turn."""
GROUPS = 60
"""That are under way while the overview is looked at."""
STEPS = 80
"""That the trainer has reported."""
DARK = ("page-tokens",)
"""Those of which there is a dark one, too."""
WATCHED_S = 25.0
"""For which the overview is open before its picture is taken: it draws what it has heard."""
MOST_BYTES = 100_000


def look(said: str) -> Action:
    return bash(f"ls; cat calc.py; {CHECK}", said)


def plans() -> Sequence[list[Action]]:
    """Four ways in which it goes: mended, mended by a detour, half mended, and given up."""
    end = use("finish", "All tests pass: `twice` added one too many.", message="mended")
    mend = bash(f"sed -i 's/x + x + 1/x + x/' calc.py && {CHECK}", "`twice(2)` is 5: one too many.")
    wrong = bash(f"sed -i 's/x + x + 1/x * x/' calc.py && {CHECK}", "Perhaps a square was meant.")
    back = bash(f"sed -i 's/x \\* x/2 * x/' calc.py && {CHECK}", "No: `2 * x` says it best.")
    thought = use("think", thought="twice(0) is 1, so the constant is wrong and not the factor.")
    return (
        [look("I look at the program and run its tests first."), thought, mend, end],
        [look("First the tests."), wrong, back, end],
        [
            look("Let me see what is there."),
            use("finish", "`half` is right, and so is all else.", message="-"),
        ],
        [look("I run the tests."), thought, wrong, use("finish", "This should do.", message="done")],
    )


def report(world: PageWorld) -> None:
    """What a trainer of that policy would say of its steps."""
    noise = random.Random(7)
    for step in range(STEPS):
        done = step / STEPS
        metrics = {
            "reward": 0.25 + 0.6 * (1 - math.exp(-3 * done)) + noise.gauss(0, 0.03),
            "gap": 0.006 + 0.004 * done + abs(noise.gauss(0, 0.002)),
            "staleness": float(noise.choice([0, 0, 1, 1, 1, 2])),
            "entropy": 1.4 * math.exp(-1.2 * done) + noise.gauss(0, 0.02),
        }
        world.client.report(step, metrics, run="mend-7b", policy_version=f"step-{step // 20 * 20}")


def populate(world: PageWorld) -> tuple[Rollout, str]:
    """Groups, failures, a batch; a rollout that went well, and the id of one that two versions sampled."""
    numbers = itertools.count(1)

    def mend(n: int) -> RolloutRequest:
        number = next(numbers)
        return world.request(f"calc-{number}", *plans(), id=f"calc-{number}", n=n, tags=["mend"])

    for version in ("step-40", "step-60"):
        world.client.update_policy(version, None)
        ended = world.client.run([mend(4), mend(4)])
    mended = next(item for item in ended if item.trajectory.turns == 4 and item.reward == 1.0)
    failing = [("unready", 2), ("bad_image", 2), ("faulty", 3)]
    requests = [
        RolloutRequest(
            handler=name,
            n=n,
            tags=["mend"],
            task={"stage": "eval"} if name == "faulty" else {},
            limits={"max_attempts": 2},
        )
        for name, n in failing
    ]
    world.client.run(requests)
    rewards = (
        [0, 0, 0, 0],
        [0, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 1, 1],
        [0, 0, 1, 0],
        [1, 1, 0, 1],
        [0, 0, 0, 0],
    )
    prompts = [
        RolloutRequest(handler="lottery", task={"rewards": row, "number": k}) for k, row in enumerate(rewards)
    ]
    world.client.batches.create(BatchRequest(id="step-61", prompts=prompts, n=4, groups=4))
    # The weights change while it samples its first turn.
    (crossing,) = world.client.submit([mend(1)])
    wait_until(lambda: world.client.get(crossing.id).state == "running", 60, "it to run")
    time.sleep(CROSSING_S)
    world.client.update_policy("step-80", None)
    world.client.wait(crossing.id)
    report(world)
    world.client.submit([mend(4) for _ in range(GROUPS)])
    return mended, crossing.id


def shoot(page: Page, name: str, scheme: str) -> None:
    """Take a picture of what the page shows; of the dark one the name says so."""
    page.evaluate("scrollTo(0, location.hash.includes('tokens') ? 999 : 0)")  # below: what one is
    path = IMAGES / f"{name}{'-dark' if scheme == 'dark' else ''}.png"
    page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.name}: {size / 1e3:.0f} kB{' (too large)' if size > MOST_BYTES else ''}")


def pictures(url: str, mended: Rollout, crossing: str) -> None:
    """All of them, light and dark."""
    views = {
        "page-overview": "overview",
        "page-rollout": f"rollouts/{mended.id}",
        "page-tokens": f"rollouts/{crossing}?tab=tokens&at=190",
        "page-group": f"groups/{mended.group_id}",
        "page-training": "training",
    }
    with chromium() as browser:
        for scheme in ("light", "dark"):
            with browser.new_context(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce") as context:
                context.set_default_timeout(PATIENCE_MS)
                page = context.new_page()
                sign_in(page, url, KEY)
                for name, route in views.items():
                    if scheme == "dark" and name not in DARK:
                        continue
                    page.set_viewport_size(SIZES.get(name, SIZE))
                    page.goto(f"{url}/#/{route}")
                    page.get_by_role("heading", level=1).wait_for()
                    page.wait_for_timeout(WATCHED_S * 1000 if route == "overview" else 3000)
                    shoot(page, name, scheme)


def main() -> None:
    """Start a service, have it work, look at it, end it."""
    if reason := browser_missing():
        print(f"pictures of the page stay as they are: {reason}", file=sys.stderr)
        return
    with (
        tempfile.TemporaryDirectory(prefix="rollout-shots-") as directory,
        page_stack(Path(directory), {"ROLLOUT_HANDLERS": HANDLERS}, step_ms=STEP_MS) as (
            stack,
            folder,
            engine,
        ),
        fake_engine(**ENGINE, step_ms=STEP_MS) as second,
    ):
        with connect(stack.redis.url) as redis:
            page_records.write(redis, stack.redis.url, page_records.branched_trajectory(), id="session")
        for stage in ("init", "run", "eval"):
            stack.start_worker(stage, slots=SLOTS)
        for each in (engine, second):
            stack.client.add_backend(each.url)
        world = PageWorld(stack, folder, "")
        pictures(stack.url, *populate(world))
        stack.client.cancel_many(tag="mend")


if __name__ == "__main__":
    main()
