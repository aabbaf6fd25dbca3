"""What `HostClient` can ask about snapshots."""

from __future__ import annotations

import abc
from typing import Any

from sandbox.spec import SnapshotInfo

SNAPSHOT_TIMEOUT_S = 900.0
FORGET_TIMEOUT_S = 60.0


class SnapshotRequests(abc.ABC):
    """Of the node's own and of packed ones."""

    @abc.abstractmethod
    async def _request(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One request to the host."""

    async def snapshot(
        self, sandbox_id: str, name: str, *, owner: str = "", wait_s: float = 0.0, ends: bool = False
    ) -> SnapshotInfo:
        """Keep its files, working directory and variables, to start others with (`SandboxSpec.snapshot`).

        Args:
            name: Of the node's own; or the path of a file to be, `.tar`, below `ROLLOUT_SNAPSHOT_DIR`.
            owner: For :meth:`forget_snapshots`.
            wait_s: For so long what goes on in it may still run before it is abandoned.
            ends: It is not to go on: once that has worked its processes stay stopped.

        Raises:
            SnapshotError: It cannot be. Then, and whatever else is raised, the sandbox goes on as if nothing
                had been.
        """
        how = {"name": name, "owner": owner, "wait_s": wait_s, "ends": ends}
        request = {"op": "snapshot", "id": sandbox_id, **how}
        return SnapshotInfo.from_json(await self._request(request, wait_s + SNAPSHOT_TIMEOUT_S))

    async def forget_snapshots(self, owner: str) -> int:
        """Remove the node's own of that owner; returns how many."""
        request = {"op": "forget_snapshots", "owner": owner}
        return (await self._request(request, FORGET_TIMEOUT_S))["forgotten"]
