"""Each of the examples is played, and together they use every field of the format."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rollout.schema import Limits, Rollout
from rollout.suites.harbor import config
from rollout.trajectory import FinishReason
from tests.harbor.examples import EXAMPLES, Example
from tests.helpers.harbor_tasks import refused, request, said, write_task
from tests.helpers.players import Player
from workers.handlers.base import RunContext
from workers.handlers.harbor import Harbor
from workers.handlers.harbor.task import HarborTask


class Solved(Harbor):
    """Has the task's own solution in the agent's place."""

    uses_model = False

    async def run(self, ctx: RunContext[HarborTask]) -> FinishReason:
        return await self.solve(ctx)


def played(player: Player, example: Example, place: Path) -> Rollout:
    task = request(write_task(place, example.toml, **example.parts), **example.task)
    turns = [*example.turns, "Done."]
    return player.play(Harbor() if example.turns else Solved(), task, turns, limits=Limits())


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_task_does_what_its_fields_say(name: str, player: Player, tmp_path: Path):
    example = EXAMPLES[name]
    done = played(player, example, tmp_path / "task")
    if example.reward is None:
        assert example.warned in refused(done)
        return
    assert done.error is None, done.error
    assert done.reward == example.reward, done.trajectory.artifacts
    assert example.components is None or done.reward_components == example.components
    answers = "\n".join(said(done))
    assert [part for part in example.said if part not in answers] == [], answers
    warnings = "\n".join(done.trajectory.warnings)
    assert example.warned in warnings
    if example.turns:
        assert example.told in done.trajectory.messages[0].text
    made = done.trajectory.artifacts
    kept = {name for name in made if name.startswith("artifacts/")} | {*example.artifacts}
    assert not example.artifacts or {name: made.get(name) for name in kept} == example.artifacts


def test_the_examples_use_every_field(tmp_path: Path):
    assert len(EXAMPLES) >= 30
    used: set[tuple[type, str]] = set()

    def look(part: object) -> None:
        if isinstance(part, config.Part):
            used.update((type(part), name) for name in part.model_fields_set)
            for name in part.model_fields_set:
                look(getattr(part, name, None))
        elif isinstance(part, tuple):
            for item in part:
                look(item)

    for name, example in EXAMPLES.items():
        written = write_task(tmp_path / name, example.toml, **example.parts) / "task.toml"
        look(config.TaskConfig.model_validate(tomllib.loads(written.read_text())))
    parts = [
        kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, config.Part)
    ]
    kinds = [kind for kind in parts if kind.__name__[0] != "_" and kind is not config.Part]
    every = {(kind, name) for kind in kinds for name in kind.model_fields}
    assert sorted(f"{kind.__name__}.{name}" for kind, name in every - used) == []
