"""Rollouts whose sandboxes' files leave a node: what waits there, and what goes on elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from services.settings import Settings
from services.state import keys
from services.state.scripts import Operations


@dataclass(frozen=True)
class Waiting:
    """A rollout that waits for a node's workers, under the fence of its last claim."""

    rollout_id: str
    attempt: int
    fence: int
    stage: str
    """It waits for this one."""
    begun: bool
    """Whether RUN has been at work on it."""
    sandbox: str
    """As the record has it (JSON); empty where it has none."""
    handler: str
    survives: str
    """What INIT said of this task: `files`, `nothing`, or nothing else than its handler."""
    run_ms: int
    """Milliseconds that RUN has been at work on it."""
    driven: bool
    """Whether a program in its sandbox drives it."""

    def files_suffice(self, by_handler: dict[str, str]) -> bool:
        """Whether its sandbox's files are enough to go on with; see `AgentHandler.survives`."""
        return not self.driven and (self.survives or by_handler.get(self.handler)) == "files"

    @property
    def file_name(self) -> str:
        """Of its packed files."""
        return f"{self.rollout_id}.{self.attempt}.{self.fence}.tar"


class MovingStore:
    """Takes rollouts off a node; see `moving.lua`."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        lease_ms, requeue_ms = int(settings.lease_s * 1000), int(settings.requeue_s * 1000)
        self._do = Operations(client, "rollouts/moving", REQUEUE_MS=requeue_ms, LEASE_MS=lease_ms)

    def waiting(self, node: str) -> list[Waiting]:
        """Rollouts that wait for this node's workers; what is lost first where there is no time is last."""
        items = [Waiting(**item) for item in self._do("waiting", node=node)["waiting"]]
        return sorted(items, key=lambda item: (item.begun, item.run_ms), reverse=True)

    def move(self, item: Waiting, node: str, path: Path, size: int) -> bool:
        """Its files are in a file that other nodes see: it waits for any of them. False: it does not wait for
        the node under that fence any more, and nothing is changed.
        """
        image = json.loads(item.sandbox)["record"]["image"]
        files = json.dumps({"path": str(path), "node": node, "bytes": size, "image": image})
        return self._do("move", id=item.rollout_id, node=node, fence=item.fence, files=files, bytes=size)

    def stay(self, item: Waiting, node: str, why: str) -> None:
        """Note why its files could not leave the node."""
        self._do("stay", id=item.rollout_id, node=node, fence=item.fence, why=why)

    def needed(self, paths: Sequence[Path]) -> set[Path]:
        """Those of the packed files, by their names, that rollouts have yet to go on with."""
        with self._redis.pipeline(transaction=False) as pipe:
            for path in paths:
                pipe.hmget(keys.record(path.name.rsplit(".", 3)[0]), "files", "finished")
            answers: list[list[Any]] = pipe.execute()
        pairs = zip(paths, answers, strict=True)
        return {
            path
            for path, (files, finished) in pairs
            if files and not finished and Path(json.loads(files)["path"]).name == path.name
        }
