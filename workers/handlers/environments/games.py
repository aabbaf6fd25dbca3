"""Games and puzzles of packages that answer text with text: `gem` and `textarena`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from workers.handlers.environments.base import EnvironmentTask
from workers.handlers.environments.process import INSIDE, Foreign, ProcessHandler


class GemTask(EnvironmentTask):
    """An environment of GEM."""

    env: str = Field(min_length=1, max_length=200)
    """As `gem.make` knows it: `game:GuessTheNumber-v0-easy`, `rg:leg_counting`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `gem.make`."""


class Gem(ProcessHandler[GemTask]):
    """Plays in an environment of GEM: it reads what the model says, and each step's reward is summed."""

    name = "gem"
    Task = GemTask
    foreign = Foreign("gem", INSIDE / "gem.py", reads_text=True)


class TextArenaTask(EnvironmentTask):
    """A game of TextArena."""

    env: str = Field(min_length=1, max_length=200)
    """As `textarena.make` knows it: `GuessTheNumber-v0`, `TicTacToe-v0`."""
    players: int = Field(default=1, ge=1, le=15)
    player: int = Field(default=0, ge=0)
    """Which of them the agent is."""
    opponents: list[str] = Field(default_factory=list, max_length=1000)
    """Moves that the others play in turn, each from the first on; none = the deployment's simulator plays."""
    wrapped: bool = False
    """Whether each observation is that of the package's own wrappers, with the history in it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `textarena.make`."""

    @model_validator(mode="after")
    def _one_of_them(self) -> TextArenaTask:
        if self.player >= self.players:
            raise ValueError(f"player {self.player} of {self.players}: they count from 0")
        return self


class TextArena(ProcessHandler[TextArenaTask]):
    """Plays a game of TextArena, alone or against others; the reward is the agent's at its end."""

    name = "textarena"
    Task = TextArenaTask
    foreign = Foreign("textarena", INSIDE / "textarena.py", reads_text=True)
