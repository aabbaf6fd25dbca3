"""Acquire and release: how many a second one Redis serves, and how long a rollout waits for its backend."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import redis

from rollout.schema import Backend
from services.state.backends import BackendStore, placed
from services.state.redis import connect
from workers.agent.placement import Placements

BACKENDS = 256
CLIENTS = 8
STANDING = 4096
"""Rollouts that hold a reservation all the while, as in a fleet at work."""
TOKENS = 8000
GROUP = 8
READY_S = 120.0


@dataclass(frozen=True)
class Rate:
    """What all clients together reached."""

    per_s: float
    """Pairs of an acquire and a release, by all clients together."""
    acquire_p50_ms: float
    acquire_p95_ms: float


def fill(client: redis.Redis) -> None:
    """The fleet and its standing load."""
    client.flushall()
    store = BackendStore(client)
    for number in range(BACKENDS):
        store.put(
            Backend(
                id=f"b{number}",
                url=f"http://b{number}",
                model="m",
                tokenizer="t",
                max_model_len=32_768,
                capacity_tokens=400_000,
                policy_version="step-1",
            )
        )
    for number in range(STANDING):
        store.acquire(f"standing-{number}", tokens=TOKENS + number % 1000, group=f"sg-{number // GROUP}")


class Clients:
    """Eight processes, started once for all measurements; a context manager."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(CLIENTS, initializer=_start, initargs=(url, context.Barrier(CLIENTS)))

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def measure(self, seconds: float, rollouts: int, *, asynchronous: bool = False) -> Rate:
        """Let all acquire and release for some time.

        Args:
            rollouts: At once in each client; what they ask at the same time shares a round trip.
            asynchronous: Through the `Placements` of a RUN worker and its event loop; else by the store.
        """
        jobs = [(seconds, rollouts, asynchronous, number) for number in range(CLIENTS)]
        # The barrier sees to it that each process takes one.
        done = self._pool.starmap(_client, jobs, chunksize=1)
        spent = max(end for _, _, end in done) - min(start for _, start, _ in done)
        times = sorted(value for values, _, _ in done for value in values)
        p95 = times[int(0.95 * len(times))]
        return Rate(len(times) / spent, statistics.median(times) * 1e3, p95 * 1e3)


_process: tuple[BackendStore, Any]
"""Of a client process: its store, and the barrier of all."""


def _start(url: str, barrier: Any) -> None:
    global _process
    _process = (BackendStore(connect(url)), barrier)


def _client(
    seconds: float, rollouts: int, asynchronous: bool, number: int
) -> tuple[list[float], float, float]:
    """Seconds of each acquire, and when the client began and ended (one clock for all processes)."""
    store, barrier = _process
    store.acquire(f"warm-{number}", tokens=TOKENS)
    store.release(f"warm-{number}")
    barrier.wait(READY_S)
    times: list[float] = []
    began = time.monotonic()
    if asynchronous:
        asyncio.run(_worker(Placements(store), seconds, rollouts, number, times))
    else:
        _together(store, seconds, rollouts, number, times)
    return times, began, time.monotonic()


def _together(store: BackendStore, seconds: float, rollouts: int, number: int, times: list[float]) -> None:
    """Acquires of some rollouts in one round trip, then their releases in one."""
    began = time.monotonic()
    for index in count():
        if time.monotonic() - began >= seconds:
            return
        names = [f"c{number}-{index}-{lane}" for lane in range(rollouts)]
        group = f"c{number}-{index * rollouts // GROUP}"
        asked = time.perf_counter()
        replies = store.many([store.acquire_args(name, tokens=TOKENS, group=group) for name in names])
        words = [placed(reply).word for reply in replies]
        times += [time.perf_counter() - asked] * rollouts
        released = store.many([["release", name] for name in names])
        for word, done in zip(words, released, strict=True):
            _check(word, bool(done))


async def _worker(
    placements: Placements, seconds: float, rollouts: int, number: int, times: list[float]
) -> None:
    began = time.monotonic()

    async def one(lane: int) -> None:
        for index in count():
            if time.monotonic() - began >= seconds:
                return
            name = f"c{number}-{lane}-{index}"
            asked = time.perf_counter()
            answer = await placements.acquire(name, tokens=TOKENS, group=f"c{number}-{index // GROUP}")
            times.append(time.perf_counter() - asked)
            _check(answer.word, await placements.release(name))

    await asyncio.gather(*(one(lane) for lane in range(rollouts)))


def _check(word: str, released: bool) -> None:
    if word != "ok" or not released:
        raise RuntimeError(f"acquire answered {word!r} and release {released}, where both should succeed")
