"""One rollout against fake engines that lie, all in this process: real HTTP, real stages, no Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout.schema import Backend, Rollout, RolloutRequest
from rollout.trajectory import Message
from services.state.backends.store import Placed
from tests.helpers.engine_model import EngineModel
from tests.helpers.fake_engine import FakeEngine, create_app
from tests.helpers.fake_language import FakeLanguage
from tests.helpers.stack import CHECKPOINT
from workers.handlers import AgentHandler, EvalContext, Reward
from workers.inprocess import InProcess, Server

LANGUAGE = FakeLanguage(first_id=20, vocab_size=300, answer_tokens=(10, 30))
"""Plain text of the demo model's vocabulary."""
TURN_TOKENS = 64
WAIT_S = 0.2


class Generous(AgentHandler):
    """Gives a reward for whatever the engine said."""

    name = "generous"

    def prompt(self, task: Any) -> list[Message]:
        return [Message(role="user", content="1")]

    async def evaluate(self, ctx: EvalContext) -> Reward:
        return Reward(1.0)


class Fleet(Server):
    """Some backends; the first that has not failed the turn."""

    def __init__(self, backends: list[Backend]) -> None:
        super().__init__(backends[0], WAIT_S)
        self._backends = backends
        self.suspected: list[str] = []

    async def extend(self, rollout_id: str, tokens: int, exclude: tuple[str, ...] = (), **_: Any) -> Placed:
        backend = next((backend for backend in self._backends if backend.id not in exclude), None)
        return Placed("ok", backend, "failover") if backend else Placed("none", None, "all failed")

    async def suspect(self, backend_id: str) -> None:
        self.suspected.append(backend_id)

    async def trusted(self, backend_id: str, version: str | None, policy: str) -> bool:
        return False


@asynccontextmanager
async def served(engines: list[FakeEngine]) -> AsyncIterator[Fleet]:
    """A fleet of these engines, each at an address of its own."""
    runners, backends = [], []
    for number, engine in enumerate(engines):
        runner = web.AppRunner(create_app(engine), handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        backends.append(
            Backend(
                id=f"engine{number}",
                url=f"http://127.0.0.1:{port}",
                model="fake",
                tokenizer=str(CHECKPOINT),
                max_model_len=2048,
                policy_version="default",
                api="completions" if engine.completions_only else "generate",
            )
        )
        runners.append(runner)
    try:
        yield Fleet(backends)
    finally:
        for runner in runners:
            await runner.cleanup()


@dataclass(frozen=True)
class Told:
    """What became of a rollout."""

    rollout: Rollout
    lies: int
    """How often the first engine lied."""
    suspected: list[str]
    """Backends whose health was to be looked into, a word for each failed call."""


def engine(lie: str | None = None, **options: Any) -> FakeEngine:
    """A fake engine; with `lie` it answers with nothing else."""
    made = FakeEngine(EngineModel(language=LANGUAGE), max_model_len=2048, **options)
    if lie is not None:
        made.fault("lie", name=lie)
    return made


async def rollout_at(lie: str, *, honest: bool) -> Told:
    """A rollout that begins at an engine which lies; `honest`: there is another one."""
    liar = engine(lie)
    request = RolloutRequest(
        handler="generous", sampling={"max_tokens": TURN_TOKENS}, limits={"max_turns": 1, "max_attempts": 1}
    )
    async with served([liar, engine()] if honest else [liar]) as fleet:
        (rollout,) = await InProcess(Generous(), fleet).run(request)
    return Told(rollout, liar.lies_told, fleet.suspected)
