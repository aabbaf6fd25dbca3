"""How fast a batch's trajectories reach the trainer as NumPy arrays, and in how many bytes.

Real gateway, Redis, Celery fleets and one batch of `--count` rollouts (groups of 8); only the model is made
up. `mb_per_s` is of the bytes of `response_ids` and `logprobs` of all rollouts, from the first request to
the last array; `ratio_to_json` is to what the same client makes of JSON with Python lists. Bodies' bytes
are compared with the reference's result objects for the same rollouts, as compact JSON: each assistant
message carries `input_ids` (its whole prompt), `token_ids` and `logprobs`;
`bytes_ratio_to_json_without_input_ids` leaves the prompts out.

A reading before all is not counted: it imports and opens what the others find. `--rounds 1` takes shorter
responses. More in docs/benchmarks.md#transfer.
"""

from __future__ import annotations

import json
import time

import httpx

from benchmarks import harness
from rollout.batch import BatchRequest
from rollout.client import Client
from rollout.schema import Rollout, RolloutRequest
from tests.helpers.keys import HEADERS

GROUP = 8
SHORT_TOKENS = 2048
"""Of a response in the short form, a single round."""
JSON_ROUNDS = 3
"""Rounds in which the batch is read as JSON, too: it takes twenty times as long."""


def make_batch(client: Client, options: harness.Options) -> str:
    """The id of a batch that has ended, with `count` rollouts."""
    sampled = (options.tokens - options.observation * (options.turns - 1)) // options.turns
    task = {"turns": [sampled] * options.turns, "observation": options.observation}
    groups = max(1, options.count // GROUP)
    prompts = [RolloutRequest(handler="simulated", task=task) for _ in range(groups)]
    made = client.batches.create(BatchRequest(prompts=prompts, n=GROUP, groups=groups, oversample=1.0))
    harness.wait_until(
        lambda: client.batches.get(made.id, wait=20).state.ended, harness.PATIENCE_S, "the batch's end"
    )
    return made.id


def as_arrays(client: Client, batch: str) -> tuple[float, int]:
    """Seconds until every array is there, and the bytes of ids and log-probs."""
    began, counted = time.perf_counter(), 0
    for group in client.batches.stream(batch, include="arrays"):
        for rollout in group.rollouts:
            arrays = rollout.arrays
            counted += arrays.response_ids.nbytes + arrays.logprobs.nbytes
            assert len(arrays.prompt_ids) and len(arrays.loss_mask) == len(arrays.policy_versions)
    return time.perf_counter() - began, counted


def as_lists(client: Client, batch: str) -> tuple[float, int]:
    """The same with a client that asks for JSON, as a trajectory with Python lists."""
    began, counted = time.perf_counter(), 0
    for group in client.batches.stream(batch):
        counted += sum(8 * len(rollout.trajectory.response_ids) for rollout in group.rollouts)
    return time.perf_counter() - began, counted


def body_bytes(url: str, batch: str) -> int:
    """Bytes of all pages of a batch, as they cross the wire without compression."""
    total, cursor, path = 0, "0", f"/v1/batches/{batch}/groups"
    with httpx.Client(base_url=url, headers={**HEADERS, "Accept-Encoding": "identity"}, timeout=120) as http:
        while True:
            page = {"cursor": cursor, "limit": 4}
            answer = http.get(path, params=page, headers={"Accept": "application/msgpack"}).raise_for_status()
            total += len(answer.content)
            verdicts = http.get(path, params={**page, "include": "verdicts"}).raise_for_status().json()
            if not verdicts["groups"]:
                return total
            cursor = verdicts["cursor"]


def reference_json(rollout: Rollout, *, input_ids: bool) -> int:
    """Bytes of the reference's result object of a rollout, with or without the prompt of each turn."""
    messages, context = [], []
    for segment in rollout.trajectory.chain.segments:
        message = {"role": segment.role, "content": "".join(part.text for part in segment.messages)}
        if segment.sampled:
            message |= {"tool_calls": [], "token_ids": segment.token_ids, "logprobs": segment.logprobs}
            if input_ids:
                message["input_ids"] = list(context)
        messages.append(message)
        context += segment.token_ids
    result = {
        "instance_id": rollout.group_id,
        "trajectory_id": str(rollout.index),
        "git_patch": None,
        **dict.fromkeys(("success", "finish", "end_properly"), True),
        "resolved": rollout.reward == 1.0,
        "messages": messages,
        "tools": [],
        **dict.fromkeys(("critical_error", "error", "traceback")),
        "filter": False,
        "timing": {"init_time": 0.1, "run_time": 1.0, "eval_time": 0.1, "others_time": 0.0},
    }
    return len(json.dumps(result, separators=(",", ":"), ensure_ascii=False).encode())


def main(options: harness.Options) -> harness.Report:
    if options.rounds == 1:
        options.tokens = min(options.tokens, SHORT_TOKENS)
    rates: dict[str, list[float]] = {"arrays": [], "json": []}
    with (
        harness.service(ROLLOUT_HANDLERS="benchmarks._nodes:Simulated", ROLLOUT_LEASE_S="60") as stack,
        Client(stack.url) as client,
        Client(stack.url, wire="json") as json_client,
    ):
        worker = stack.start_worker("init,run,eval", slots=8)
        batch = make_batch(client, options)
        harness.discard(stack, [worker])
        harness.say(f"the batch is there: {options.count} rollouts of {options.tokens} tokens")
        as_arrays(client, batch)
        for number in range(options.rounds):
            seconds, counted = as_arrays(client, batch)
            rates["arrays"].append(counted / seconds / 1e6)
            if number < JSON_ROUNDS:
                seconds, counted_json = as_lists(json_client, batch)
                rates["json"].append(counted_json / seconds / 1e6)
            latest = ", ".join(f"{way} {rate[-1]:.0f}" for way, rate in rates.items())
            harness.say(f"round {number + 1}: {latest} MB/s")
        sizes = {"arrays": body_bytes(stack.url, batch)}
        bodies = {"reference_json": True, "reference_json_without_input_ids": False}
        sizes |= dict.fromkeys(bodies, 0)
        for group in client.batches.stream(batch):
            for name, prompts in bodies.items():
                sizes[name] += sum(reference_json(rollout, input_ids=prompts) for rollout in group.rollouts)
    spreads = {way: harness.summary(values) for way, values in rates.items()}
    return {
        "results": {
            "mb_per_s": spreads["arrays"]["median"],
            "ratio_to_json": spreads["arrays"]["median"] / spreads["json"]["median"],
            "bytes_ratio_to_reference_json": sizes["arrays"] / sizes["reference_json"],
            "bytes_ratio_to_json_without_input_ids": sizes["arrays"]
            / sizes["reference_json_without_input_ids"],
        },
        "mb_per_s": {**spreads, "counted_mb": counted / 1e6},
        "bytes": sizes,
    }


if __name__ == "__main__":
    harness.run(
        main,
        count=256,
        rounds=9,
        tokens={"type": int, "default": 16_384, "help": "of a response, observations included"},
        turns={"type": int, "default": 8},
        observation={"type": int, "default": 256, "help": "tokens of a tool's answer"},
    )
