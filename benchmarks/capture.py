"""What it costs a program to be captured, how much one process bears, and that the engine saw what is stored.

* `call_ratio_to_own_loop`: a captured call at turn 20 over HTTP, against the same turn of our own loop (its
  tool's answer appended and logged, the model asked, the turn logged), both on a real Redis and on an engine
  in a process of its own that answers at once. Conversations with the same texts do their turns in turn;
  turns 18 to 22 count. Medians of all rounds, with a first prompt of 2 kB and with one of 76 kB, a turn being
  1 kB, whole and streamed; the largest ratio is the figure. `p99_ratio_to_own_loop`: of the 99th percentiles.
* `streams_held`: streamed calls of as many sessions that are all in the engine at once, by one process.
  `held_mb`: what it (RSS) and Redis (`used_memory`) take then, or after the last end where that is more.
* `calls_per_s`: answered by one process, 32 sessions at once on connections of their own, each 20 turns.
* `attach_ratio_200_to_20_turns`: what is done with a body until the ids for the engine are there: the dialect
  reads it, the tree attaches it, the codec appends its tail; at turn 200 against turn 20, first prompt of
  76 kB. In this process and of its processor time, dialects in turn, two turns before and behind too; the
  largest ratio of the four.
* `drift`: prompts that differ in any id from what is stored of the call, of all calls above.

All of Qwen3's tokenizer.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from pydantic import BaseModel

from benchmarks import harness
from benchmarks._talk import COMMAND, DIALECTS, SAID, TOOL, TURN, Shape, Talk
from rollout.arrays import pack_ids
from rollout.schema import Backend, RolloutRequest, SamplingParams, new_id
from rollout.trajectory import Message, ToolCall
from services.capture.dialects.anthropic import Anthropic
from services.capture.dialects.chat import Chat
from services.capture.dialects.gemini import Gemini
from services.capture.dialects.responses import Responses
from services.capture.history import Histories
from services.capture.matching import after
from services.capture.prompts import Prompt, Prompts
from services.capture.tree import Tree
from services.state import keys
from services.state.backends.store import BackendStore
from services.state.capture.nodes import ROOT, Node, decode
from services.state.capture.session import MODEL, Session, key_of
from services.state.capture.store import CaptureStore
from services.state.redis import LoopConnection, connect
from services.state.turns.entries import to_json
from services.state.turns.store import TurnStore
from tests.helpers import published
from tests.helpers.llm_servers import free_port, running_server
from tests.helpers.stack import Process, healthy, wait_until
from workers.agent.codec import load_codec
from workers.agent.llm import session
from workers.agent.loop import AgentLoop
from workers.agent.placement import Placements
from workers.agent.router import BackendRouter
from workers.agent.tools import Observation, Tool, ToolContext
from workers.agent.turns import TurnLog
from workers.held import Held

SMALL, LARGE = Shape(2_000), Shape(76_000)
CONTEXT = 131_072
FIRST, LAST = 18, 22
"""The turns that stand for turn 20."""
AT_ONCE, SHORT_AT_ONCE = 32, 4
"""Sessions of `calls_per_s`."""
TURNS, SHORT_TURNS = 20, 5
SHORT_STREAMS = 10
EVERY_S = 5.0
"""Between two ids of a stream that is held: next to nothing but to be there."""
PATHS = {"chat": "/v1/chat/completions"}


class Shell(Tool):
    """A tool that answers what it is told to, at once."""

    name = TOOL

    class Args(BaseModel):
        command: str

    def __init__(self, talk: Talk) -> None:
        self.talk = talk

    @property
    def description(self) -> str:
        return self.talk.description

    def spec(self) -> dict[str, Any]:
        return {"type": "function", "function": {**super().spec()["function"]}}

    async def call(self, args: Any, ctx: ToolContext) -> Observation:
        return Observation(self.talk.answer())


class World:
    """A Redis, an engine, a capture process; and what programs and our own loop need of them."""

    def __init__(self, redis_url: str, engine_url: str, tokenizer: Path, process: Process, url: str) -> None:
        self.client = connect(redis_url)
        self.engine_url, self.url, self.process = engine_url, url, process
        fields = {"tokenizer": str(tokenizer), "max_model_len": CONTEXT, "capacity_tokens": 1 << 40}
        self.backend = Backend(id="scripted", model="scripted", url=engine_url, **fields)
        BackendStore(self.client).put(self.backend)
        self.placements = Placements(BackendStore(self.client), LoopConnection(redis_url))
        self.turns, self.store = TurnStore(self.client), CaptureStore(self.client)
        self.secret = self.store.secret()
        self.sessions: list[str] = []

    def rollout(self) -> str:
        """One in RUN, which nobody else looks after."""
        rollout_id = new_id()
        hour = int(1000 * (time.time() + 3600))
        record = {"fence": 1, "owner": "w", "attempt": 1, "deadline": hour, "state": "running"}
        self.client.hset(keys.record(rollout_id), mapping=record)
        return rollout_id

    async def captured(self) -> dict[str, str]:
        """A new session; the headers of its program."""
        rollout_id = self.rollout()
        await self.placements.acquire(rollout_id, tokens=1, fence=1)
        described = self.backend.model_dump_json(exclude_defaults=True)
        sampling = SamplingParams().model_dump_json()
        self.store.open(rollout_id, 1, 1, Session("external", described, 0, sampling=sampling))
        self.sessions.append(rollout_id)
        key = key_of(self.secret, MODEL, rollout_id, 1)
        return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def capture_process(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    async def drift(self, http: aiohttp.ClientSession) -> tuple[int, int]:
        """Prompts that are others than what is stored, and how many were compared."""
        async with http.get(f"{self.engine_url}/prompts") as answer:
            seen = (await answer.json())["prompts"]
        differing = compared = 0
        for rollout_id in self.sessions:
            tree = Tree(decode(self.store.nodes(rollout_id, 1)))
            for place, node in enumerate(tree.nodes):
                compared += 1
                stored = hashlib.sha256(tree.packed_prompt(place)).hexdigest()
                differing += seen.get(node.call_id) != stored
        return differing, compared


@contextmanager
def world(tokenizer: Path, turn: list[int]) -> Iterator[World]:
    """All processes, fresh."""
    argv = [sys.executable, "-m", "benchmarks._scripted", "--turn", ",".join(map(str, turn))]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        harness.private_redis() as redis,
        running_server("scripted", argv, {}, harness.PATIENCE_S) as engine,
    ):
        command = ["env", f"ROLLOUT_REDIS_URL={redis.url}", "ROLLOUT_LOG_LEVEL=WARNING", sys.executable]
        process = Process(
            "capture", [*command, "-m", "services.capture", "--port", str(port)], Path(directory)
        )
        try:
            wait_until(lambda: healthy(url), harness.PATIENCE_S, "capture", process)
            yield World(redis.url, engine.url, tokenizer, process, url)
        finally:
            process.stop()


# -- single calls --------------------------------------------------------------------------------------


class Captured:
    """A program on its own connection."""

    def __init__(
        self, world: World, http: aiohttp.ClientSession, talk: Talk, *, stream: bool = False
    ) -> None:
        self.world, self.http, self.talk, self.stream = world, http, talk, stream

    async def begin(self) -> None:
        self.headers = await self.world.captured()

    async def play(self) -> float:
        """Seconds of a turn: the call alone, for the body is there already and its tool is done at once."""
        body = self.talk.body("chat", self.stream)
        began = time.perf_counter()
        url = self.world.url + PATHS["chat"]
        async with self.http.post(url, data=body, headers=self.headers) as response:
            said = await response.read()
        taken = time.perf_counter() - began
        if response.status != 200 or (self.stream and not said.endswith(b"data: [DONE]\n\n")):
            raise RuntimeError(f"HTTP {response.status}: {said[-500:]!r}")
        self.talk.answer()
        return taken


class Own:
    """Our own loop, as RUN has it, in this process."""

    def __init__(self, world: World, http: aiohttp.ClientSession, talk: Talk) -> None:
        self.world, self.http, self.talk = world, http, talk

    async def begin(self) -> None:
        self.id = self.world.rollout()
        log = TurnLog((), self.write, Held(self.id, None, fence=1))
        router = BackendRouter(self.id, self.world.placements, self.http, fence=1)
        self.agent = AgentLoop(RolloutRequest(handler="swe"), 0, router, [Shell(self.talk)], True, log)
        self.turn: Any = None

    async def write(self, at: int, entries: Sequence[bytes]) -> dict[str, Any]:
        return await self.world.placements.send(self.world.turns.append(self.id, 1, 1, at, entries))

    async def play(self) -> float:
        """Seconds of a turn: what the tool answered is appended, and the model asked."""
        began = time.perf_counter()
        if self.turn is None:
            await self.agent.start(self.talk.messages)
        else:
            self.agent.observe(self.turn, self.observed)
        self.turn, _ = await self.agent.query()
        # The tool takes no time, but its answer is logged.
        self.observed = await self.agent.act(self.turn, None)
        return time.perf_counter() - began


async def single_calls(world: World, options: harness.Options) -> dict[str, Any]:
    """Spreads of single calls, with a small first prompt and with a large one."""
    report: dict[str, Any] = {}
    async with session() as http:
        for name, shape in (("small", SMALL), ("large", LARGE)):
            times: dict[str, list[float]] = {"own": [], "captured": [], "streamed": []}
            for number in range(options.rounds):
                sides = {
                    "own": Own(world, http, Talk(shape, number)),
                    "captured": Captured(world, http, Talk(shape, number)),
                    "streamed": Captured(world, http, Talk(shape, number), stream=True),
                }
                for side in sides.values():
                    await side.begin()
                for turn, side in harness.in_turns(sides, LAST):
                    taken = await sides[side].play()
                    if turn + 1 >= FIRST:
                        times[side].append(taken)
            report[name] = compared(times)
            harness.say(f"{name}: {report[name]}")
    return {"calls": report}


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Spreads of all sides, and the ratios to our own loop."""
    spreads: dict[str, Any] = {}
    for side, taken in times.items():
        p50_ms, p99_ms = statistics.median(taken) * 1e3, harness.percentile(taken, 0.99) * 1e3
        spreads[side] = {"p50_ms": p50_ms, "p99_ms": p99_ms, "n": len(taken)}
    for spread in spreads.values():
        for share in ("p50", "p99"):
            spread[f"{share}_ratio"] = spread[f"{share}_ms"] / spreads["own"][f"{share}_ms"]
    return spreads


