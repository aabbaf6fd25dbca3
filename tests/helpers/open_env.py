"""Servers of OpenEnv's own classes: `python open_env.py PORT KIND` (text, moves, tools), by its Python."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    word: str


class Move(Action):
    x: int
    y: int


class Seen(Observation):
    text: str = ""


class Guess(Environment):
    """The word is `w` and the seed; three tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, hint="", **kwargs):
        self._word, self._state = f"w{seed}", State(step_count=0)
        return Seen(text=f"Guess the word. {hint}".strip())

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if getattr(action, "x", None) is not None:
            return Seen(text=f"at {action.x},{action.y}", reward=float(action.x), done=action.x == 1)
        if action.word == "nan":
            return Seen(text="odd", reward=float("nan"), done=True)
        if action.word == "crash":
            raise RuntimeError("the world ended")
        right = action.word == self._word
        text = "right" if right else f"no, it is {self._word}"
        return Seen(text=text, reward=1.0 if right else 0.25, done=right)

    @property
    def state(self):
        return self._state


class Adding(MCPEnvironment):
    """A tool that adds, and a reward by step."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("adding")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"ready": True})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("tools only")

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    port, kind = int(sys.argv[1]), sys.argv[2]
    if kind == "tools":
        app = create_fastapi_app(Adding, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    else:
        app = create_fastapi_app(Guess, Word if kind == "text" else Move, Seen, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
