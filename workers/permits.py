"""What a rollout's tenant may have a sandbox use, checked when the sandbox is asked for.

The gateway checks what a request says; a handler's code may ask for something else.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from sandbox.spec import SandboxSpec
from services.state.tenants import Tenant
from workers.errors import TaskError

REMEDY = "ask the operator for it (`rollout tenants set`)"


def check_sandbox(spec: SandboxSpec, tenant: Tenant, *, runtime: str | None) -> None:
    """Refuse a sandbox that the tenant may not have.

    Args:
        runtime: The runtime that the request names; None = the deployment's, which is the operator's choice.

    Raises:
        TaskError: Its image, runtime or a mount is not among the tenant's.
    """
    if not tenant.may_use("images", spec.image):
        raise _refused(tenant, "image", spec.image, "images")
    if runtime is not None and not tenant.may_use("runtimes", runtime):
        raise _refused(tenant, "sandbox_runtime", runtime, "runtimes")
    for bind in spec.binds:
        if tenant.mounts is not None and not _below(bind.source, tenant.mounts):
            raise _refused(tenant, "mount", bind.source, "mounts")


def _below(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path of this node is at or below one that a pattern names, wherever links lead."""
    real = PurePosixPath(os.path.realpath(path))
    allowed = [os.path.realpath(pattern) for pattern in patterns]
    return any(fnmatchcase(str(place), pattern) for place in (real, *real.parents) for pattern in allowed)


def _refused(tenant: Tenant, what: str, value: str, limit: str) -> TaskError:
    allowed = ", ".join(getattr(tenant, limit)) or "none"
    return TaskError(
        f"{what} {value!r}: tenant {tenant.name!r} may not use it; allowed {limit}: {allowed}; {REMEDY}"
    )
