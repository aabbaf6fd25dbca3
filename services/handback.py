"""Gives back the rollouts that wait for a node which ends in order: none of them uses up an attempt.

With `ROLLOUT_SNAPSHOT_DIR` the files of their sandboxes go to other nodes, where they go on; what cannot be
moved begins anew.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import redis
import structlog

from sandbox.errors import SandboxError
from sandbox.host_client import HostClient
from services.dispatch import Dispatcher
from services.queues import Ref, make_celery
from services.settings import Settings
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts.moving import MovingStore, Waiting
from services.state.rollouts.store import RolloutStore
from services.version import STAMP

AT_ONCE = 4
"""Sandboxes whose files are packed at the same time: more of them only share the node's disk."""
CALL_S = 1.0
"""For tool calls to end before their sandboxes stand still, all in the same second; else interrupted."""

log = structlog.get_logger("handback")


def hand_back(
    settings: Settings, node: str, *, within_s: float = 10.0, state_dir: Path | str | None = None
) -> int:
    """Have the rollouts go on elsewhere, or begin anew, whose sandboxes are on this node, before those end;
    their number.

    Call it when the node's workers have ended: what they hold is theirs.

    Args:
        within_s: For their files to leave the node; what has not left by then begins anew.
        state_dir: Of the node's sandbox host; None = as this process' environment has it.

    Raises:
        redis.RedisError, OSError: Redis does not answer; the reaper sees to it later.
    """
    options = {"max_connections": AT_ONCE + 1, "retries": 0}
    with connect(settings.redis_url, **options) as client, make_celery(settings) as app:
        store = RolloutStore(client, settings)
        dispatcher = Dispatcher(app, store)
        mover = Mover(client, settings, node, dispatcher, HostClient(state_dir))
        moved = asyncio.run(mover.move_all(within_s)) if settings.snapshot_dir else 0
        anew = sum(item.action == "restart" for item in store.vacate([node], lost=False))
        # What a worker was killed with waits here once its lease is over: the node is lost to it.
        if not store.on_node(node):
            FleetStore(client).forget_nodes([node])
        dispatcher.ring(anew)
    if moved:
        log.info("rollouts go on elsewhere", node=node, moved=moved, anew=anew)
    return moved + anew


class Mover:
    """Takes rollouts off a node with the files of their sandboxes."""

    def __init__(
        self, client: redis.Redis, settings: Settings, node: str, dispatcher: Dispatcher, host: HostClient
    ) -> None:
        self._settings, self._node, self._dispatcher, self._host = settings, node, dispatcher, host
        self._store = MovingStore(client, settings)
        self._fleet = FleetStore(client)
        self._within_s = math.inf
        self._ends_at = self._calls_end_at = math.inf

    async def move_all(self, within_s: float) -> int:
        """Move what waits for the node, as far as the time allows; how many.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        now = asyncio.get_running_loop().time()
        self._within_s, self._ends_at, self._calls_end_at = within_s, now + within_s, now + CALL_S
        room, tried, left = asyncio.Semaphore(AT_ONCE), set[str](), list[Waiting]()

        async def move(item: Waiting) -> None:
            async with room:
                if await self.move(item):
                    left.append(item)

        try:
            while items := await self._more(tried):  # INIT may make others ready meanwhile
                await asyncio.gather(*map(move, items))
            for item in left:  # now that nobody waits for the node's processors
                await self._release(item)
        except (SandboxError, TimeoutError) as error:
            log.warning("the node's sandbox host does not answer", error=repr(error), moved=len(left))
        return len(left)

    async def _more(self, tried: set[str]) -> list[Waiting]:
        async with asyncio.timeout_at(self._ends_at):
            items = [item for item in await self.movable() if item.rollout_id not in tried]
        tried.update(item.rollout_id for item in items)
        return items

    async def movable(self) -> list[Waiting]:
        """What waits for the node and can go on elsewhere with its sandbox's files alone."""
        items = await asyncio.to_thread(self._store.waiting, self._node)
        handlers = await asyncio.to_thread(self._fleet.handlers) if items else {}
        survive = {name: info.survives for name, info in handlers.items()}
        boxes = {box["id"] for box in await self._host.list()} if items else set()
        return [item for item in items if item.files_suffice(survive) and _sandbox(item) in boxes]

    async def move_one(self, rollout_id: str, to: str) -> bool:
        """Move this one to a node, if it waits here and can go on there; whether it does."""
        items = [item for item in await self.movable() if item.rollout_id == rollout_id]
        moved = bool(items) and await self.move(items[0], to)
        if moved:
            await self._release(items[0])
        return moved

    async def move(self, item: Waiting, to: str | None = None) -> bool:
        """Pack its files and have it wait for a node, None = any; False: it stays, and why is told."""
        bound = log.bind(rollout_id=item.rollout_id, attempt=item.attempt, node=self._node)
        path = Path(self._settings.snapshot_dir).absolute() / item.file_name
        wait_s = min(CALL_S, max(0.0, self._calls_end_at - asyncio.get_running_loop().time()))
        try:
            async with asyncio.timeout_at(self._ends_at):
                # Where this node goes on, so may its sandbox, should somebody take the rollout meanwhile.
                ends = to is None
                info = await self._host.snapshot(_sandbox(item), str(path), wait_s=wait_s, ends=ends)
        except TimeoutError:
            await self._stays(item, f"that was not done within {self._within_s:g} s")
            return False
        except (SandboxError, OSError) as error:
            await self._stays(item, str(error))
            return False
        if not await asyncio.to_thread(self._store.move, item, self._node, path, info.bytes):
            bound.warning("its files do not leave the node: it does not wait there any more")
            await asyncio.to_thread(path.unlink, missing_ok=True)
            return False
        bound.info("its files leave the node", bytes=info.bytes, files=info.files, stood_s=info.seconds)
        ref = Ref(id=item.rollout_id, attempt=item.attempt, node=to, handler=item.handler, stamp=STAMP)
        await asyncio.to_thread(self._dispatcher.send, item.stage, ref)
        return True

    async def _release(self, item: Waiting) -> None:
        try:
            await self._host.release(_sandbox(item), wait=False)
        except SandboxError as error:
            why = "sandbox not released; the host's time limit will end it"
            log.warning(why, rollout_id=item.rollout_id, error=str(error))

    async def _stays(self, item: Waiting, why: str) -> None:
        log.warning("its files cannot leave the node", rollout_id=item.rollout_id, node=self._node, error=why)
        await asyncio.to_thread(self._store.stay, item, self._node, why)


def _sandbox(item: Waiting) -> str:
    return json.loads(item.sandbox)["record"]["id"] if item.sandbox else ""
