"""Environments of foreign packages, each in a process of the Python that its package is installed for.

The process has no network, sees no other process, and of the worker's environment gets next to nothing; what
it starts ends with it. What it prints goes to the log. What it answers is checked data of bounded size.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from rollout.trajectory import Message, ToolCall, Trajectory
from sandbox import paths
from services.settings import settings
from workers import scoring
from workers.agent.parsing import Malformed, ParsedTurn
from workers.errors import HandlerError
from workers.handlers.base import RunContext
from workers.handlers.environments import metrics
from workers.handlers.environments.base import (
    Environment,
    EnvironmentFault,
    EnvironmentHandler,
    EnvironmentLost,
    Opening,
    Step,
    TaskT,
    checked_reward,
)
from workers.handlers.environments.simulator import ask_simulator
from workers.scoring import wire
from workers.scoring.process import Child, warn_of

INSIDE = Path(__file__).parent / "inside"
START_S = 120.0
"""For a process to start and import its package."""
LEAST_RESET_S = 120.0
"""For the beginning and the score of an episode, which may read whole data sets."""
MAX_ANSWER_BYTES = 16 << 20
MAX_ASKED = 1000
"""What an episode may ask of the worker in one call."""
MAX_EPISODES = 100
"""Of one process: packages leak."""
IDLE_S = 300.0
"""How long a process is kept for the next episode: one that imports much takes seconds to start."""
_LENGTH = 4
_PASSED = re.compile(r"PATH|TZ|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Foreign:
    """A foreign package with environments, and the file that speaks with it."""

    name: str
    """Of the virtual environment below `$ROLLOUT_HOME/environments`, and of the kind."""
    adapter: Path
    """A file with a class `Episode`: see `inside/runner.py`."""
    reusable: bool = True
    """Whether a process may have one episode after the other."""
    reads_text: bool = False
    """Whether its episodes have no tools: what looks like a call is then nothing but text."""

    @property
    def python(self) -> Path:
        """Its interpreter.

        Raises:
            HandlerError: It is not installed on this node.
        """
        path = paths.rollout_home() / "environments" / self.name / "bin" / "python"
        if not path.exists():
            raise HandlerError(
                f"the environments of {self.name!r} are not installed on this node ({path} is missing): "
                f"rollout environments install {self.name}"
            )
        return path


async def simulated(payload: dict[str, Any]) -> Any:
    """The words of the simulator on an episode's messages."""
    return await ask_simulator(payload.get("messages"))


