"""A handler in one process: INIT, RUN and EVAL as workers do them, without Redis, Celery and a gateway.

For writing and debugging handlers, and for their tests. The stages are the service's own; only what stands
between them is missing.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

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
from workers.evaluate import evaluate
from workers.handlers.base import AgentHandler
from workers.held import Held
from workers.init import init
from workers.run import run_turns
from workers.stage import Body, StageRun, work

log = structlog.get_logger("inprocess")

BODIES: dict[Stage, Body] = {Stage.INIT: init, Stage.RUN: run_turns, Stage.EVAL: evaluate}
AFTER = {State.READY: Stage.RUN, State.EVALUATING: Stage.EVAL}
MakeRouter = Callable[[Claim], Router]


def demo_tokenizer() -> str:
    """Path of the demo model's tokenizer.

    Raises:
        FileNotFoundError: The package was installed without its source tree.
    """
    if not DEMO_CHECKPOINT.is_dir():
        raise FileNotFoundError(f"{DEMO_CHECKPOINT} is missing: name a tokenizer (a path or hub name)")
    return str(DEMO_CHECKPOINT)


class Model(ABC):
    """Where the turns come from."""

    @abstractmethod
    def routers(self) -> AbstractAsyncContextManager[MakeRouter]:
        """While open, gives what makes the router of a RUN."""


class Actions(Model):
    """A fixed list of turns; every rollout plays it from its start."""

    def __init__(self, actions: Sequence[Action], tokenizer: str) -> None:
        self._actions, self._tokenizer = actions, tokenizer

    @asynccontextmanager
    async def routers(self) -> AsyncIterator[MakeRouter]:
        yield lambda claim: ReplayRouter(self._actions, self._tokenizer)


class Server(Model):
    """One LLM server."""

    def __init__(self, backend: Backend, wait_s: float = 30.0) -> None:
        """`wait_s`: seconds to try again while it does not answer."""
        self._placement, self._wait_s = _OneBackend(backend), wait_s

    @asynccontextmanager
    async def routers(self) -> AsyncIterator[MakeRouter]:
        async with session() as http:
            yield lambda claim: BackendRouter(claim.rollout_id, self._placement, http, wait_s=self._wait_s)


class _OneBackend(Placements):
    """Placement where there is nothing to choose from, and no Redis."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(None)
        self._placed = Placed("ok", backend, "")

    async def acquire(self, rollout_id: str, **options: Any) -> Placed:
        return self._placed

    async def extend(self, rollout_id: str, tokens: int, exclude: tuple[str, ...] = (), **_: Any) -> Placed:
        taken = self._placed.backend is not None and self._placed.backend.id in exclude
        return Placed("none", None, "it failed") if taken else self._placed

    async def release(self, rollout_id: str) -> bool:
        return True

    async def suspect(self, backend_id: str) -> None:
        log.warning("the LLM server failed a call", backend=backend_id)

    async def trusted(self, backend_id: str, version: str | None) -> bool:
        return True


class _Services:
    """What a stage asks of its worker, for one handler and without a fleet; a `StageServices`."""

    def __init__(self, handler: AgentHandler[Any], settings: Settings, make_router: MakeRouter) -> None:
        self.settings = settings
        self.host = HostClient()
        self.prompts = PromptSizes()
        self.router = make_router
        self.notes: dict[str, str] = {}
        """Facts that stages wrote of the rollout."""
        self._handler = handler

    def handler(self, name: str) -> AgentHandler[Any]:
        return self._handler

    def tenant(self, name: str) -> Tenant:
        return Tenant(name=name)

    def note(self, rollout_id: str, fence: int, fields: dict[str, str], text: str) -> bool:
        self.notes |= fields
        log.info(text, rollout_id=rollout_id)
        return True

    def other_nodes(self, rollout_id: str) -> tuple[set[str], set[str]]:
        return set(), set()


