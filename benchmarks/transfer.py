"""How fast a batch's trajectories reach the trainer as NumPy arrays, and in how many bytes.

Real gateway, Redis, Celery fleets and one batch of `--count` rollouts (groups of 8); only the model is made
up: the handler leaves `--tokens` response tokens in `--turns` turns, with observations and texts in between.

* `mb_per_s`: bytes of the arrays `response_ids` (int32) and `logprobs` (float32) of all rollouts, over the
  time from the first request to the last array. Prompt ids, masks, policy versions, texts and records come
  along in that time and are not counted. Loopback, one client, one gateway process; MB = 10^6 bytes.
* `bytes_ratio_to_reference_json`: bytes of the answers' bodies over those of the reference's result objects
  for the same rollouts, as compact JSON: each assistant message carries `input_ids` (its whole prompt),
  `token_ids` and `logprobs`.

The same batch is also read as JSON and with Python lists, by the same client, in turns; `cpu_s` is the
processor time of a reading as arrays. A reading before all is not counted: it imports and opens what the
others find. `--rounds 1` takes shorter responses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks._harness import cpu_seconds, report, summary
from benchmarks._latency import end_in_order_on_sigterm, say
from rollout.batch import BatchRequest
from rollout.client import Client
from rollout.schema import Rollout, RolloutRequest
from rollout.trajectory import Trajectory
from tests.helpers.keys import HEADERS
from tests.helpers.stack import Stack

GROUP = 8
SHORT_TOKENS = 2048
"""Of a response in the short form, a single round."""
SLOW_ROUNDS = 3
"""Rounds in which the slower ways are measured, too."""
PATIENCE_S = 900.0


def make_batch(client: Client, options: argparse.Namespace) -> str:
    """The id of a batch that has ended, with `count` rollouts."""
    task = {"tokens": options.tokens, "turns": options.turns, "observation": options.observation}
    groups = max(1, options.count // GROUP)
    prompts = [RolloutRequest(handler="teller", task=task) for _ in range(groups)]
    made = client.batches.create(BatchRequest(prompts=prompts, n=GROUP, groups=groups, oversample=1.0))
    deadline = time.monotonic() + PATIENCE_S
    while not client.batches.get(made.id, wait=20).state.ended:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the batch had not ended after {PATIENCE_S:g} s")
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
    """The same, but as a trajectory with Python lists."""
    began, counted = time.perf_counter(), 0
    for group in client.batches.stream(batch):
        counted += sum(8 * len(rollout.trajectory.response_ids) for rollout in group.rollouts)
    return time.perf_counter() - began, counted


def body_bytes(url: str, batch: str, accept: str) -> int:
    """Bytes of all pages of a batch, as they cross the wire without compression."""
    total, cursor = 0, "0"
    headers = {**HEADERS, "Accept": accept, "Accept-Encoding": "identity"}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as http:
        while True:
            path = f"/v1/batches/{batch}/groups"
            total += len(http.get(path, params={"cursor": cursor, "limit": 4}).raise_for_status().content)
            page = http.get(
                path, params={"cursor": cursor, "limit": 4, "include": "verdicts"}, headers={"Accept": "*/*"}
            )
            if not page.json()["groups"]:
                return total
            cursor = page.json()["cursor"]


def reference_json(rollout: Rollout, *, compact: bool = False) -> int:
    """Bytes of the reference's result object of a rollout; `compact` leaves `input_ids` out."""
    messages = _messages(rollout.trajectory, compact=compact)
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


def _messages(trajectory: Trajectory, *, compact: bool) -> list[dict]:
    messages, context = [], []
    for segment in trajectory.chain.segments:
        said = {"role": segment.role, "content": "".join(message.text for message in segment.messages)}
        if segment.sampled:
            said |= {"tool_calls": [], "token_ids": segment.token_ids, "logprobs": segment.logprobs}
            if not compact:
                said["input_ids"] = list(context)
        messages.append(said)
        context += segment.token_ids
    return messages


def main() -> None:
    """Run it; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=256, help="rollouts of the batch")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a response, observations included")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--observation", type=int, default=256, help="tokens of a tool's answer")
    parser.add_argument("--rounds", type=int, default=9, help="times that the batch is read in each way")
    options = parser.parse_args()
    if options.rounds == 1:
        options.tokens = min(options.tokens, SHORT_TOKENS)
    end_in_order_on_sigterm()
    env = {"ROLLOUT_HANDLERS": "benchmarks._transfer_handler:Teller", "ROLLOUT_LEASE_S": "60"}
    rates: dict[str, list[float]] = {"arrays": [], "lists": [], "json": []}
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes,
        Stack(Path(directory), Path(sandboxes), env) as stack,
        Client(stack.url) as client,
        Client(stack.url, wire="json") as json_client,
    ):
        worker = stack.start_worker("init,run,eval", slots=8)
        batch = make_batch(client, options)
        worker.stop()
        say(f"the batch is there: {options.count} rollouts of {options.tokens} tokens")
        ways = {
            "arrays": lambda: as_arrays(client, batch),
            "lists": lambda: as_lists(client, batch),
            "json": lambda: as_lists(json_client, batch),
        }
        as_arrays(client, batch)  # what is imported and opened by the first reading is not counted
        pids = {"gateway": stack.gateway.pid, "redis": stack.redis.pid}
        cpu: dict[str, list[float]] = {name: [] for name in (*pids, "client")}
        for number in range(options.rounds):
            before = {name: cpu_seconds([pid]) for name, pid in pids.items()} | {
                "client": time.process_time()
            }
            for name, read in ways.items():
                if name != "arrays" and number >= SLOW_ROUNDS:
                    continue
                seconds, counted = read()
                rates[name].append(counted / seconds / 1e6)
                if name == "arrays":
                    cpu["client"].append(time.process_time() - before["client"])
                    for part, pid in pids.items():
                        cpu[part].append(cpu_seconds([pid]) - before[part])
            say(f"round {number + 1}: {', '.join(f'{n} {r[-1]:.0f} MB/s' for n, r in rates.items())}")
        ours = body_bytes(stack.url, batch, "application/msgpack")
        our_json = body_bytes(stack.url, batch, "application/json")
        reference = compact = 0
        for group in client.batches.stream(batch):
            reference += sum(reference_json(rollout) for rollout in group.rollouts)
            compact += sum(reference_json(rollout, compact=True) for rollout in group.rollouts)
        redis_bytes = int(stack.redis.client.get("results:bytes") or 0)
    found = {name: summary(values) for name, values in rates.items()}
    report(
        "transfer",
        {
            "mb_per_s": found["arrays"]["median"],
            "bytes_ratio_to_reference_json": round(ours / reference, 4),
        },
        mb_per_s={**found, "counted_mb": round(counted / 1e6, 2)},
        cpu_s={name: summary(values) for name, values in cpu.items()},
        bytes={
            "msgpack": ours,
            "json": our_json,
            "reference_json": reference,
            "reference_json_without_input_ids": compact,
            "ratio_to_json_without_input_ids": round(ours / compact, 4),
            "in_redis": redis_bytes,
        },
        options=vars(options),
    )


if __name__ == "__main__":
    main()
