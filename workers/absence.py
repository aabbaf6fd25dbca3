"""An image that this node cannot start: others take the rollout first, and no attempt is used up.

Once all have tried, each further attempt goes round them again, for what a node lacked may have come."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import redis

from rollout.schema import Stage
from sandbox.errors import ImageError, RuntimeUnavailable
from services.state.rollouts import ABSENT, Finish

if TYPE_CHECKING:
    from workers.stage import StageRun

OF_THE_NODE = (ImageError, RuntimeUnavailable)
"""What says of a node that it cannot start an image, and nothing of others."""
MAX_REASON = 500


async def unstarted(run: StageRun, error: Exception, outcome: Finish) -> Finish:
    """What becomes of the stage that `error` ended: the `outcome`, or other nodes take the rollout first.

    It is handed on while a live node is left that has not tried since the last attempt, however long ago.
    """
    cause = error if isinstance(error, OF_THE_NODE) else error.__cause__
    if run.claim.stage is not Stage.INIT or not isinstance(cause, OF_THE_NODE):
        return outcome
    others, untried = True, True
    try:
        others, untried = await asyncio.to_thread(_others, run)
    except redis.RedisError as away:
        run.log.warning("cannot tell whether another node may start the image", error=str(away))
    if not others:
        return outcome  # nobody is to wait for a node that is alone to forget it
    fields = outcome.fields | {ABSENT + run.process.settings.node: str(error)[:MAX_REASON]}
    if not untried:
        return replace(outcome, fields=fields)
    run.log.warning("handed to another node: this one cannot start the image", error=str(error))
    return Finish("elsewhere", fields)


def _others(run: StageRun) -> tuple[bool, bool]:
    """Whether there are other live nodes that do INIT, and such as have not tried."""
    others = run.init_nodes() - {run.process.settings.node}
    return bool(others), bool(others - run.process.store.absent_on(run.claim.rollout_id))
