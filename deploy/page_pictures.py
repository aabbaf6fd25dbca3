"""Pictures of the page, light and dark, of rollouts that mend a program: `python -m deploy.page_pictures`.

The model says what is written here; what its commands print, and all the rest, is real.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from rollout.batch import BatchRequest
from rollout.schema import RolloutRequest
from services.state.redis import connect
from tests.helpers import page_records
from tests.helpers.browser import PATIENCE_MS, chromium, sign_in
from tests.helpers.keys import KEY
from tests.helpers.page_policy import CHECK, bash, use
from tests.helpers.page_world import HANDLERS, PageWorld, page_stack
from tests.helpers.stack import wait_until
from workers.agent.replay import Action

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
SIZE = {"width": 1280, "height": 800}
SLOTS = 8
"""Of each stage: fewer than there are rollouts, so that some wait."""
STEPS = 80
"""That the trainer has reported."""
WATCHED_S = 25.0
"""For which the overview is open before its picture is taken: it draws what it has heard."""
MOST_BYTES = 150_000


def look(pause: float) -> Action:
    return bash(f"sleep {pause}; ls; cat calc.py; {CHECK}", "I look at the program and run its tests first.")


def plans(pause: float) -> Sequence[list[Action]]:
    """Four ways in which it goes: mended, mended by a detour, half mended, and given up."""
    end = use("finish", "All tests pass: `twice` added one too many.", message="mended")
    mend = bash(
        f"sleep {pause}; sed -i 's/x + x + 1/x + x/' calc.py && {CHECK}", "`twice(2)` is 5: one too many."
    )
    wrong = bash(
        f"sleep {pause}; sed -i 's/x + x + 1/x * x/' calc.py && {CHECK}", "Perhaps a square was meant."
    )
    back = bash(f"sleep {pause}; sed -i 's/x \\* x/2 * x/' calc.py && {CHECK}", "No: `2 * x` says it best.")
    thought = use("think", thought="twice(0) is 1, so the constant is wrong and not the factor.")
    return (
        [look(pause), thought, mend, end],
        [look(pause), wrong, back, end],
        [look(pause), use("finish", "`half` is right, and I see nothing else.", message="nothing to do")],
        [look(pause), thought, wrong, use("finish", "This should do.", message="done")],
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


def populate(world: PageWorld, engine: str) -> str:
    """Groups, failures, a batch; the id of a rollout that two versions of the policy have sampled."""
    numbers = itertools.count(1)

    def mend(n: int, pause: float = 0.0, **fields: object) -> RolloutRequest:
        number = next(numbers)
        ways = plans(pause)
        return world.request(
            f"calc-{number}", *ways, id=f"calc-{number}", n=n, tags=["page", "mend"], **fields
        )

    for version in ("step-40", "step-60"):
        httpx.post(f"{engine}/update_weight_version", json={"new_version": version}).raise_for_status()
        world.client.run([mend(4), mend(4)])
    failing = [("unready", 2), ("bad_image", 2), ("faulty", 3)]
    requests = [
        RolloutRequest(
            handler=name,
            n=n,
            tags=["page"],
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
    # Its turns are of two versions: the weights change while its tools run.
    (crossing,) = world.client.submit([mend(1, pause=3.0)])
    wait_until(lambda: world.client.get(crossing.id).state == "running", 60, "it to run")
    time.sleep(4)
    httpx.post(f"{engine}/update_weight_version", json={"new_version": "step-80"}).raise_for_status()
    report(world)
    world.client.submit([mend(4, pause=1.5) for _ in range(12)])
    return crossing.id


def shoot(page: Page, name: str, scheme: str) -> None:
    """Take a picture of what the page shows; of the dark one the name says so."""
    path = IMAGES / f"{name}{'-dark' if scheme == 'dark' else ''}.png"
    page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.name}: {size / 1e3:.0f} kB{' (too large)' if size > MOST_BYTES else ''}")


def pictures(url: str, crossing: str) -> None:
    """All of them, light and dark."""
    views = {
        "page-overview": "overview",
        "page-rollout": "rollouts/calc-1.0",
        "page-tokens": f"rollouts/{crossing}?tab=tokens",
        "page-group": "groups/calc-1",
        "page-training": "training",
    }
    with chromium() as browser:
        for scheme in ("light", "dark"):
            with browser.new_context(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce") as context:
                context.set_default_timeout(PATIENCE_MS)
                page = context.new_page()
                sign_in(page, url, KEY)
                for name, route in views.items():
                    page.goto(f"{url}/#/{route}")
                    page.get_by_role("heading", level=1).wait_for()
                    page.wait_for_timeout(
                        WATCHED_S * 1000 if route == "overview" and scheme == "light" else 3000
                    )
                    shoot(page, name, scheme)


def main() -> None:
    """Start a service, have it work, look at it, end it."""
    with (
        tempfile.TemporaryDirectory(prefix="rollout-shots-") as directory,
        page_stack(Path(directory), {"ROLLOUT_HANDLERS": HANDLERS}) as (stack, folder, engine),
    ):
        with connect(stack.redis.url) as redis:
            page_records.write(redis, stack.redis.url, page_records.branched_trajectory(), id="session")
        for stage in ("init", "run", "eval"):
            stack.start_worker(stage, slots=SLOTS)
        stack.client.add_backend(engine.url)
        world = PageWorld(stack, folder, "")
        crossing = populate(world, engine.url)
        pictures(stack.url, crossing)
        stack.client.cancel_many(tag="page")


if __name__ == "__main__":
    main()
