"""A rollout whose sandbox's files have left their node: here they become a sandbox, and its stage goes on.

Only once that is noted in the record is it here. Whatever ends this worker before, another one begins again
with the same files.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.schema import RolloutRequest, Stage, State
from sandbox.client import SandboxClient
from sandbox.errors import ImageError, NodeShort, RuntimeUnavailable, SnapshotError
from services.state.rollouts.store import ABSENT, Claim, Finish
from services.state.turns.entries import Sampled, decode
from workers.errors import InfrastructureError, StageTimeout
from workers.patience import ask, time_limit
from workers.stage import MAX_REASON, PASSED_ON, Body, StageRun

OF_THE_NODE = (ImageError, NodeShort, RuntimeUnavailable, SnapshotError)
"""What says of a node that it cannot start a sandbox from the files, and perhaps nothing of others."""
MOST_NODES = 3
"""That try files which cannot be begun with here: it is more likely that they are damaged."""


@dataclass
class _Holder:
    request: RolloutRequest
    sandbox: SandboxClient | None = None


def carried(body: Body) -> Body:
    """A stage's own work, behind the arrival of files that it begins with; the trajectory tells of moves."""

    async def carry(run: StageRun) -> Finish:
        """The stage.

        Raises:
            InfrastructureError: The files are gone or damaged, or no node can start a sandbox from them.
            StageTimeout: `Limits.init_timeout_s` passed before they had arrived.
            Exception: As the body has it.
        """
        if run.claim.files:
            try:
                await _arrive(run)
            except OF_THE_NODE as error:
                return await _go_on_elsewhere(run, error)
        elif run.claim.sandbox and run.claim.sandbox.node != run.services.settings.node:
            # A message that was sent again while its files were under way: it is at home elsewhere by now.
            run.claim = replace(run.claim, node=run.claim.sandbox.node)
            return Finish(PASSED_ON if run.claim.stage is Stage.RUN else "handback")
        if run.can_pass_on and run.has_sandbox and run.claim.request.agent is None:
            run.held.moving = False if run.handler.survives == "files" else None
        outcome = await body(run)
        if run.claim.moves:
            _tell(run.claim, outcome)
        return outcome

    return carry


async def _arrive(run: StageRun) -> None:
    claim, here = run.claim, run.services.settings.node
    path, left = Path(claim.files["path"]), claim.files["node"]
    moves = (*claim.moves, _moved(claim, here))
    limit = claim.request.limits.init_timeout_s
    late = f"the files that left node {left} had not arrived after init_timeout_s = {limit:g}"
    try:
        async with time_limit(limit, StageTimeout, late):
            # What a worker that was lost in the middle of this has left here.
            await run.sandboxes.release()
            client = await run.sandboxes.boot(
                _Holder(claim.request),
                image=claim.files["image"],
                snapshot=str(path),
                fields={"files": "", "moves": json.dumps(moves)},
            )
    finally:
        if run.sandboxes.own is not None:
            # Also where it is interrupted while that is noted: its message comes here again.
            run.claim = replace(claim, node=here)
    await client.close()
    box, socket = run.sandboxes.own, client.address.text()
    run.claim = replace(run.claim, files=None, moves=moves, sandbox=box, sandbox_socket=socket)
    run.log.info("its files have arrived", left=left, bytes=claim.files["bytes"], sandbox=box.id)
    try:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    except OSError as error:
        run.log.warning("packed files not deleted; a chore will", path=str(path), error=str(error))


async def _go_on_elsewhere(run: StageRun, error: Exception) -> Finish:
    """Hand the rollout to a node that has not tried, which costs it nothing.

    Raises:
        InfrastructureError: All have tried, or enough.
    """
    claim, stage = run.claim, run.claim.stage
    others, untried = await ask(run.services.other_nodes, claim.rollout_id, stage)
    tried = 1 + len(others - untried)
    back = PASSED_ON if stage is Stage.RUN else "handback"
    if isinstance(error, NodeShort) and not untried:  # there may be room again
        await asyncio.sleep(run.services.settings.retry_delay_s)
        return Finish(back)
    if not untried or (isinstance(error, SnapshotError) and tried >= MOST_NODES):
        left = claim.files["node"]
        raise InfrastructureError(f"the files that left node {left} are of no use: {error}") from error
    run.claim = replace(claim, node=random.choice(sorted(untried)))
    run.log.warning("its files go on to another node", node=run.claim.node, error=str(error))
    fields = {ABSENT + run.services.settings.node: str(error)[:MAX_REASON]}
    return Finish(back, fields)


def _moved(claim: Claim, node: str) -> str:
    turns = sum(isinstance(entry, Sampled) for entry in decode(claim.turns))
    when = f"after turn {turns}" if turns else "before its first turn"
    if claim.stage is Stage.EVAL:
        when = "before it was scored"
    lost = "processes of its sandbox were lost, files, directory and variables were kept"
    return f"moved to node {node} {when}: {lost}"


def _tell(claim: Claim, outcome: Finish) -> None:
    """Have the trajectory say what moves have done to it."""
    trajectory = outcome.trajectory
    if trajectory is None and outcome.next in (State.COMPLETED, State.TIMED_OUT):
        trajectory = claim.trajectory()
    if trajectory is not None and (untold := [it for it in claim.moves if it not in trajectory.warnings]):
        trajectory.warnings += untold
        outcome.trajectory = trajectory
