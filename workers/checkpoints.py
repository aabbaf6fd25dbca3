"""Checkpoints of a rollout in RUN: a turn is kept for forks while the model is asked for the next one.

The sandbox stands still meanwhile, in which nothing is to be done then. What is not ready when the answer has
come is waited for before anybody acts on it, and that wait is not the agent's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from rollout.schema import Stage
from sandbox.errors import SandboxError
from services.state.checkpoints import Kept
from workers.agent.loop import AgentLoop
from workers.agent.turns import TurnLog
from workers.patience import ask, stopped

if TYPE_CHECKING:
    from workers.stage import StageRun

MOST_S = 120.0
"""For one snapshot: longer than that no rollout stands still for it."""

TAKEN = Counter(
    "rollout_worker_checkpoints",
    "Turns kept for forks, by how the sandbox's files were; `failed`: they were not.",
    ["way"],
    registry=None,
)
BYTES = Counter("rollout_worker_checkpoint_bytes", "Content of files kept for forks.", registry=None)
SECONDS = Histogram(
    "rollout_worker_checkpoint_seconds",
    "For how long sandboxes stood still for it.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    registry=None,
)
COUNTED = (
    *("model_calls", "sampled_tokens", "cached_prompt_tokens", "compactions", "truncated_observations"),
    *("tool_calls", "unknown_tool_calls", "malformed_calls"),
)
"""What the agent loop counts of turns, whoever made them."""
ALL = (TAKEN, BYTES, SECONDS)


def around_calls(
    run: StageRun, agent: AgentLoop, log: TurnLog
) -> Callable[[], AbstractAsyncContextManager[None]]:
    """What the agent loop has around each call of the model: the turn before is kept, where asked for."""
    request = run.claim.request
    # A turn that nobody could go through again leads nowhere.
    if request.checkpoints == "never" or request.agent or Stage.RUN not in run.handler.repeats:
        return nullcontext
    if run.services.checkpoints is None:
        return nullcontext
    return Checkpoints(run, agent, log).around_call


class Checkpoints:
    """Takes those of one RUN."""

    def __init__(self, run: StageRun, agent: AgentLoop, log: TurnLog) -> None:
        self._run, self._agent, self._log = run, agent, log
        origin = run.claim.request.origin
        self._first = origin.turn + 1 if origin else 1
        """Turns before are another rollout's."""
        self._before: list[Kept] | None = None if run.claim.resumed else []
        """Those that a former worker took."""
        self._last: Kept | None = None
        """The last one with files."""
        self._told = False

    @asynccontextmanager
    async def around_call(self) -> AsyncIterator[None]:
        """Keep the turn that was made last, beside the block and not beyond it."""
        turn = self._agent.trajectory.turns
        if turn < self._first or not self._wanted():
            yield
            return
        entries, operations = self._log.place
        counts = {name: self._agent.metrics[name] for name in COUNTED if name in self._agent.metrics}
        kept = Kept(
            turn=turn,
            at=time.time(),
            attempt=self._run.claim.attempt,
            entries=entries,
            operations=operations,
            counts=counts,
        )
        task = asyncio.create_task(self._take(kept))
        try:
            yield
        except BaseException:
            task.cancel()
            await asyncio.wait([task])
            raise
        began = time.monotonic()
        with stopped():
            await task
        self._log.spent_before_s -= time.monotonic() - began  # nor does it count for who goes on

    def _wanted(self) -> bool:
        if self._run.claim.request.checkpoints == "every_turn":
            return True
        segments = [s for chain in self._agent.trajectory.own for s in chain.segments if s.sampled]
        return any(message.tool_calls for message in segments[-1].messages)

    async def _take(self, kept: Kept) -> None:
        run, claim = self._run, self._run.claim
        try:
            await self._log.flush()
            if self._before is None:
                self._before = await ask(run.services.checkpoints.list, claim.rollout_id)
                self._last = next((earlier for earlier in reversed(self._before) if earlier.snapshot), None)
            if any(earlier.turn == kept.turn and not earlier.error for earlier in self._before):
                return
            if claim.sandbox is not None:
                await self._keep_files(kept)
            if await ask(run.services.checkpoints.put, claim.rollout_id, kept, claim.fence):
                TAKEN.labels("failed" if kept.error else kept.way).inc()
        except Exception as error:
            TAKEN.labels("failed").inc()
            run.log.warning("no checkpoint of a turn", turn=kept.turn, error=repr(error))

    async def _keep_files(self, kept: Kept) -> None:
        run, claim, here, last = self._run, self._run.claim, self._run.services.settings.node, self._last
        kept.image = claim.sandbox.image
        if last is not None and (last.operations, last.node) == (kept.operations, here):
            kept.way, kept.node, kept.snapshot = "same", here, last.snapshot
            kept.bytes, kept.files = last.bytes, last.files
            return
        name = f"{claim.rollout_id}.{claim.attempt}.{claim.fence}.{kept.turn}"
        try:
            async with asyncio.timeout(MOST_S):
                info = await run.services.host.snapshot(claim.sandbox.id, name, owner=claim.rollout_id)
        except (SandboxError, TimeoutError) as error:
            kept.error = str(error) or f"the sandbox's files were not kept within {MOST_S:g} s"
            run.log.warning("the files of a turn were not kept", turn=kept.turn, error=kept.error)
            if not self._told:
                self._told = True
                text = f"no checkpoint of turn {kept.turn}: {kept.error}"
                await ask(run.services.note, claim.rollout_id, claim.fence, {}, text)
            return
        kept.way, kept.node, kept.snapshot = info.way, here, info.name
        kept.bytes, kept.files = info.bytes, info.files
        self._last = kept
        BYTES.inc(info.bytes)
        SECONDS.observe(info.seconds)
