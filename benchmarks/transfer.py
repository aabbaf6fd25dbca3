"""How fast a batch's trajectories reach the trainer as NumPy arrays, and in how many bytes.

Real gateway, Redis, Celery fleets and one batch of `--count` rollouts (groups of 8); only the model is made
up. `mb_per_s` is of the bytes of `response_ids` and `logprobs` of all rollouts, from the first request to
the last array; `ratio_to_json` is to what the same client makes of JSON with Python lists. Bodies' bytes
are compared with the reference's result objects for the same rollouts, as compact JSON: each assistant
message carries `input_ids` (its whole prompt), `token_ids` and `logprobs`;
`bytes_ratio_to_json_without_input_ids` leaves the prompts out.

`served_mb_per_s_N_gateways`: the same bytes to `--readers` at once, each a process of its own that receives
the whole batch and decodes nothing (a trainer does that on its own processors), spread over one gateway
process and over `--gateways`. `gateways_ratio` is the median of the rounds' ratios, `gateway_cpu_s_per_gb`
what gateways spend on a gigabyte.

A reading before all is not counted: it imports and opens what the others find. `--rounds 1` takes shorter
responses. More in docs/benchmarks.md#transfer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from multiprocessing import get_context

import httpx

from benchmarks import harness
from rollout.batch import BatchRequest
from rollout.client import Client
from rollout.schema import Rollout, RolloutRequest
from tests.helpers.gateways import started_gateway
from tests.helpers.keys import HEADERS
from tests.helpers.stack import Stack, free_port

GROUP = 8
SHORT_TOKENS = 2048
"""Of a response in the short form, a single round."""
PAGE = 4
"""Groups of a page."""
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


# -- several readers -----------------------------------------------------------------------------------


@cache
def connection(url: str) -> httpx.Client:
    """One for each address, in the process of a reader."""
    headers = {**HEADERS, "Accept-Encoding": "identity", "Accept": "application/msgpack"}
    return httpx.Client(base_url=url, headers=headers, timeout=120)


def receive(url: str, batch: str, cursors: Sequence[str]) -> None:
    """Get these pages of the batch, in a reader's process."""
    for cursor in cursors:
        page = {"cursor": cursor, "limit": PAGE}
        connection(url).get(f"/v1/batches/{batch}/groups", params=page).raise_for_status()


def several(stack: Stack, batch: str, counted: int, options: harness.Options) -> dict[str, list[float]]:
    """MB/s of all readers together, round by round, by the number of gateways; and the gateways' CPU time.

    Args:
        counted: Bytes of ids and log-probs in the batch.
    """
    cursors = ["0", *(cursor for cursor, _ in pages(stack.url, batch))][:-1]
    figures: dict[str, list[float]] = {}
    with ExitStack() as open_:
        gateways = [stack.gateway]
        urls = [stack.url]
        for number in range(1, options.gateways):
            gateway = open_.enter_context(started_gateway(stack, f"gateway{number}", free_port(), {}))
            gateways.append(gateway)
            urls.append(gateway.url)
        # Each reader is a process with one thread of work, as a trainer's is.
        pools = [
            open_.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
            for _ in range(options.readers)
        ]

        def rate(addresses: Sequence[str]) -> tuple[float, float]:
            """MB/s, and seconds of the gateways' processors for a gigabyte."""
            cpu_s, began = harness.cpu_seconds(process.pid for process in gateways), time.perf_counter()
            calls = [
                pool.submit(receive, addresses[place % len(addresses)], batch, cursors)
                for place, pool in enumerate(pools)
            ]
            for call in calls:
                call.result()
            seconds, megabytes = time.perf_counter() - began, counted * len(pools) / 1e6
            cpu_s = harness.cpu_seconds(process.pid for process in gateways) - cpu_s
            return megabytes / seconds, cpu_s / megabytes * 1e3

        counts = dict.fromkeys((1, options.gateways))
        for count in counts:  # imports, and connections
            rate(urls[:count])
        for number, count in harness.in_turns(counts, options.rounds):
            mb_per_s, cpu_s = rate(urls[:count])
            figures.setdefault(str(count), []).append(mb_per_s)
            figures.setdefault("cpu_s_per_gb", []).append(cpu_s)
            harness.say(f"round {number + 1}, {count} gateways: {mb_per_s:.0f} MB/s")
    return figures


def pages(url: str, batch: str) -> Iterator[tuple[str, int]]:
    """The cursor after each page of a batch, and its bytes as they cross the wire without compression."""
    cursor, path = "0", f"/v1/batches/{batch}/groups"
    with httpx.Client(base_url=url, headers={**HEADERS, "Accept-Encoding": "identity"}, timeout=120) as http:
        while True:
            page = {"cursor": cursor, "limit": PAGE}
            answer = http.get(path, params=page, headers={"Accept": "application/msgpack"}).raise_for_status()
            verdicts = http.get(path, params={**page, "include": "verdicts"}).raise_for_status().json()
            if not verdicts["groups"]:
                return
            cursor = verdicts["cursor"]
            yield cursor, len(answer.content)


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
        readers = several(stack, batch, counted, options)
        sizes = {"arrays": sum(size for _, size in pages(stack.url, batch))}
        bodies = {"reference_json": True, "reference_json_without_input_ids": False}
        sizes |= dict.fromkeys(bodies, 0)
        for group in client.batches.stream(batch):
            for name, prompts in bodies.items():
                sizes[name] += sum(reference_json(rollout, input_ids=prompts) for rollout in group.rollouts)
    spreads = {way: harness.summary(values) for way, values in rates.items()}
    one, many = readers["1"], readers[str(options.gateways)]
    return {
        "results": {
            "mb_per_s": spreads["arrays"]["median"],
            "ratio_to_json": spreads["arrays"]["median"] / spreads["json"]["median"],
            "served_mb_per_s_1_gateway": harness.summary(one)["median"],
            "served_mb_per_s_N_gateways": harness.summary(many)["median"],
            "gateways_ratio": harness.summary(harness.ratios(many, one))["median"],
            "gateway_cpu_s_per_gb": harness.summary(readers["cpu_s_per_gb"])["median"],
            "bytes_ratio_to_reference_json": sizes["arrays"] / sizes["reference_json"],
            "bytes_ratio_to_json_without_input_ids": sizes["arrays"]
            / sizes["reference_json_without_input_ids"],
        },
        "mb_per_s": {**spreads, "counted_mb": counted / 1e6},
        "readers": {name: harness.summary(values) for name, values in readers.items()},
        "bytes": sizes,
    }


if __name__ == "__main__":
    harness.run(
        main,
        count=256,
        rounds=9,
        tokens={"type": int, "default": 16_384, "help": "of a response, observations included"},
        turns={"type": int, "default": 8},
        gateways={"type": int, "default": 2, "help": "processes, for several readers"},
        readers={"type": int, "default": 2, "help": "processes that read at once"},
        observation={"type": int, "default": 256, "help": "tokens of a tool's answer"},
    )
