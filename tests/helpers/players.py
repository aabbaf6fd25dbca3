"""Many rollouts in this process on one event loop, so that they share its scorer processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jsonschema import Draft202012Validator

from rollout.schema import Rollout, RolloutRequest
from services.settings import Settings
from tests.helpers.stack import ROOT
from workers.agent.replay import Action, Call
from workers.handlers.base import AgentHandler
from workers.inprocess import Actions, InProcess, demo_tokenizer
from workers.scoring import pool, score


class Player:
    """Plays fixed turns; see `workers.testing.play`."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner

    def play(
        self,
        handler: AgentHandler[Any],
        task: dict[str, Any],
        actions: Sequence[Action | str],
        **request: Any,
    ) -> Rollout:
        """One rollout; a string is a turn that only says it. The gateway must take the task, too."""
        assert complaints(handler, task) == []
        turns = [Action(content=action) if isinstance(action, str) else action for action in actions]
        rollout_request = RolloutRequest(handler=handler.name, task=task, **request)
        playing = InProcess(handler, Actions(turns, demo_tokenizer()), Settings())
        (rollout,) = self._runner.run(playing.run(rollout_request))
        return rollout

    def score(self, function: str, payloads: Sequence[Any], timeout_s: float = 120.0) -> list[Any]:
        """Many calls of a scorer, in order."""

        async def calls() -> list[Any]:
            return await asyncio.gather(*(score(function, case, timeout_s=timeout_s) for case in payloads))

        return self._runner.run(calls())


def complaints(handler: AgentHandler[Any], task: dict[str, Any]) -> list[str]:
    """What the gateway has against a task: it checks with the handler's JSON schema."""
    errors = Draft202012Validator(handler.info().task_schema).iter_errors(task)
    return [error.message for error in errors]


def finish(message: str, content: str = "") -> Action:
    """The turn that ends a rollout with a message."""
    return Action(content=content, tool_calls=[Call(name="finish", arguments={"message": message})])


@contextmanager
def player() -> Iterator[Player]:
    """A player whose scorer ends with it; there is but one, for its imports take seconds."""
    real_pool, pool._pool = pool._pool, pool.ScorerPool.of(Settings(scorers=1))
    try:
        with asyncio.Runner() as runner:
            yield Player(runner)
    finally:
        pool.close()
        pool._pool = real_pool


def documented_row(handler: str) -> dict[str, Any]:
    """The example row of a handler's page in docs/."""
    page = (ROOT / "docs" / f"{handler}.md").read_text()
    (row,) = re.findall(rf"<!-- tested: {handler} -->\n```json\n(.*?)```", page, re.DOTALL)
    return json.loads(row)
