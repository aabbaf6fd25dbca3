"""Sandboxes as the stages use them: booted in INIT, talked to in RUN, gone after EVAL.

The gateway checks what a request asks of them; a handler's code may ask for something else, so what the
rollout's tenant may have is checked once more when a sandbox is asked for.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import structlog

from rollout.schema import RolloutRequest, SandboxRecord
from sandbox.client import SandboxClient
from sandbox.errors import SandboxError, SandboxRequestError
from sandbox.host_client import HostClient
from sandbox.spec import BindSpec, Limits, SandboxInfo, SandboxSpec
from services.settings import Settings
from services.state.rollouts.store import Claim
from services.state.tenants import Tenant
from workers.errors import AgentFault, InfrastructureError, TaskError, from_sandbox
from workers.patience import ask

log = structlog.get_logger("sandboxes")

REMEDY = "ask the operator for it (`rollout tenants set`)"

LIFETIME_MARGIN_S = 120.0
"""The sandbox's own limit lies so far behind the rollout's deadline: it is a backstop, not a timer."""


class SandboxServices(Protocol):
    """What `Sandboxes` ask of their worker; see `TenantStore.get` and `RolloutStore.note`."""

    settings: Settings
    host: HostClient

    def tenant(self, name: str) -> Tenant: ...
    def note(self, rollout_id: str, fence: int, fields: dict[str, str], text: str) -> bool: ...


class Holder(Protocol):
    """Who asks for sandboxes: the context of a stage."""

    request: RolloutRequest
    sandbox: SandboxClient | None


def owner_of(rollout_id: str, attempt: int) -> str:
    """Under what name the host keeps the sandboxes of an attempt."""
    return f"{rollout_id}/{attempt}"


@cache
def _announce(runtime: str, *missing: str) -> None:
    """Say once a process, loudly, that sandboxes run under less than the container runtime."""
    if runtime != "apptainer":
        log.warning(f"SANDBOXES RUN UNDER {runtime.upper()}, WITHOUT: {', '.join(missing)}")


class Sandboxes:
    """Boots and releases the sandboxes of one attempt on this node."""

    def __init__(self, services: SandboxServices, claim: Claim) -> None:
        self._services = services
        self._host = services.host
        self._settings = services.settings
        self._claim = claim
        self._owner = owner_of(claim.rollout_id, claim.attempt)
        self.booted = False
        self.own: SandboxRecord | None = None
        """The rollout's own sandbox, where it was booted here."""
        self.shown: tuple[BindSpec, ...] = ()
        """Places of the operator's that the own sandbox shows, whatever the tenant may mount."""

    async def boot(
        self,
        ctx: Holder,
        *,
        image: str | None = None,
        network: str = "none",
        env: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        limits: Limits | None = None,
        binds: Sequence[BindSpec] = (),
        ipython: bool = False,
        snapshot: str = "",
        fields: dict[str, str] | None = None,
    ) -> SandboxClient:
        """Boot the rollout's sandbox and note it in the record.

        Args:
            image: As `SandboxSpec` has it, and so are those not named here; None = the deployment's default.
            limits: None, and what it leaves open = what the node gives.
            fields: Of the record, to be written with the note.

        Raises:
            TaskError: The rollout's tenant may not have such a sandbox.
            SandboxError: It did not start; the message carries the runtime's own words.
        """
        more = {"env": env or {}, "files": files or {}, "ipython": ipython, "snapshot": snapshot}
        spec = await self._spec(ctx, image, network, limits, binds=tuple(binds), **more)
        info = await self._start(replace(spec, binds=(*self.shown, *spec.binds)))
        record = self.own = SandboxRecord(
            id=info.id,
            runtime=info.runtime,
            image=image or self._settings.sandbox_image,
            node=self._settings.node,
            isolation_missing=info.isolation_missing,
            start_ms=info.start_ms,
        )
        box = json.dumps({"record": record.model_dump(), "socket": info.socket})
        took = "" if record.start_ms is None else f" in {record.start_ms:.0f} ms"
        text = f"sandbox {record.id} started{took} on {record.node}: {record.runtime}, image {record.image}"
        fields = {"sandbox": box, "node": record.node} | (fields or {})
        # Noted before it is used: should this worker die now, the reaper knows where to clean up.
        ours = await ask(self._services.note, self._claim.rollout_id, self._claim.fence, fields, text)
        if snapshot and not ours:  # what it begins with is for whoever has the rollout
            raise InfrastructureError("the rollout is not this worker's any more")
        ctx.sandbox = SandboxClient(info.socket)
        return ctx.sandbox

    @asynccontextmanager
    async def fresh(
        self,
        ctx: Holder,
        *,
        image: str | None = None,
        network: str = "none",
        limits: Limits | None = None,
        workspace_of: SandboxClient | None = None,
    ) -> AsyncIterator[SandboxClient]:
        """A sandbox beside the rollout's own, which nothing of the agent has touched; it ends with the block.

        Args:
            ctx, image, network, limits: As `boot` has them.
            workspace_of: Sandbox whose workspace is copied into this one; its processes are ended first.

        Raises:
            TaskError: The rollout's tenant may not have such a sandbox.
            SandboxError: It did not start.
            AgentFault: The workspace cannot be copied.
            StageError: A call on it failed: blame as the host says how it ended.
        """
        with tempfile.TemporaryDirectory(prefix="rollout-workspace-") as kept:
            copy = Path(kept) / "workspace"
            if workspace_of is not None:
                await workspace_of.exec(["true"])  # nobody is left who could change it meanwhile
                try:
                    await workspace_of.download(".", copy)
                except SandboxRequestError as error:
                    raise AgentFault(f"the workspace cannot be copied: {error}") from error
            info = await self._start(await self._spec(ctx, image, network, limits))
            client = SandboxClient(info.socket)
            try:
                if workspace_of is not None:
                    await client.upload(copy, ".")
                yield client
            except SandboxError as error:
                raise from_sandbox(error, await self._host.fate(info.id)) from error
            finally:
                await client.close()
                await self._host.release(info.id, wait=False)

    async def warm(
        self, ctx: Holder, *, image: str | None = None, network: str = "none", limits: Limits | None = None
    ) -> None:
        """Have the node start a sandbox like `fresh(…)` ahead; returns before it is ready."""
        await self._host.keep_warm(await self._spec(ctx, image, network, limits))

    async def _spec(
        self, ctx: Holder, image: str | None, network: str, limits: Limits | None, **more: Any
    ) -> SandboxSpec:
        spec = SandboxSpec(
            image=image or self._settings.sandbox_image,
            runtime=ctx.request.sandbox_runtime or self._settings.sandbox_runtime,
            network=network,
            limits=limits or Limits(),
            owner=self._owner,
            max_lifetime_s=self._claim.deadline_in_s + LIFETIME_MARGIN_S,
            **more,
        )
        tenant = await ask(self._services.tenant, self._claim.tenant)
        check_sandbox(spec, tenant, runtime=ctx.request.sandbox_runtime)
        return spec

    async def _start(self, spec: SandboxSpec) -> SandboxInfo:
        self.booted = True
        info = await self._host.start(spec)
        _announce(info.runtime, *info.isolation_missing)
        return info

    async def release(self, *, all_of_attempt: bool = True) -> None:
        """End every sandbox of the attempt and of those before it, or the own one that was booted here;
        harmless without one."""
        if all_of_attempt:
            await release_attempts(self._host, self._claim.rollout_id, self._claim.attempt)
        elif self.own is not None:
            await self._host.release(self.own.id)