class Runner(Child):
    """One process with environments of one kind. One call at a time."""

    noun = "environment"
    crashed = EnvironmentLost
    living = metrics.PROCESSES

    def __init__(self, kind: Foreign) -> None:
        """Start it.

        Raises:
            HandlerError: The package is not installed.
            EnvironmentLost: The machine starts no process.
        """
        self.kind, self.episodes = kind, 0
        self.answer = simulated
        """What the episode asks of us is answered by."""
        config = settings()
        # It goes with the worker, too: nobody ends a process there that waits for its next episode.
        self._home = tempfile.TemporaryDirectory(
            prefix=f"rollout-environment-{kind.name}-", ignore_cleanup_errors=True
        )
        env = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
        env |= dict.fromkeys(("HOME", "TMPDIR"), self._home.name)
        # The same world of the same seed in every process; thread pools reserve address space by the core.
        env |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
        env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        program = [str(kind.python), "-s", str(INSIDE / "runner.py")]
        program += [str(Path(scoring.__file__).parent), str(kind.adapter)]
        network = "network" if kind.name in config.environment_network.split(",") else "none"
        super().__init__(program, str(config.environment_memory_mb), network, env=env, cwd=self._home.name)
        self._channel.setblocking(False)

    async def ready(self) -> None:
        """Wait until the package is imported.

        Raises:
            HandlerError: It cannot be.
            EnvironmentLost: The process died of it, or takes too long.
        """
        hello = await self._exchange(None, START_S, "to start")
        if "error" in hello:
            raise HandlerError(
                f"the environments of {self.kind.name!r} cannot be imported (install them anew: `rollout "
                f"environments install {self.kind.name}`): {hello['error']}\n{hello['traceback']}"
            )
        warn_of(hello.get("result"))

    async def call(self, method: str, timeout_s: float, **arguments: Any) -> Any:
        """What a method of the episode returns. After any exception the process must be killed.

        Raises:
            EnvironmentFault: It raised, or answered with what cannot be read.
            EnvironmentLost: It hangs, died, or ran out of memory.
            StageError: What it asked for failed.
        """
        self.listen(contextvars.copy_context())
        what = f"{self.kind.name}.{method}"
        reply = await self._exchange({"method": method, "arguments": arguments}, timeout_s, what)
        for _ in range(MAX_ASKED):  # each within limits of its own
            if "ask" not in reply:
                break
            if not isinstance(payload := reply["ask"], dict):
                raise EnvironmentFault(f"{what}: the episode asked for {payload!r:.200}")
            reply = await self._exchange({"answer": await self.answer(payload)}, timeout_s, what)
        else:
            raise EnvironmentFault(f"{what}: the episode asked more than {MAX_ASKED} times")
        if reply.get("memory"):
            limit = f"ROLLOUT_ENVIRONMENT_MEMORY_MB={settings().environment_memory_mb}"
            raise EnvironmentLost(f"{what} ran out of memory ({limit}): {reply['error']}")
        if "error" in reply:
            raise EnvironmentFault(f"{what} failed: {reply['error']}\n{reply.get('traceback')}")
        return reply.get("result")

    async def _exchange(self, message: dict[str, Any] | None, timeout_s: float, what: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if message is not None:
                    await loop.sock_sendall(self._channel, wire.encode(message))
                size = int.from_bytes(await self._read(_LENGTH), "big")
                if size > MAX_ANSWER_BYTES:
                    raise EnvironmentFault(f"{what}: an answer of {size} bytes; at most {MAX_ANSWER_BYTES}")
                reply = json.loads(await self._read(size))
        except TimeoutError as error:
            raise EnvironmentLost(f"{what} took longer than {timeout_s:g} s and was killed") from error
        except (EOFError, OSError) as error:
            raise EnvironmentLost(f"{what}: {await asyncio.to_thread(self.obituary)}") from error
        except (ValueError, RecursionError) as error:
            raise EnvironmentFault(f"{what}: no JSON: {error}") from error
        if not isinstance(reply, dict):
            raise EnvironmentFault(f"{what}: answered with {reply!r:.200}")
        return reply

    async def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = await asyncio.get_running_loop().sock_recv(self._channel, min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def end(self) -> None:
        """Kill it, and remove what it wrote."""
        super().end()
        self._home.cleanup()


_idle: dict[Foreign, list[Runner]] = {}
_room: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def _places() -> asyncio.Semaphore:
    """So many processes of this worker may be in use at once."""
    loop = asyncio.get_running_loop()
    if loop not in _room:
        _room.clear()  # a loop has ended, or there was none
        _room[loop] = asyncio.Semaphore(settings().environments)
    return _room[loop]


def _forget(runner: Runner, episodes: int) -> None:
    """End a process that has had no episode since; not on the event loop, for it may have written much."""
    idle = _idle.get(runner.kind, [])
    if runner in idle and runner.episodes == episodes:
        idle.remove(runner)
        asyncio.get_running_loop().run_in_executor(None, runner.end)


def close_idle() -> None:
    """End the processes that wait for an episode; those of a worker end with it anyway."""
    for runner in [runner for runners in _idle.values() for runner in runners]:
        runner.end()
    _idle.clear()


class ProcessEnvironment(Environment):
    """An episode in a process of a foreign package."""

    def __init__(self, kind: Foreign, ctx: RunContext[Any]) -> None:
        super().__init__()
        self._kind, self._step_s = kind, ctx.limits.tool_timeout_s
        self._runner: Runner | None = None
        self._places: asyncio.Semaphore | None = None
        self._last: asyncio.Task[Any] | None = None
        self._fine = False

    async def reset(self, task: Any, seed: int) -> Opening:
        places = _places()
        await places.acquire()
        self._places = places
        idle = _idle.get(self._kind, [])
        while idle and self._runner is None:
            runner = idle.pop()
            if runner.gone:
                await asyncio.to_thread(runner.end)
            else:
                self._runner = runner
        if self._runner is None:
            self._runner = Runner(self._kind)
            await self._runner.ready()
        self._runner.episodes += 1
        self._runner.answer = self.answer
        opening = await self._call("reset", task=task.model_dump(mode="json"), seed=seed)
        if not isinstance(opening, dict):
            raise EnvironmentFault(f"{self._kind.name}.reset answered {opening!r:.200}")
        return Opening(messages_of(opening.get("messages")), opening.get("tools") or [])

    async def step(self, turn: ParsedTurn) -> Step:
        """What the episode answers; a malformed call is answered here, and never comes to it."""
        attempts = [] if self._kind.reads_text else turn.attempts
        calls = [await self.told(call) for call in attempts if isinstance(call, ToolCall)]
        step = Step() if attempts and not calls else await self._step(turn.message.text, calls)
        answers = iter([message for message in step.messages if message.role == "tool"])
        told = []
        for attempt in attempts:
            if isinstance(attempt, Malformed):
                told.append(Message(role="tool", content=f"Error: malformed tool call ({attempt.reason})"))
            elif answer := next(answers, None):
                told.append(answer.model_copy(update={"tool_call_id": attempt.id, "name": attempt.name}))
        step.messages = [*told, *(message for message in step.messages if message.role != "tool")]
        return step

    async def _step(self, text: str, calls: list[dict[str, Any]]) -> Step:
        said = await self._call("step", text=text, calls=calls)
        if not isinstance(said, dict):
            raise EnvironmentFault(f"{self._kind.name}.step answered {said!r:.200}")
        messages = messages_of(said.get("messages"))
        return Step(messages, said.get("reward"), said.get("done", False), said.get("info") or {})

    async def told(self, call: ToolCall) -> dict[str, Any]:
        """A call as the episode gets it."""
        return call.model_dump()

    async def answer(self, payload: dict[str, Any]) -> Any:
        """What the episode asks of the worker. Default: the words of the simulator."""
        return await simulated(payload)

    async def score(self, trajectory: Trajectory) -> float | None:
        messages = [message.to_chat() for message in trajectory.messages]
        said = await self._call("score", messages=messages)
        if said is None:
            return None
        if not isinstance(said, dict) or not isinstance(parts := said.get("parts", {}), dict):
            raise EnvironmentFault(f"{self._kind.name}.score answered {said!r:.200}")
        self.parts = parts
        return checked_reward(said.get("reward"), "the episode")

    async def solution(self) -> list[ParsedTurn] | None:
        """The turns that solve the task, as some packages know them; None = this one does not."""
        said = await self._call("solution")
        try:
            return None if said is None else [_spoken(**turn) for turn in said]
        except (ValueError, TypeError, LookupError) as error:
            raise EnvironmentFault(f"{self._kind.name}: no solution: {error}") from error

    async def _call(self, method: str, **arguments: Any) -> Any:
        assert self._runner is not None
        timeout_s = self._step_s if method == "step" else max(self._step_s, LEAST_RESET_S)
        if self._last is not None:
            # A turn that the time limit cut off is answered yet, and its answer is not that of this call.
            await asyncio.shield(self._last)
        self._fine = False
        with metrics.SECONDS.labels(self._kind.name, method).time():
            self._last = asyncio.create_task(self._runner.call(method, timeout_s, **arguments))
            answer = await asyncio.shield(self._last)
        if isinstance(answer, dict) and "lost" in answer:
            raise EnvironmentLost(f"{self._kind.name}.{method}: {answer['lost']!s:.1000}")
        self._fine = True
        return answer

    async def close(self) -> None:
        if self._last is not None:
            self._last.cancel()
            await asyncio.gather(self._last, return_exceptions=True)
        runner, self._runner = self._runner, None
        if runner is not None:
            keep = self._fine and self._kind.reusable and runner.episodes < MAX_EPISODES
            if keep and sum(map(len, _idle.values())) < settings().environments and not runner.gone:
                _idle.setdefault(self._kind, []).append(runner)
                asyncio.get_running_loop().call_later(IDLE_S, _forget, runner, runner.episodes)
            else:
                await asyncio.to_thread(runner.end)
        if self._places is not None:
            self._places.release()
            self._places = None


class ProcessHandler(EnvironmentHandler[TaskT]):
    """Plays a rollout in a process of a foreign package."""

    foreign: ClassVar[Foreign]

    async def make(self, ctx: RunContext[TaskT]) -> ProcessEnvironment:
        return ProcessEnvironment(self.foreign, ctx)


def _spoken(text: str, calls: list[dict[str, Any]]) -> ParsedTurn:
    """A turn that no model said."""
    message = Message.model_validate({"role": "assistant", "content": text, "tool_calls": calls})
    return ParsedTurn(message, [*message.tool_calls])


def messages_of(said: Any) -> list[Message]:
    """Messages as an episode writes them: dicts, or texts of a user.

    Raises:
        EnvironmentFault: They are none.
    """
    try:
        return [
            Message.model_validate({"role": "user", "content": one} if isinstance(one, str) else one)
            for one in said or []
        ]
    except (ValidationError, TypeError) as error:
        raise EnvironmentFault(f"an environment's messages cannot be read: {str(error)[:500]}") from error