# -- many calls ----------------------------------------------------------------------------------------


async def many_calls(world: World, shape: Shape, at_once: int, turns: int) -> dict[str, float]:
    """Calls a second of so many programs at once, by the clock and by capture's own processor time."""

    async def program(number: int) -> None:
        talk = Talk(shape, number)
        async with session() as http:
            side = Captured(world, http, talk)
            await side.begin()
            ready.append(number)
            await start.wait()
            for _ in range(turns):
                await side.play()

    ready: list[int] = []
    start = asyncio.Event()
    process = world.capture_process()
    programs = [asyncio.create_task(program(number)) for number in range(at_once)]
    while len(ready) < at_once:
        await asyncio.sleep(0.01)
    before, began = harness.cpu_seconds([process.pid]), time.perf_counter()
    start.set()
    await asyncio.gather(*programs)
    seconds, cpu_s = time.perf_counter() - began, harness.cpu_seconds([process.pid]) - before
    calls = at_once * turns
    return {"calls_per_s": calls / seconds, "calls_per_cpu_s": calls / max(cpu_s, 0.01), "calls": calls}


# -- streams that are held -----------------------------------------------------------------------------


async def held_streams(world: World, shape: Shape, count: int) -> dict[str, Any]:
    """Have so many streamed calls in the engine at once, and see what that takes."""
    process = world.capture_process()
    async with session() as http:
        warm = Captured(world, http, Talk(shape, -1), stream=True)
        await warm.begin()
        await warm.play()
        at_rest = process.memory_info().rss / 1e6
        await _hold(world, http, EVERY_S)
        sides = [Captured(world, http, Talk(shape, number), stream=True) for number in range(count)]
        for side in sides:
            await side.begin()
        began = time.perf_counter()
        calls = [asyncio.create_task(side.play()) for side in sides]
        held = 0
        while held < count:
            await asyncio.sleep(0.5)
            async with http.get(f"{world.engine_url}/prompts") as answer:
                held = (await answer.json())["held"]
            if broken := [call for call in calls if call.done()]:
                await broken[0]
            if time.perf_counter() - began > harness.PATIENCE_S:
                raise TimeoutError(f"{held} of {count} streams were begun")
        begun_s = time.perf_counter() - began
        await asyncio.sleep(2 * EVERY_S)
        held_mb, redis_mb = process.memory_info().rss / 1e6, world.client.info("memory")["used_memory"] / 1e6
        await _hold(world, http, None)
        await asyncio.gather(*calls)
        after_mb = process.memory_info().rss / 1e6
        redis_after_mb = world.client.info("memory")["used_memory"] / 1e6
        differing, prompts = await world.drift(http)
    return {
        "streams": count,
        "begun_s": begun_s,
        "rss_mb_at_rest": at_rest,
        "rss_mb": held_mb,
        "redis_mb": redis_mb,
        "rss_mb_after": after_mb,
        "redis_mb_after": redis_after_mb,
        "most_mb": max(held_mb + redis_mb, after_mb + redis_after_mb),
        "drift": differing,
        "prompts_compared": prompts,
    }


