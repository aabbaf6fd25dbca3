"""Sandboxes as the stages use them: booted in INIT, talked to in RUN, gone after EVAL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import structlog

from rollout.schema import SandboxRecord
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import BindSpec, Limits, SandboxSpec
from services.settings import Settings
from services.state.rollouts import RolloutStore

if TYPE_CHECKING:
    from workers.handlers.base import InitContext

log = structlog.get_logger("sandboxes")

LIFETIME_MARGIN_S = 120.0
"""The sandbox's own limit lies so far behind the rollout's deadline: it is a backstop, not a timer."""


def owner_of(rollout_id: str, attempt: int) -> str:
    """Under what name the host keeps the sandboxes of an attempt."""
    return f"{rollout_id}/{attempt}"


_announced: set[str] = set()


def _announce(runtime: str, missing: list[str]) -> None:
    """Say once a process, loudly, that sandboxes run under less than the container runtime."""
    if runtime != "apptainer" and runtime not in _announced:
        _announced.add(runtime)
        log.warning(f"SANDBOXES RUN UNDER {runtime.upper()}, WITHOUT: {', '.join(missing)}")


class Sandboxes:
    """Boots and releases the sandboxes of one attempt on this node."""

    def __init__(
        self,
        host: HostClient,
        store: RolloutStore,
        settings: Settings,
        *,
        rollout_id: str,
        attempt: int,
        fence: int,
        deadline_in_s: float,
    ) -> None:
        self._host = host
        self._store = store
        self._settings = settings
        self._rollout_id = rollout_id
        self._owner = owner_of(rollout_id, attempt)
        self._fence = fence
        self._deadline_in_s = deadline_in_s
        self.booted = False

    async def boot(
        self,
        ctx: InitContext[Any],
        *,
        image: str | None = None,
        network: str = "none",
        env: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        limits: Limits | None = None,
        binds: Sequence[BindSpec] = (),
        ipython: bool = False,
    ) -> SandboxClient:
        """Boot the rollout's sandbox and note it in the record.

        Args:
            image: Name, SIF or directory; None = the deployment's default.
            network: `none` or `host`.
            env: Variables of the shell.
            files: Put into the workspace: relative path → text.
            limits: None, and what it leaves open = what the node gives.
            binds: Places of the node to show inside, which its operator allows.
            ipython: Start the kernel now, in the background.

        Raises:
            SandboxError: It did not start; the message carries the runtime's own words.
        """
        runtime = ctx.request.sandbox_runtime or self._settings.sandbox_runtime
        self.booted = True
        info = await self._host.start(
            SandboxSpec(
                image=image or self._settings.sandbox_image,
                runtime=runtime,
                network=network,
                env=env or {},
                files=files or {},
                limits=limits or Limits(),
                binds=tuple(binds),
                ipython=ipython,
                owner=self._owner,
                max_lifetime_s=self._deadline_in_s + LIFETIME_MARGIN_S,
            )
        )
        _announce(info.runtime, info.isolation_missing)
        record = SandboxRecord(
            id=info.id,
            runtime=info.runtime,
            image=image or self._settings.sandbox_image,
            node=self._settings.node,
            isolation_missing=info.isolation_missing,
            start_ms=info.start_ms,
        )
        # Noted before it is used: should this worker die now, the reaper knows where to clean up.
        await note_sandbox(self._store, self._rollout_id, self._fence, record, info.socket)
        ctx.sandbox = SandboxClient(info.socket)
        return ctx.sandbox

    async def release(self) -> None:
        """End every sandbox of the attempt; harmless without one."""
        await self._host.release_owner(self._owner)


async def note_sandbox(
    store: RolloutStore, rollout_id: str, fence: int, record: SandboxRecord, socket: str
) -> None:
    """Write where a rollout's sandbox lives."""
    box = json.dumps({"record": record.model_dump(), "socket": socket})
    await asyncio.to_thread(store.note, rollout_id, fence, {"sandbox": box, "node": record.node})
