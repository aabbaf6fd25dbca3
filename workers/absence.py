"""An image that this node cannot start: another node takes the rollout, and no attempt is used up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import redis

from rollout.schema import Stage
from sandbox.errors import ImageError, RuntimeUnavailable
from services.state.rollouts import ABSENT

if TYPE_CHECKING:
    from workers.stage import StageRun

OF_THE_NODE = (ImageError, RuntimeUnavailable)
"""What says of a node that it cannot start an image, and nothing of others."""
MAX_REASON = 500


async def unstarted(run: StageRun, error: Exception) -> dict[str, str]:
    """The field of the record by which the node passes the rollout over for a while, for others to take it.

    Empty: the failure is none of the node's, or no live node is left that has not met it, however long ago.
    """
    cause = error if isinstance(error, OF_THE_NODE) else error.__cause__
    if run.claim.stage is not Stage.INIT or not isinstance(cause, OF_THE_NODE):
        return {}
    try:
        if not await asyncio.to_thread(_others, run):
            return {}
    except redis.RedisError as away:
        run.log.warning("cannot tell whether another node may start the image", error=str(away))
    run.log.warning("handed to another node: this one cannot start the image", error=str(error))
    return {ABSENT + run.process.settings.node: str(error)[:MAX_REASON]}


def _others(run: StageRun) -> set[str]:
    return run.init_nodes() - run.process.store.absent_on(run.claim.rollout_id) - {run.process.settings.node}
