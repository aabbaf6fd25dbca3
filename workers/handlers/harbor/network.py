"""What of a network a part of a task gets: none, or the way through the deployment's proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sandbox.client import SandboxClient


@asynccontextmanager
async def way_out(
    box: SandboxClient, mode: str | None, hosts: Sequence[str] = ()
) -> AsyncIterator[dict[str, str]]:
    """The variables (`HTTP_PROXY`, …; {} = there is no network) by which programs of the sandbox get out.

    Args:
        mode: `no-network`, `allowlist` or `public`, of the agent, the verifier or the environment; None = none.
        hosts: Of the allow-list.

    Raises:
        TaskError: `allowlist`, and the deployment lets tasks have no network.
    """
    raise NotImplementedError
    yield {}
