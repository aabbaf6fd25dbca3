"""Rollouts of Harbor tasks with a scripted agent, some at a time: real sandboxes and stages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.schema import Limits, Rollout, RolloutRequest
from services.settings import settings
from tests.helpers.sandboxes import own_sandboxes
from tests.helpers.stack import CHECKPOINT
from tests.helpers.swe_agents import AT_ONCE, FINISH, bash
from workers import bundles
from workers.handlers.harbor import Harbor
from workers.inprocess import Actions, InProcess

LIMITS = Limits(init_timeout_s=240, run_timeout_s=240, eval_timeout_s=240, max_attempts=1)
"""Generous: no test waits for one of them."""
OFFLINE = '[environment]\nworkdir = "/app"\nnetwork_mode = "no-network"\n'


@contextmanager
def own_node(cache: Path, **variables: str) -> Iterator[Path]:
    """A sandbox host and a cache of bundles of their own."""
    with own_sandboxes(ROLLOUT_BUNDLE_CACHE=str(cache), **variables) as state:
        for cached in (settings, bundles._cache):
            cached.cache_clear()
        yield state
    for cached in (settings, bundles._cache):
        cached.cache_clear()


async def roll_many(
    jobs: Iterable[tuple[Mapping[str, Any], Sequence[str]]], limits: Limits = LIMITS, **more: Any
) -> list[Rollout]:
    """Rollouts of `(task of a request, commands)`; each agent runs its commands and finishes."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def rolled(task: Mapping[str, Any], commands: Sequence[str]) -> Rollout:
        actions = Actions([*map(bash, commands), FINISH], str(CHECKPOINT))
        async with turn:
            request = RolloutRequest(handler="harbor", task=dict(task), limits=limits, **more)
            (rollout,) = await InProcess(Harbor(), actions).run(request)
        return rollout

    return await asyncio.gather(*(rolled(*job) for job in jobs))


def roll(task: Mapping[str, Any], *commands: str, limits: Limits = LIMITS, **more: Any) -> Rollout:
    """One rollout of an agent that runs the commands and finishes; `more`: further fields of the request."""
    return asyncio.run(roll_many([(task, commands)], limits, **more))[0]