class InProcess:
    """Runs rollouts of one handler here."""

    def __init__(
        self, handler: AgentHandler[Any], model: Model | None = None, settings: Settings | None = None
    ) -> None:
        """`model`: None is enough for a handler that uses none."""
        self._handler = handler
        self._model = model or Actions([], "")
        self._settings = settings or Settings()

    async def run(self, request: RolloutRequest) -> list[Rollout]:
        """The `n` rollouts of a request, one after the other; each has ended, whatever went wrong in it."""
        group_id, ids = request.rollout_ids()
        async with self._model.routers() as make_router:
            return [
                await _Episode(request, group_id, index, rollout_id).run(
                    _Services(self._handler, self._settings, make_router)
                )
                for index, rollout_id in enumerate(ids)
            ]


class _Episode:
    """One rollout between its stages: what its record in Redis is to a worker."""

    def __init__(self, request: RolloutRequest, group_id: str, index: int, rollout_id: str) -> None:
        self.request = request
        self.group_id, self.index, self.id = group_id, index, rollout_id
        self.created = time.time()
        self.attempt, self.stage = 1, Stage.INIT
        self.fields: dict[str, str] = {}
        self.trajectory: Trajectory | None = None
        self.seconds: dict[str, float] = defaultdict(float)

    async def run(self, services: _Services) -> Rollout:
        """All stages, and attempts, to the end."""
        while True:
            began = time.monotonic()
            run = StageRun(services, Held(self.id, self.stage), self._claim())
            outcome = await work(run, BODIES[self.stage])
            self.seconds[self.stage.value] += time.monotonic() - began
            if asyncio.current_task().cancelling() or outcome is None:
                raise asyncio.CancelledError
            self.fields |= services.notes | outcome.fields
            self.trajectory = outcome.trajectory or self.trajectory
            if outcome.next == "again" and self.attempt < self.request.limits.max_attempts:
                log.warning("another attempt", rollout_id=self.id, error=self.fields.get("error"))
                self.attempt, self.stage = self.attempt + 1, Stage.INIT
                self.fields, self.trajectory = {}, None
                services.notes.clear()
                await asyncio.sleep(outcome.delay_s or 0)
            elif outcome.next in AFTER:
                self.stage = AFTER[State(outcome.next)]
            else:
                return self._ended(State.FAILED if outcome.next == "again" else State(outcome.next))

    def _read(self, name: str) -> Any:
        return json.loads(self.fields[name]) if self.fields.get(name) else None

    def _claim(self) -> Claim:
        box = self._read("sandbox")
        error = self._read("error")
        return Claim(
            rollout_id=self.id,
            group_id=self.group_id,
            index=self.index,
            attempt=self.attempt,
            stage=self.stage,
            fence=self.attempt,
            deadline_in_s=self.request.limits.deadline_s - (time.time() - self.created),
            request=self.request,
            sandbox=SandboxRecord.model_validate(box["record"]) if box else None,
            sandbox_socket=box["socket"] if box else None,
            node=self.fields.get("node"),
            tenant=DEFAULT_TENANT,
            error=ErrorInfo.model_validate(error) if error else None,
            finish_reason=self.fields.get("finish_reason"),
            metrics=self._read("metrics") or {},
            stored_trajectory=payloads.encode_trajectory(self.trajectory) if self.trajectory else None,
        )

    def _ended(self, state: State) -> Rollout:
        millis = {
            "created": self.created,
            "updated": time.time(),
            "finished": time.time(),
            "deadline": self.created + self.request.limits.deadline_s,
        } | {f"ms_{stage}": seconds for stage, seconds in self.seconds.items()}
        record = self.fields | {name: str(round(1000 * seconds)) for name, seconds in millis.items()}
        record |= {"group": self.group_id, "index": str(self.index), "handler": self.request.handler}
        record |= {"state": state.value, "attempt": str(self.attempt)}
        rollout = rollout_of(self.id, record, [], self.request)
        return rollout.model_copy(update={"trajectory": self.trajectory})