async def release_attempts(host: HostClient, rollout_id: str, attempt: int) -> None:
    """End the sandboxes of a rollout's attempts up to this one on the node of `host`.

    An EVAL whose worker was lost is done again, as the next attempt, on the sandbox that RUN had: that one,
    and what the lost worker had booted, belong to an attempt before.
    """
    for number in range(1, attempt + 1):
        await host.release_owner(owner_of(rollout_id, number))


def check_sandbox(spec: SandboxSpec, tenant: Tenant, *, runtime: str | None) -> None:
    """Refuse a sandbox that the tenant may not have.

    Args:
        runtime: The runtime that the request names; None = the deployment's, which is the operator's choice.

    Raises:
        TaskError: Its image, runtime or a mount is not among the tenant's.
    """
    if not tenant.may_use("images", spec.image):
        raise _refusal(tenant, "image", spec.image, "images")
    if runtime is not None and not tenant.may_use("runtimes", runtime):
        raise _refusal(tenant, "sandbox_runtime", runtime, "runtimes")
    for bind in spec.binds:
        if tenant.mounts is not None and not _is_below(bind.source, tenant.mounts):
            raise _refusal(tenant, "mount", bind.source, "mounts")


def _is_below(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path of this node is at or below one that a pattern names, wherever links lead."""
    real = PurePosixPath(os.path.realpath(path))
    allowed = [os.path.realpath(pattern) for pattern in patterns]
    return any(fnmatchcase(str(place), pattern) for place in (real, *real.parents) for pattern in allowed)


def _refusal(tenant: Tenant, field: str, value: str, limit: str) -> TaskError:
    allowed = ", ".join(getattr(tenant, limit)) or "none"
    return TaskError(
        f"{field} {value!r}: tenant {tenant.name!r} may not use it; allowed {limit}: {allowed}; {REMEDY}"
    )
