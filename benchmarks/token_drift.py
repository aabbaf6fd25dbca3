"""How many trajectories would have had other token ids, had they gone through text; and of ours, how many.

The demo model plays calculator episodes on a real embedded server, in the service's own stages and engine
client, through a proxy that writes down what the engine read and sampled. Its bash is played (what a hot
policy writes shall not run here). Each trajectory is then sent down three ways, each a key by temperature:
its turns, its later prompts as `messages`, and the `whole` conversation (docs/benchmarks.md#token_drift).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from transformers import AutoTokenizer

from benchmarks import harness
from examples.demo_model.task import make_tasks
from rollout.schema import Backend, Limits, RolloutRequest, SamplingParams
from rollout.trajectory import Segment, Trajectory
from tests.helpers.llm_servers import DEMO_MODEL, embedded_server
from tests.helpers.recorder import Recorder, recorder
from workers.agent.tools import BashArgs, ExecuteBash, Observation, ToolContext
from workers.handlers.calculator import Calculator
from workers.inprocess import InProcess, Server

TEMPERATURES = (1.0, 1.5, 2.0)
AT_ONCE = 32
WAYS = ("turns", "messages", "whole")
FIRST_SEED = 1000
SEEDS = 1 << 20
"""Of one round: each episode samples with its own."""

_SUM = re.compile(r"echo \$\(\((\d{1,9})([-+*/])(\d{1,9})\)\)")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


class PlayedBash(ExecuteBash):
    """Answers the one command that the demo model was taught; nothing is run."""

    async def call(self, args: BashArgs, ctx: ToolContext) -> Observation:
        match = _SUM.fullmatch(args.command.strip())
        if match is None or (match[2] == "/" and int(match[3]) == 0):
            return Observation("bash: syntax error")
        return Observation(str(_OPERATIONS[match[2]](int(match[1]), int(match[3]))))


class PlayedCalculator(Calculator):
    """The demo task without a sandbox."""

    tools = (PlayedBash(),)
    uses_sandbox = False


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

    async def play(index: int, task: dict[str, str]) -> Trajectory:
        request = RolloutRequest(
            handler="calculator",
            task=task,
            sampling=SamplingParams(temperature=temperature, max_tokens=96, seed=seed * SEEDS + index),
            limits=Limits(max_turns=4, max_attempts=1),
        )
        async with at_once:
            (rollout,) = await InProcess(PlayedCalculator(), Server(backend)).run(request)
        if rollout.error is not None:
            raise RuntimeError(f"an episode failed: {rollout.error}")
        return rollout.trajectory

    return await asyncio.gather(*(play(*task) for task in enumerate(make_tasks(count, seed=seed))))


def chat_of(segments: list[Segment], tokenizer: Any) -> list[dict[str, Any]]:
    """Messages as a chat-completions client keeps them: parsed calls, or text where parsing failed."""
    chat: list[dict[str, Any]] = []
    for segment in segments:
        for message in segment.messages:
            entry = message.to_chat()
            if segment.sampled and not message.tool_calls:
                text = tokenizer.decode(segment.token_ids, skip_special_tokens=True)
                entry = {"role": "assistant", "content": text}
            chat.append(entry)
    return chat


def changes(trajectory: Trajectory, recorded: dict[str, tuple[Any, Any]], tokenizer: Any) -> dict[str, bool]:
    """Whether each way would have changed its ids; `ours`: ids or log-probs are not those of the engine."""

    def through_text(ids: list[int]) -> bool:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return tokenizer.encode(text, add_special_tokens=False) != ids

    changed = dict.fromkeys(("ours", *WAYS), False)
    changed["whole"] = through_text(trajectory.chain.token_ids)
    prompt: list[int] = []
    segments = trajectory.chain.segments
    # There is one policy version only, so every sampled segment is a whole call.
    for number, segment in enumerate(segments):
        if segment.sampled:
            request, answer = recorded[segment.call_id]
            choice = answer["choices"][0]
            logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
            engine = (request["token_ids"], choice["token_ids"], logprobs)
            changed["ours"] |= (prompt, segment.token_ids, segment.logprobs or []) != engine
            changed["turns"] |= through_text(segment.token_ids)
            if any(earlier.sampled for earlier in segments[:number]):
                chat = chat_of(segments[:number], tokenizer)
                rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                changed["messages"] |= rendered != prompt
        prompt = prompt + segment.token_ids
    return changed


def measure(trajectories: list[Trajectory], proxy: Recorder, tokenizer: Any) -> dict[str, Any]:
    """Shares at one temperature."""
    recorded = {call.request["request_id"]: (call.request, call.answer) for call in proxy.calls}
    turns = sum(trajectory.turns for trajectory in trajectories)
    if len(recorded) != turns:
        raise RuntimeError(f"the engine answered {len(recorded)} calls, the trajectories hold {turns}")
    changed = [changes(trajectory, recorded, tokenizer) for trajectory in trajectories]
    count = len(trajectories)
    return {
        **{way: sum(flags[way] for flags in changed) / count for way in ("ours", *WAYS)},
        "with_a_parsed_call": sum(any(m.tool_calls for m in t.messages) for t in trajectories) / count,
        "trajectories": count,
        "calls": turns,
        "sampled_tokens": sum(trajectory.sampled_tokens for trajectory in trajectories),
    }


def main(options: harness.Options) -> harness.Report:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    shares: dict[str, dict[str, Any]] = {}
    with embedded_server() as server, recorder(server.url) as proxy:
        for temperature in TEMPERATURES:
            trajectories = []
            for seed in range(FIRST_SEED, FIRST_SEED + options.rounds):
                trajectories += asyncio.run(sample(proxy.url, temperature, options.count, seed))
            shares[str(temperature)] = measure(trajectories, proxy, tokenizer)
            proxy.calls.clear()
            harness.say(f"temperature {temperature}: {shares[str(temperature)]}")
    results: dict[str, Any] = {"ours_changed_share": max(share["ours"] for share in shares.values())}
    for way in WAYS:
        by_temperature = {temperature: share[way] for temperature, share in shares.items()}
        results[f"{way}_through_text_changed_share"] = by_temperature
    return {"results": results, "by_temperature": shares}


if __name__ == "__main__":
    harness.run(main, count=200, rounds=3)
