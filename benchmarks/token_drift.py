"""How many trajectories would have had other token ids, had they gone through text; and of ours, how many.

The demo model plays calculator episodes on a real embedded server, driven by the service's own agent
loop and engine client, through a proxy that writes down what the engine read and sampled. Its bash is
played (what a hot policy writes shall not run here). Each trajectory is then sent down three ways:

  turns     every sampled turn, ids to text to ids
  messages  each later prompt rendered anew from messages and parsed calls, as a chat-completions client does
  whole     the whole conversation, ids to text to ids, as a trainer does that tokenises transcripts
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from transformers import AutoTokenizer

from benchmarks._harness import report
from examples.demo_model.task import make_tasks
from rollout.schema import Backend, Limits, RolloutRequest, SamplingParams
from rollout.trajectory import Message, Segment, Trajectory
from services.engines.base import Completion
from tests.helpers.llm_servers import DEMO_MODEL, embedded_server
from tests.helpers.recorder import Recorder, recorder
from workers.agent.llm import EngineClient, session
from workers.agent.loop import AgentLoop
from workers.agent.tools import BashArgs, ExecuteBash, Observation, ToolContext

TEMPERATURES = (1.0, 1.5, 2.0)
AT_ONCE = 32
WAYS = ("turns", "messages", "whole")

_SUM = re.compile(r"echo \$\(\((\d{1,9})([-+*/])(\d{1,9})\)\)")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


class PlayedBash(ExecuteBash):
    """Answers the one command that the demo model was taught; nothing is run."""

    async def call(self, args: BashArgs, ctx: ToolContext) -> Observation:
        found = _SUM.fullmatch(args.command.strip())
        if found is None or (found[2] == "/" and int(found[3]) == 0):
            return Observation("bash: syntax error")
        return Observation(str(_OPERATIONS[found[2]](int(found[1]), int(found[3]))))


class OneBackend:
    """The router's part, for a single backend that does not fail."""

    def __init__(self, http: aiohttp.ClientSession, backend: Backend) -> None:
        self.backend = backend
        self._client = EngineClient(http, backend)

    async def acquire(self) -> Backend:
        return self.backend

    async def generate(self, prompt: list[int], sampling: SamplingParams, **call: Any) -> Completion:
        return await self._client.generate(prompt, sampling, **call)


async def sample(url: str, temperature: float, count: int, seed: int) -> list[Trajectory]:
    """Episodes of different tasks at one temperature."""
    backend = Backend(
        id="embedded",
        url=url,
        model="demo",
        tokenizer=str(DEMO_MODEL),
        max_model_len=2048,
        engine="embedded",
        logprobs_mode="processed_logprobs",
    )
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one(http: aiohttp.ClientSession, index: int, task: dict[str, str]) -> Trajectory:
        request = RolloutRequest(
            handler="calculator",
            task=task,
            sampling=SamplingParams(temperature=temperature, max_tokens=96, seed=seed),
            limits=Limits(max_turns=4),
        )
        agent = AgentLoop(request, index, OneBackend(http, backend), (PlayedBash(),), advertise_tools=False)
        async with at_once:
            await agent.run([Message(role="user", content=task["question"])])
        return agent.trajectory

    async with session() as http:
        tasks = enumerate(make_tasks(count, seed=seed))
        return await asyncio.gather(*(one(http, index, task) for index, task in tasks))


