"""How many rollouts a second one head carries, by the number of its gateways.

A real head, its workers, and trainers in processes of their own, two for each gateway: each keeps `--live`
rollouts under way, reads results with their trajectories of `--tokens` sampled tokens, acknowledges them and
submits as many. `paged` trainers do that with pages of 100, `single` ones with one result, one
acknowledgement and one submission a call. Rollouts do nothing but leave their trajectory.

`…_per_s_N_gateways` is with `--gateways` of them, `…_ratio` that over one gateway in the same round, both
medians of rounds; `gateway_cpu_ms_…` and `redis_cpu_ms_…` are what their processes take for a rollout. To
tell what gateways do a machine needs a core for each process named; the result says how many it has.
"""

from __future__ import annotations

import secrets
import statistics
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context

from benchmarks import harness
from rollout.client import Client
from rollout.schema import RolloutRequest
from tests.helpers.gateways import started_gateway
from tests.helpers.stack import Stack, free_port

PAGES = {"paged": 100, "single": 1}
TRAINERS = 2
"""For each gateway."""
WARM_UP_S, SHORT_S = 3.0, 2.0
SLOTS = 64
"""Of each worker process."""
THREADS = ("--threads", "64")
"""Of each further gateway, as the first one has."""

Figures = dict[str, float]


def train(url: str, live: int, page: int, tokens: int, began: float, ended: float) -> int:
    """Read, acknowledge and replace results; how many came from `began` to `ended` by `time.monotonic`."""
    tag, cursor, read = secrets.token_hex(8), "0", 0
    request = RolloutRequest(handler="simulated", tags=[tag], task={"turns": [tokens]})
    with Client(url) as client:
        for first in range(0, live, max(PAGES.values())):
            client.submit([request] * min(live - first, max(PAGES.values())))
        while (now := time.monotonic()) < ended:
            results = client.results(cursor=cursor, wait=1, tag=tag, limit=page, include="arrays")
            cursor, rollouts = results.cursor, results.rollouts
            if not rollouts:
                continue
            if any(len(rollout.arrays.response_ids) != tokens for rollout in rollouts):
                raise RuntimeError("a result came without its trajectory")
            client.ack([rollout.id for rollout in rollouts])
            client.submit([request] * len(rollouts))
            read += len(rollouts) * (now >= began)
    return read


class Bench:
    """A head with all its gateways, of which the first ones are used, and a process for each trainer."""

    def __init__(self, open_: ExitStack, options: harness.Options) -> None:
        """Everything is started here and ends with `open_`."""
        self._options = options
        self._stack = stack = open_.enter_context(
            harness.service(ROLLOUT_HANDLERS="benchmarks._nodes:Simulated")
        )
        self._gateways = [stack.gateway]
        self._urls = [stack.url]
        for number in range(1, options.gateways):
            gateway = open_.enter_context(
                started_gateway(stack, f"gateway{number}", free_port(), {}, options=THREADS)
            )
            self._gateways.append(gateway)
            self._urls.append(gateway.url)
        self._start_workers(stack)
        trainers = TRAINERS * options.gateways
        self._pool = open_.enter_context(ProcessPoolExecutor(trainers, mp_context=get_context("spawn")))
        for call in self._call(options.gateways, PAGES["paged"], 0.0, 0.0):  # imports
            call.result()

    def _start_workers(self, stack: Stack) -> None:
        queues = harness.split(harness.STAGES, self._options.rounds == 1)
        for queue in queues:
            for _ in range(self._options.workers):
                worker = harness.launch(stack, queue, SLOTS)
                harness.await_worker(stack, queue.split(",")[0], worker)

    def rate(self, gateways: int, page: int) -> Figures:
        """Rollouts a second at so many gateways, and milliseconds of processors for one."""
        options = self._options
        short = options.rounds == 1
        # What the trainers before left under way is not to be in the way.
        idle = lambda: not harness.in_state(self._stack, *harness.LIVE_STATES)  # noqa: E731
        harness.wait_until(idle, harness.PATIENCE_S, "the end of all rollouts")
        began = time.monotonic() + (SHORT_S if short else WARM_UP_S)
        ended = began + (SHORT_S if short else options.seconds)
        calls = self._call(gateways, page, began, ended)
        time.sleep(max(0.0, began - time.monotonic()))
        before, since = self._cpu_s(), time.monotonic()
        time.sleep(max(0.0, ended - time.monotonic()))
        used = {part: seconds - before[part] for part, seconds in self._cpu_s().items()}
        seconds = time.monotonic() - since
        read = sum(call.result() for call in calls)
        if not read:
            raise RuntimeError(f"nothing came in {seconds:.1f} s; measure for longer (--seconds)")
        cpu_ms = {f"{part}_cpu_ms": cpu_s / read * 1e3 for part, cpu_s in used.items()}
        return {"per_s": read / seconds, **cpu_ms}

    def _call(self, gateways: int, page: int, began: float, ended: float) -> list[Future[int]]:
        """`train` in the processes of trainers."""
        more = self._options.live, page, self._options.tokens, began, ended
        places = range(TRAINERS * gateways)
        return [self._pool.submit(train, self._urls[place % gateways], *more) for place in places]

    def _cpu_s(self) -> Figures:
        return {
            "gateway": harness.cpu_seconds(gateway.pid for gateway in self._gateways),
            "redis": harness.cpu_seconds([self._stack.redis.pid]),
        }


def main(options: harness.Options) -> harness.Report:
    counts = [count for count in (1, 2, 4, 8) if count < options.gateways] + [options.gateways]
    rounds: dict[str, list[Figures]] = {}
    with ExitStack() as open_:
        bench = Bench(open_, options)
        bench.rate(options.gateways, PAGES["paged"])  # imports, and connections
        sides = {(name, count): page for name, page in PAGES.items() for count in counts}
        for number, (name, count) in harness.in_turns(sides, options.rounds):
            figures = bench.rate(count, sides[name, count])
            rounds.setdefault(f"{name}_{count}", []).append(figures)
            harness.say(f"round {number + 1}, {name}, {count} gateways: {figures}")
    medians = {
        side: {key: statistics.median(figures[key] for figures in taken) for key in taken[0]}
        for side, taken in rounds.items()
    }
    results: Figures = {}
    for name in PAGES:
        one, many = rounds[f"{name}_1"], rounds[f"{name}_{options.gateways}"]
        ratios = harness.ratios([figures["per_s"] for figures in many], [figures["per_s"] for figures in one])
        results |= {
            f"{name}_per_s_1_gateway": medians[f"{name}_1"]["per_s"],
            f"{name}_per_s_N_gateways": medians[f"{name}_{options.gateways}"]["per_s"],
            f"{name}_ratio": statistics.median(ratios),
            f"gateway_cpu_ms_{name}": medians[f"{name}_1"]["gateway_cpu_ms"],
            f"redis_cpu_ms_{name}": medians[f"{name}_1"]["redis_cpu_ms"],
        }
    return {"results": results, "by_gateways": medians}


if __name__ == "__main__":
    harness.run(
        main,
        count=1,
        rounds=3,
        gateways={"type": int, "default": 4},
        workers={"type": int, "default": 2, "help": "processes of each stage"},
        live={"type": int, "default": 300, "help": "rollouts that each trainer keeps under way"},
        tokens={"type": int, "default": 4096, "help": "sampled in each rollout"},
        seconds={"type": float, "default": 6.0, "help": "of each measurement"},
    )
