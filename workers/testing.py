"""For the tests of your own handlers: a rollout in this process, with a fixed list of turns for a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.schema import Rollout, RolloutRequest
from services.settings import Settings
from workers.agent.replay import Action
from workers.handlers.base import AgentHandler
from workers.inprocess import Actions, InProcess, demo_tokenizer


def play(
    handler: AgentHandler[Any],
    task: dict[str, Any],
    actions: Sequence[Action] = (),
    *,
    tokenizer: str | None = None,
    others: Mapping[str, Sequence[Action]] | None = None,
    settings: Settings | None = None,
    **request: Any,
) -> list[Rollout]:
    """INIT, RUN and EVAL of a task, each rollout playing the actions from the first one on.

    Args:
        tokenizer: Path or hub name of one whose model speaks the Hermes form of tool calls; None = the
            demo model's, which is there in a checkout of rollout-service.
        others: What other policies say, by their names, in each conversation from the first one on.
        request: Further fields of a `RolloutRequest`, such as `n` and `limits`.

    Returns:
        The rollouts; each has ended, and carries its error if it failed.

    Raises:
        FileNotFoundError: No tokenizer was named and there is no demo model.
    """
    tokenizer = tokenizer or demo_tokenizer()
    model = Actions(list(actions), tokenizer)
    played = {name: Actions(list(said), tokenizer) for name, said in (others or {}).items()}
    runner = InProcess(handler, model, settings, played)
    return asyncio.run(runner.run(RolloutRequest(handler=handler.name, task=task, **request)))
