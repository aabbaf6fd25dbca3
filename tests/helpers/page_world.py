"""A whole service with rollouts worth looking at: real ones that play plans, and some that are written."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollout.batch import BatchRequest
from rollout.client import Client
from rollout.schema import Origin, Rollout, RolloutRequest
from services.gateway.auth import CACHE_S
from services.state import keys
from services.state.api_keys import KeyStore, Scope
from services.state.redis import connect
from tests.helpers import page_policy, page_records
from tests.helpers.blocking import SyncSandboxClient
from tests.helpers.fake_engine import fake_engine
from tests.helpers.keys import KEY, http
from tests.helpers.page_policy import bash, use
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, wait_until
from workers.agent.replay import Action

HANDLERS = "tests.helpers.handlers:all_handlers,tests.helpers.page_policy:all_handlers"
ENGINE = {
    "script": "tests.helpers.page_policy:play",
    "max_model_len": 131072,
    "weight_version": "v1",
}
OTHER = "other"
"""A second tenant."""
COLOURS = r"printf '\033[31mred words\033[0m and plain ones\n'; ls -a"
TICK = "for n in $(seq 1 400); do echo tick $n; sleep 0.1; done"
RUN = "run-7"
"""Of the trainer that reports."""


@dataclass
class PageWorld:
    """The service. Its rollouts: `mend-calc.0` to `.3`, `broken`, `long`, `hostile`, `branched`,
    `forked`; its batch:
    `draws`; and `theirs`, another tenant's."""

    stack: Stack
    plans: Path
    other_key: str
    group: list[Rollout] = field(default_factory=list)
    """Siblings that part in their first turn."""

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def client(self) -> Client:
        return self.stack.client

    def request(self, name: str, *variants: list[Action], **fields: Any) -> RolloutRequest:
        """A rollout whose policy plays one of these lists of actions."""
        words = page_policy.write_plan(self.plans, name, *variants)
        task = {"prompt": f"{words} mend calc.py, in which twice(2) is 5.", **fields.pop("task", {})}
        return RolloutRequest(handler="mend", task=task, **fields)

    def new_key(self, *scopes: Scope) -> tuple[str, str]:
        """Id and text of a key of the tenant `default`, once the gateway has read of it."""
        with connect(self.stack.redis.url) as redis:
            key, text = KeyStore(redis).create("default", scopes)
        time.sleep(CACHE_S + 0.1)
        return key.id, text

    def submit(self, handler: str, **fields: Any) -> str:
        """Start a rollout; its id."""
        return self.client.submit([RolloutRequest(handler=handler, **fields)])[0].id

    def running(self, command: str = TICK, **fields: Any) -> str:
        """A rollout whose command runs in its sandbox by now; its id. Whoever started it cancels it."""
        rollout_id = self.submit("in_tool", task={"command": command}, **fields)
        wait_until(lambda: self.client.get(rollout_id).state == "running", 120, "the rollout to run")
        return rollout_id

    def write(self, rollout_id: str, path: str) -> None:
        """An empty file in the sandbox of a rollout that runs."""
        with connect(self.stack.redis.url) as redis:
            address = json.loads(redis.hget(keys.record(rollout_id), "sandbox"))["socket"]
        with SyncSandboxClient(address) as sandbox:
            sandbox.write_file(path, b"")


@contextmanager
def page_stack(
    directory: Path, env: dict[str, str] | None = None, **engine_options: Any
) -> Iterator[tuple[Stack, Path, Any]]:
    """Redis and gateway, without a worker; the plans' directory; and the engine that plays them."""
    plans = directory / "plans"
    plans.mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as sandbox_dir,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(page_policy.VARIABLE, str(plans))
        try:
            env = {"ROLLOUT_HANDLERS": HANDLERS, "ROLLOUT_LEASE_S": "10", **(env or {})}
            with (
                fake_engine(**ENGINE, **engine_options) as engine,
                Stack(directory, Path(sandbox_dir), env) as stack,
            ):
                yield stack, plans, engine
        finally:
            # Playwright has a loop in this thread, in which no other may run.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(stop_host, Path(sandbox_dir)).result()


@contextmanager
def page_world(directory: Path) -> Iterator[PageWorld]:
    """The service with what every view needs to show something."""
    with page_stack(directory) as (stack, plans, engine):
        with connect(stack.redis.url) as redis:
            _, other_key = KeyStore(redis).create(OTHER, [Scope.SUBMIT, Scope.READ])
            world = PageWorld(stack, plans, other_key)
            for name, made in (
                ("long", page_records.long_trajectory()),
                ("hostile", page_records.hostile_trajectory()),
                ("branched", page_records.branched_trajectory()),
                ("judged", page_records.judged_trajectory()),
            ):
                page_records.write(redis, stack.redis.url, made, id=name, tags=["written"])
            page_records.write(
                redis,
                stack.redis.url,
                page_records.forked_trajectory(),
                **{"id": "forked", "tags": ["written"], "origin": Origin(rollout="branched", turn=1)},
            )
        stack.start_worker("init,run,eval", "all")
        stack.client.add_backend(engine.url)
        _run(world)
        yield world


def _run(world: PageWorld) -> None:
    """A group of four that differ, a failure, a batch that keeps one group of two, another's, reports."""
    end = use("finish", "It is mended.", message="done")
    variants = (
        [bash(COLOURS, "I look around."), use("think", thought="One too many."), end],
        [
            bash("seq 1 50", "I count first."),
            bash("sed -i 's/ + 1//' calc.py && cat calc.py", "I write."),
            end,
        ],
        [use("finish", "I give up at once.", message="no")],
        # Who comes first plays the first: any two of the four are looked at beside each other.
        [use("think", "I think first.", thought="Twice is two times."), end],
    )
    task = {"rewards": [1.0, 0.5, 0.0, 1.0]}
    fields = {
        "id": "mend-calc",
        "task": task,
        "n": 4,
        "tags": ["page", "step:1"],
        "metadata": {"source": "tests"},
    }
    requests = [
        world.request("siblings", *variants, **fields),
        RolloutRequest(id="broken", handler="unready", tags=["page"], limits={"max_attempts": 2}),
    ]
    *world.group, _ = world.client.run(requests, timeout=240)
    assert all(item.reward is not None for item in world.group), [item.error for item in world.group]
    draws = [RolloutRequest(handler="lottery", task={"rewards": r}) for r in ([0.0, 0.0], [0.0, 1.0])]
    # One after the other, so that the first is filtered before the second is kept.
    batch = BatchRequest(id="draws", prompts=draws, n=2, groups=1, max_in_flight=2)
    world.client.batches.create(batch)
    with Client(world.url, api_key=world.other_key) as other:
        other.run([RolloutRequest(id="theirs", handler="chatty", tags=["secret-of-other"])])
    for step in range(1, 6):
        metrics = {"reward": step / 5, "gap": 0.01 * step, "staleness": step % 3}
        report = {"run": RUN, "step": step, "metrics": metrics, "policy_version": f"v{1 + step // 3}"}
        http.post(f"{world.url}/v1/reports", json=report).raise_for_status()
    world.client.batches.get("draws", wait=60)


__all__ = ["KEY", "OTHER", "PageWorld", "page_stack", "page_world"]