@dataclass
class Call:
    """One model call of a trajectory."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    history: list[Segment]
    """What was there before it."""


def calls_of(trajectory: Trajectory) -> Iterator[tuple[str, Call]]:
    """The calls with their ids, as the trajectory tells them."""
    before: list[int] = []
    segments = trajectory.chain.segments
    for number, segment in enumerate(segments):
        # One policy version only, so every sampled segment is a whole call.
        if segment.sampled:
            call = Call(list(before), segment.token_ids, segment.logprobs or [], segments[:number])
            yield segment.call_id or "", call
        before += segment.token_ids


def ours_changed(trajectory: Trajectory, recorded: dict[str, tuple[Any, Any]]) -> bool:
    """Whether the trajectory differs from what the engine read and sampled, ids or log-probs."""
    for call_id, call in calls_of(trajectory):
        request, answer = recorded[call_id]
        choice = answer["choices"][0]
        logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
        if request["token_ids"] != call.prompt or choice["token_ids"] != call.sampled:
            return True
        if logprobs != call.logprobs:
            return True
    return False


def as_text_client(segments: list[Segment], tokenizer: Any) -> list[dict[str, Any]]:
    """Messages as a chat-completions client keeps them: parsed calls, or text where parsing failed."""
    chat: list[dict[str, Any]] = []
    for segment in segments:
        for message in segment.messages:
            entry = message.to_chat()
            if segment.sampled and not message.tool_calls:
                entry = {
                    "role": "assistant",
                    "content": tokenizer.decode(segment.token_ids, skip_special_tokens=True),
                }
            chat.append(entry)
    return chat


def through_text(trajectory: Trajectory, tokenizer: Any) -> dict[str, bool]:
    """Which ways would have changed its ids."""

    def encoded(ids: list[int]) -> list[int]:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return tokenizer.encode(text, add_special_tokens=False)

    calls = [call for _, call in calls_of(trajectory)]
    rendered = (
        tokenizer.apply_chat_template(
            as_text_client(call.history, tokenizer), add_generation_prompt=True, return_dict=False
        )
        for call in calls[1:]
    )
    whole = trajectory.chain.token_ids
    return {
        "turns": any(encoded(call.sampled) != call.sampled for call in calls),
        "messages": any(ids != call.prompt for ids, call in zip(rendered, calls[1:], strict=True)),
        "whole": encoded(whole) != whole,
    }


def share(flags: list[bool]) -> float:
    return round(sum(flags) / len(flags), 4) if flags else 0.0


def measure(temperature: float, trajectories: list[Trajectory], proxy: Recorder) -> dict[str, Any]:
    """Shares at one temperature."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    recorded = {call.request["request_id"]: (call.request, call.answer) for call in proxy.calls}
    turns = sum(trajectory.turns for trajectory in trajectories)
    if len(recorded) != turns:
        raise RuntimeError(f"the engine answered {len(recorded)} calls, the trajectories hold {turns}")
    changed = [through_text(trajectory, tokenizer) for trajectory in trajectories]
    called = [any(message.tool_calls for message in trajectory.messages) for trajectory in trajectories]
    figures = {way: share([one[way] for one in changed]) for way in WAYS}
    return {
        "trajectories": len(trajectories),
        "calls": turns,
        "sampled_tokens": sum(trajectory.sampled_tokens for trajectory in trajectories),
        "ours_changed": sum(ours_changed(trajectory, recorded) for trajectory in trajectories),
        "through_text": figures,
        "messages_of_parsed_calls": share(
            [one["messages"] for one, parsed in zip(changed, called, strict=True) if parsed]
        ),
        "parsed": share(called),
        "temperature": temperature,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="trajectories a round and temperature")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with other tasks and seeds")
    options = parser.parse_args()
    details = []
    with embedded_server() as server, recorder(server.url) as proxy:
        for temperature in TEMPERATURES:
            trajectories = []
            for number in range(options.rounds):
                trajectories += asyncio.run(sample(proxy.url, temperature, options.count, 1000 + number))
            details.append(measure(temperature, trajectories, proxy))
            proxy.calls.clear()
            print(json.dumps(details[-1]), file=sys.stderr)
    total = sum(item["trajectories"] for item in details)
    report(
        "token_drift",
        {
            "ours_changed_share": sum(item["ours_changed"] for item in details) / total,
            "through_text_changed_share": {
                f"{item['temperature']:.1f}": item["through_text"]["turns"] for item in details
            },
        },
        by_temperature=details,
        count=options.count,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
