"""Sandbox hosts of simulated nodes: they speak the real host's protocol, and a start is a sleep.

`python -m benchmarks._scaling_host DIRECTORY …` serves each directory as `sandbox.host` would. So the
service's own code claims, records and releases sandboxes, and binds rollouts to their nodes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks._handlers import BOOT_VARIABLE
from sandbox import connection
from sandbox.host import SOCKET_NAME


class SimulatedHost:
    """The host of one node."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._owners: dict[str, list[str]] = {}
        self._started = 0

    async def serve(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        server = await asyncio.start_unix_server(self._answer, str(self._state / SOCKET_NAME), backlog=512)
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await connection.receive(reader)) is not None:
                await connection.send(writer, {"ok": True, "result": await self._carry_out(request)})
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"op": "start", "spec": dict(spec)}:
                return await self._start(spec)
            case {"op": "release_owner", "owner": str(owner)}:
                return {"released": len(self._owners.pop(owner, []))}
            case {"op": "stats"}:
                claimed = sum(map(len, self._owners.values()))
                return {"claimed": claimed, "warm": 0, "started": self._started, "pid": os.getpid()}
        return {}

    async def _start(self, spec: dict[str, Any]) -> dict[str, Any]:
        boot_s = float(spec["env"].get(BOOT_VARIABLE, "0"))
        await asyncio.sleep(boot_s)
        self._started += 1
        sandbox = f"{self._started:08x}"
        self._owners.setdefault(spec["owner"], []).append(sandbox)
        return {
            "id": sandbox,
            "socket": str(self._state / f"{sandbox}.sock"),
            # What real nodes have: another one would be warned of in every worker.
            "runtime": "apptainer",
            "node": self._state.name,
            "isolation_missing": [],
            "pid": os.getpid(),
            "start_ms": boot_s * 1e3,
        }


async def _main(directories: list[str]) -> None:
    await asyncio.gather(*(SimulatedHost(Path(directory)).serve() for directory in directories))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
