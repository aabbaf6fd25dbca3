"""A handler in one process: INIT, RUN and EVAL as workers do them, without Redis, Celery and a gateway.

For writing and debugging handlers, and for their tests. The stages are the service's own; only what stands
between them is missing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import structlog

from rollout.schema import Backend, ErrorInfo, Rollout, RolloutRequest, SandboxRecord, Stage, State
from rollout.trajectory import Trajectory
from sandbox.host_client import HostClient
from services.launch.paths import DEMO_CHECKPOINT
from services.settings import Settings
from services.state.backends.store import Placed
from services.state.rollouts import payloads
from services.state.rollouts.reading import rollout_of
from services.state.rollouts.store import Claim
from services.state.tenants import DEFAULT_TENANT, Tenant
from workers.agent.llm import session
from workers.agent.placement import Placements, PromptSizes
from workers.agent.replay import Action, ReplayRouter
from workers.agent.router import BackendRouter, Router
from workers.agent.turns import TurnLog
from workers.errors import InfrastructureError, TaskError
from workers.evaluate import evaluate
from workers.handlers.base import AgentHandler
from workers.held import Held
from workers.init import init
from workers.run import run_turns
from workers.stage import Body, StageRun, releases, work

log = structlog.get_logger("inprocess")

BODIES: dict[Stage, Body] = {Stage.INIT: init, Stage.RUN: run_turns, Stage.EVAL: evaluate}
AFTER = {State.READY: Stage.RUN, State.EVALUATING: Stage.EVAL}


def demo_tokenizer() -> str:
    """Path of the demo model's tokenizer.

    Raises:
        FileNotFoundError: The package was installed without its source tree.
    """
    if not DEMO_CHECKPOINT.is_dir():
        raise FileNotFoundError(f"{DEMO_CHECKPOINT} is missing: name a tokenizer (a path or hub name)")
    return str(DEMO_CHECKPOINT)


class Actions:
    """A fixed list of turns; every rollout plays it from its start."""

    def __init__(self, actions: Sequence[Action], tokenizer: str) -> None:
        self._actions, self._tokenizer = actions, tokenizer

    def router(self, claim: Claim, http: aiohttp.ClientSession) -> Router:
        return ReplayRouter(self._actions, self._tokenizer)


class Server(Placements):
    """One LLM server, and the placement where there is nothing else to choose from, and no Redis."""

    def __init__(self, backend: Backend, wait_s: float = 30.0) -> None:
        """`wait_s`: seconds to try again while it does not answer."""
        super().__init__(None)
        self._placed, self._wait_s = Placed("ok", backend, ""), wait_s

    def router(self, claim: Claim, http: aiohttp.ClientSession) -> Router:
        return BackendRouter(claim.rollout_id, self, http, wait_s=self._wait_s)

    async def acquire(self, rollout_id: str, **options: Any) -> Placed:
        return self._placed

    async def extend(self, rollout_id: str, tokens: int, exclude: tuple[str, ...] = (), **_: Any) -> Placed:
        taken = self._placed.backend is not None and self._placed.backend.id in exclude
        return Placed("none", None, "it failed") if taken else self._placed

    async def release(self, rollout_id: str, slot: str = "") -> bool:
        return True

    async def suspect(self, backend_id: str) -> None:
        log.warning("the LLM server failed a call", backend=backend_id)

    async def trusted(self, backend_id: str, version: str | None, policy: str) -> bool:
        return True

    async def kept(self, backend: Backend) -> bool | None:
        return True


Model = Actions | Server
"""Where the turns come from; its `router` is the way of one RUN to them."""


class InProcess:
    """Runs rollouts of one handler here."""

    def __init__(
        self,
        handler: AgentHandler[Any],
        model: Model | None = None,
        settings: Settings | None = None,
        others: Mapping[str, Model] | None = None,
    ) -> None:
        """
        Args:
            model: None is enough for a handler that uses none.
            others: Where turns of other policies come from, by their names.
        """
        self.handler = handler
        self.model = model or Actions([], "")
        self.settings = settings or Settings()
        self.others = others or {}

    async def run(self, request: RolloutRequest) -> list[Rollout]:
        """The `n` rollouts of a request, one after the other; each has ended, whatever went wrong in it."""
        group_id, ids = request.rollout_ids()
        async with session() as http:
            return [
                await _Episode(self, http, request, group_id, index, rollout_id).run()
                for index, rollout_id in enumerate(ids)
            ]


class _Episode:
    """One rollout: what its record in Redis is to a worker, and the `StageServices` that its stages ask."""

    def __init__(
        self,
        runner: InProcess,
        http: aiohttp.ClientSession,
        request: RolloutRequest,
        group_id: str,
        index: int,
        rollout_id: str,
    ) -> None:
        self.settings = runner.settings
        self.host = HostClient()
        self.prompts = PromptSizes()
        self.checkpoints = None
        self._runner, self._http, self._request = runner, http, request
        self._group_id, self._index, self._id = group_id, index, rollout_id
        self._created = time.time()
        self._attempt, self._stage = 1, Stage.INIT
        self._fields: dict[str, str] = {}
        self._trajectory: Trajectory | None = None
        self._seconds: dict[str, float] = defaultdict(float)

    # -- what a stage asks for -----------------------------------------------------------------

    def handler(self, request: RolloutRequest) -> AgentHandler[Any]:
        if request.agent is not None:
            raise TaskError("agent: a program drives turns where there is a whole service alone")
        return self._runner.handler

    def router(self, claim: Claim, policy: str | None = None, slot: str = "") -> Router:
        own = self._runner.model if policy in (None, claim.request.policy) else None
        model = own or self._runner.others.get(policy)
        if model is None:
            raise InfrastructureError(f"no backend of policy {policy!r}: name one with `others`")
        return model.router(claim, self._http)

    def turn_log(self, claim: Claim, held: Held) -> TurnLog:
        return TurnLog(held=held)

    def tenant(self, name: str) -> Tenant:
        return Tenant(name=name)

    def note(self, rollout_id: str, fence: int, fields: dict[str, str], text: str) -> bool:
        self._fields |= fields
        log.info(text, rollout_id=rollout_id)
        return True

    def other_nodes(self, rollout_id: str, stage: Stage = Stage.INIT) -> tuple[set[str], set[str]]:
        return set(), set()

    # -- from stage to stage -------------------------------------------------------------------

    async def run(self) -> Rollout:
        """All stages, and attempts, to the end."""
        while True:
            began = time.monotonic()
            run = StageRun(self, Held(self._id, self._stage), self._claim())
            outcome = await work(run, BODIES[self._stage])
            if outcome is None or releases(run, outcome):
                await run.clean_up()
            self._seconds[self._stage.value] += time.monotonic() - began
            if asyncio.current_task().cancelling() or outcome is None:
                raise asyncio.CancelledError
            self._fields |= outcome.fields
            self._trajectory = outcome.trajectory or self._trajectory
            if outcome.next == "again" and self._attempt < self._request.limits.max_attempts:
                log.warning("another attempt", rollout_id=self._id, error=self._fields.get("error"))
                self._attempt, self._stage = self._attempt + 1, Stage.INIT
                self._fields, self._trajectory = {}, None
                await asyncio.sleep(outcome.delay_s or 0)
            elif outcome.next in AFTER:
                self._stage = AFTER[State(outcome.next)]
            else:
                return self._ended(State.FAILED if outcome.next == "again" else State(outcome.next))

    def _read(self, name: str) -> Any:
        return json.loads(self._fields[name]) if self._fields.get(name) else None

    def _claim(self) -> Claim:
        box = self._read("sandbox")
        error = self._read("error")
        return Claim(
            rollout_id=self._id,
            group_id=self._group_id,
            index=self._index,
            attempt=self._attempt,
            stage=self._stage,
            fence=self._attempt,
            deadline_in_s=self._request.limits.deadline_s - (time.time() - self._created),
            request=self._request,
            sandbox=SandboxRecord.model_validate(box["record"]) if box else None,
            sandbox_socket=box["socket"] if box else None,
            node=self._fields.get("node"),
            tenant=DEFAULT_TENANT,
            error=ErrorInfo.model_validate(error) if error else None,
            finish_reason=self._fields.get("finish_reason"),
            metrics=self._read("metrics") or {},
            stored_trajectory=payloads.encode_trajectory(self._trajectory) if self._trajectory else None,
        )

    def _ended(self, state: State) -> Rollout:
        now = time.time()
        times = {"created": self._created, "updated": now, "finished": now}
        times["deadline"] = self._created + self._request.limits.deadline_s
        times |= {f"ms_{stage}": seconds for stage, seconds in self._seconds.items()}
        record = self._fields | {name: str(round(1000 * seconds)) for name, seconds in times.items()}
        record |= {"group": self._group_id, "index": str(self._index), "handler": self._request.handler}
        record |= {"state": state.value, "attempt": str(self._attempt)}
        rollout = rollout_of(self._id, record, [], self._request)
        return rollout.model_copy(update={"trajectory": self._trajectory})
