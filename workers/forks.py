"""A fork in the stages: it begins with turns of another rollout, and the files that its sandbox then had.

INIT starts the sandbox and copies the turns into the fork's own log. So RUN is a takeover: it goes through
them, and asks the model behind the last one. A fork that cannot begin where it was asked to fails.
"""

from __future__ import annotations

import functools
from typing import Any

from rollout.schema import Origin, Stage
from rollout.schema.trajectory import FinishReason
from sandbox.errors import ImageError, SnapshotError
from services.state.checkpoints import given
from services.state.rollouts.store import Claim
from workers.agent.loop import AgentLoop
from workers.agent.turns import RunDiverged, TurnLog
from workers.checkpoints import COUNTED
from workers.errors import InfrastructureError, StageError, StageTimeout, TaskError
from workers.handlers.base import InitContext
from workers.patience import ask
from workers.stage import StageRun

SHARED = "shared_"
"""How metrics begin that were counted in the shared turns, until RUN ends."""


class TurnGone(InfrastructureError):
    """What was kept of the turn is not there any more, and no attempt brings it back."""

    retry = False


class FilesElsewhere(ImageError):
    """Another node has the files: it is the one to start the sandbox."""


async def init(run: StageRun, ctx: InitContext[Any]) -> None:
    """INIT of a fork, in place of the handler's.

    Raises:
        TurnGone: What the fork begins with is not there any more.
        TaskError: The handler's rollouts cannot be gone on with; or the tenant may not use the image.
        FilesElsewhere, SandboxError: The sandbox was not started here.
    """
    claim, origin, store = run.claim, run.claim.request.origin, run.services.checkpoints
    name = run.handler.name
    fits = Stage.RUN in run.handler.repeats and getattr(run.handler, "survives", "files") == "files"
    if not fits or (store and not await ask(store.files_suffice, origin.rollout)):
        raise TaskError(f"{name}: it cannot be forked, for files and turns are not all that it needs")
    what = f"turn {origin.turn} of rollout {origin.rollout}"
    kept = store and await ask(store.get, origin.rollout, origin.turn, claim.tenant)
    if kept is None:
        raise TurnGone(f"{what} is not kept (any more): fork a turn that GET …/checkpoints lists")
    if kept.error:
        raise TurnGone(f"the files of {what} were not kept: {kept.error}")
    if kept.snapshot is not None:
        if kept.node != run.services.settings.node:
            nodes, _ = await ask(run.services.other_nodes, claim.rollout_id)
            if kept.node not in nodes:
                why = "does no INIT now: fork again once it is back"
                raise TurnGone(f"node {kept.node}, which keeps the files of {what}, {why}")
            raise FilesElsewhere(f"the files of {what} are on node {kept.node}")
        try:
            await ctx.sandboxes.boot(ctx, image=kept.image, snapshot=kept.snapshot)
        except SnapshotError as error:
            raise TurnGone(f"node {kept.node} cannot begin with the files of {what}: {error}") from error
    copy = functools.partial(store.copy_turns, kept, origin, claim.rollout_id, claim.attempt, claim.fence)
    if not await ask(copy):
        raise TurnGone(f"{what} is not kept any more: its rollout has begun anew, or was forgotten")
    ctx.metrics |= {SHARED + name: by for name, by in kept.counts.items()}
    text = f"begins behind {what}"
    run.log.info(text, origin=origin.rollout, turn=origin.turn)
    await ask(run.services.note, claim.rollout_id, claim.fence, {}, text)


def place(claim: Claim, log: TurnLog) -> int | str:
    """What tells a rollout's seeds from others': its index, of a fork also where it began and its group.

    Raises:
        RunDiverged: Redis has lost what a fork shares, without which it would begin from nothing.
    """
    if (origin := claim.request.origin) is None:
        return claim.index
    if log.turns < origin.turn:
        raise RunDiverged(f"Redis has lost some of the {origin.turn} turns that the fork begins with")
    return f"{claim.index}/{origin.rollout}/{origin.turn}/{claim.group_id}"


def tell_shared(origin: Origin, agent: AgentLoop, reason: FinishReason) -> StageError:
    """Have a fork's trajectory and metrics say what it shares; why it fails if that is all."""
    branch, metrics = given(agent.trajectory, origin), agent.metrics
    for name in COUNTED:
        if by := metrics.pop(SHARED + name, 0):
            metrics[name] = max(0, metrics.get(name, 0) - by)
    metrics |= {"shared_turns": branch.turn, "shared_tokens": branch.sampled_tokens}
    if reason is FinishReason.TIME_LIMIT:
        return StageTimeout("run_timeout_s passed before the fork had said anything of its own")
    return TaskError(
        f"RUN ended with {reason.value} before the fork had said anything of its own: {branch.turn} shared "
        f"turns with {branch.sampled_tokens} ids count for its limits; raise them, or fork an earlier one"
    )