async def _hold(world: World, http: aiohttp.ClientSession, every_s: float | None) -> None:
    body = {} if every_s is None else {"every_s": every_s}
    async with http.post(f"{world.engine_url}/hold", json=body) as answer:
        answer.raise_for_status()


# -- a body to its prompt ------------------------------------------------------------------------------


async def attaching(codec: Any, turn: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds from body to prompt at turns 20 and 200, in each dialect."""
    readers = {"chat": Chat(), "responses": Responses(), "anthropic": Anthropic(), "gemini": Gemini()}
    taken: dict[str, dict[int, list[float]]] = {name: {20: [], 200: []} for name in DIALECTS}
    for number, name in harness.in_turns(DIALECTS, rounds):
        talk, tree, histories, prompts = Talk(LARGE, number), Tree(), Histories(), Prompts()
        for at in range(1, 203):
            body = talk.body(name)
            began = time.thread_time()
            call = readers[name].read(body, recent=histories.of(number))
            histories.keep(number, call.history, len(body))
            made = await prompts.of(tree, codec, call)
            seconds = time.thread_time() - began
            if (made.place.parent == ROOT) != (at == 1):
                raise RuntimeError(f"{name}: turn {at} was attached to {made.place.parent}")
            for wanted in taken[name]:
                if abs(at - wanted) <= 2:
                    taken[name][wanted].append(seconds)
            tree.add(_answered(made, call, turn))
            talk.answer()
    medians = {
        name: {at: statistics.median(times[at]) * 1e3 for at in times} for name, times in taken.items()
    }
    return {
        name: {"turn_20_ms": each[20], "turn_200_ms": each[200], "ratio": each[200] / each[20]}
        for name, each in medians.items()
    }


def _answered(made: Prompt, call: Any, turn: list[int]) -> Node:
    """The node of a call that the scripted turn answers, as the service makes it."""
    said = ToolCall(id="c", name=TOOL, arguments={"command": COMMAND})
    message = Message(role="assistant", content=SAID, tool_calls=[said])
    root = made.place.parent == ROOT
    return Node(
        call_id=new_id(),
        parent=made.place.parent,
        path=after(made.place.path, message),
        ids=pack_ids(made.given),
        messages=to_json(call.messages if root else made.place.tail),
        tools="",
        sampled=pack_ids(turn),
        logprobs=b"",
        width=4,
        spans=[],
        finish_reason="stop",
        message=message.model_dump_json(exclude_defaults=True),
        dialect="",
        backend="",
        asked={},
        body=b"",
    )


async def calls(one: World, options: harness.Options) -> harness.Report:
    """Single calls, then many; in the short form streams too, for a start takes seconds of a processor."""
    short = options.rounds == 1
    at_once, turns = (SHORT_AT_ONCE, SHORT_TURNS) if short else (AT_ONCE, options.turns)
    report = await single_calls(one, options)
    report["many_calls"] = {}
    for name, shape in (("small", SMALL), ("large", LARGE)):
        report["many_calls"][name] = await many_calls(one, shape, at_once, turns)
        harness.say(f"many calls, {name}: {report['many_calls'][name]}")
    async with session() as http:
        report["drift"], report["prompts_compared"] = await one.drift(http)
    if short:
        report["streams"] = await held_streams(one, SMALL, SHORT_STREAMS)
    return report


def main(options: harness.Options) -> harness.Report:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        tokenizer = published.directory("Qwen3", Path(directory))
        codec = load_codec(str(tokenizer))
        turn = codec.encode(TURN)
        # As processes of RUN and of capture do.
        gc.collect()
        gc.freeze()
        attached = asyncio.run(attaching(codec, turn, max(1, options.rounds // 3)))
        harness.say(f"attaching: {attached}")
        with world(tokenizer, turn) as one:
            report = asyncio.run(calls(one, options))
        if options.rounds > 1:
            with world(tokenizer, turn) as one:
                report["streams"] = asyncio.run(held_streams(one, SMALL, options.streams))
    held = report["streams"]
    harness.say(f"streams: {held}")
    ratios = [shape[side] for shape in report["calls"].values() for side in ("captured", "streamed")]
    results = {
        "call_ratio_to_own_loop": max(each["p50_ratio"] for each in ratios),
        "p99_ratio_to_own_loop": max(each["p99_ratio"] for each in ratios),
        "streams_held": held["streams"],
        "held_mb": held["most_mb"],
        "calls_per_s": report["many_calls"]["small"]["calls_per_s"],
        "attach_ratio_200_to_20_turns": max(each["ratio"] for each in attached.values()),
        "drift": report["drift"] + held["drift"],
    }
    return {"results": results, **report, "attaching": attached}


if __name__ == "__main__":
    harness.run(
        main,
        count=1,
        rounds=30,
        streams={"type": int, "default": 1000, "help": f"default: %(default)s; short form: {SHORT_STREAMS}"},
        turns={
            "type": int,
            "default": TURNS,
            "help": f"of each session of `calls_per_s` (default: %(default)s; short form: {SHORT_TURNS})",
        },
    )
