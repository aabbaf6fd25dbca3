"""What a trainer knows of a million rollouts, in files: it goes on where it was, whatever was killed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rollout.client import ApiError, Client, RolloutError
from rollout.schema import ResultPage, RolloutRequest, State
from tests.helpers.chaos_handlers import sampled_of

PER_CALL = 250
"""Rollouts of a submission, and results of a page, at most."""
EXPIRED = 1
"""In place of a completion: it ended, and its record was past its retention before anybody read it."""


class Ledger:
    """Counts each id exactly.

    `ended.u64` has the place in the order of completion of each rollout, 0 = it has not ended: a page that is
    read again says the same, and a rollout that ends again says another. What it has is with the kernel
    before the cursor moves (`ledger.json`), so a killed reader reads something twice and misses nothing.
    """

    def __init__(self, directory: Path, total: int, seed: int) -> None:
        """
        Raises:
            ValueError: The directory is of another run.
        """
        self._file, places = directory / "ledger.json", directory / "ended.u64"
        self._lock = threading.Lock()
        self.total, self.seed = total, seed
        self.state: dict[str, Any] = {
            **{"total": total, "seed": seed, "sent": 0, "answered": 0, "cursor": "0", "seconds": 0.0},
            **{"twice": [], "wrong": [], "not_completed": {}, "taken_back": 0, "missed": 0},
            **{"pieces": 0, "faults": {}, "rests": [], "growth": {}},
        }
        self.state |= json.loads(self._file.read_text()) if self._file.exists() else {}
        if (self.state["total"], self.state["seed"]) != (total, seed):
            raise ValueError(f"{directory} is of another run: --rollouts or --seed differ")
        self.ended = np.memmap(places, np.uint64, "r+" if places.exists() else "w+", shape=(total,))
        self.count = int(np.count_nonzero(self.ended))

    def set(self, **fields: Any) -> None:
        """Change the state, and put its file in place, at once or not at all."""
        with self._lock:
            self.state |= fields
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self.state))
            new.replace(self._file)

    def under_way(self) -> list[int]:
        """Those that were sent, or were about to be, and have not ended."""
        return np.flatnonzero(self.ended[: self.state["sent"]] == 0).tolist()

    def take_back(self, latest: str) -> None:
        """Forget ends after Redis' latest: it was killed with what it had not written (docs/redis.md)."""
        beyond = self.ended > max(EXPIRED, _packed(latest))
        self.ended[beyond] = 0
        if beyond.any():
            self.set(cursor=latest, taken_back=self.state["taken_back"] + int(beyond.sum()))
        self.count = int(np.count_nonzero(self.ended))

    def enter(self, page: ResultPage) -> None:
        """Note results as read."""
        for item in page.rollouts:
            number, place = _number(item.id), _packed(item.completion)
            before, self.ended[number] = int(self.ended[number]), place
            self.count += before == 0
            if before not in (0, EXPIRED, place) or sum(e.state.terminal for e in item.timeline) != 1:
                self.state["twice"].append(f"{item.id}: {[(e.state, e.attempt) for e in item.timeline]}")
            if item.state is not State.COMPLETED:
                why, counts = f"{item.state}: {item.error}", self.state["not_completed"]
                counts[why] = counts.get(why, 0) + 1
            elif item.reward != number % 2 or item.arrays.response_ids.tolist() != sampled_of(number):
                self.state["wrong"].append(f"{item.id}: reward {item.reward}, {item.trajectory_dropped}")
        for number in map(_number, page.expired):
            self.count += not self.ended[number]
            self.ended[number] = self.ended[number] or EXPIRED
        self.state["missed"] += page.missed


def _packed(completion: str) -> int:
    millis, _, place = completion.partition("-")
    return int(millis) << 20 | int(place or 0)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


class Trainer:
    """Submits up to a limit, reads by cursor and acknowledges, at any gateway that answers."""

    def __init__(self, ledger: Ledger, urls: Sequence[str], live: int) -> None:
        """`live`: rollouts that are under way at most."""
        self.ledger, self.live = ledger, live
        self.limit = 0
        """Submit so many in all."""
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._clients = [Client(url, retry_for=0.0) for url in urls]
        self._turn = 0

    def start(self) -> None:
        """Read what had ended before anybody went to work, then go on in threads."""
        while self._read(wait=0):
            pass
        for work in (self._submit_all, self._read_all):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error
            raise

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Ask one gateway after the other, for as long as it takes."""
        while True:
            try:
                return getattr(self._clients[self._turn % len(self._clients)], method)(*args, **options)
            except (RolloutError, httpx.HTTPError) as error:
                if isinstance(error, ApiError) and error.status < 500 and error.status != 429:
                    raise
            self._turn += 1
            self.stopping.wait(0.1)

    def _submit(self, numbers: Sequence[int]) -> int:
        """Have the service know these; how many of them it did not."""
        prefix = f"m{self.ledger.seed}"
        requests = [
            RolloutRequest(handler="numbered", id=f"{prefix}-{number:07d}", task={"number": number})
            for number in numbers
        ]
        return sum(new.created for new in self._call("submit", requests))

    def _submit_all(self) -> None:
        ledger, state = self.ledger, self.ledger.state
        again = ledger.under_way()
        for first in range(0, len(again), PER_CALL):
            part = again[first : first + PER_CALL]
            # Those of a call without an answer may be new.
            unknown = self._submit(part) - sum(number >= state["answered"] for number in part)
            state["taken_back"] += max(0, unknown)
        ledger.set(answered=state["sent"])
        while not self.stopping.is_set():
            until = min(state["sent"] + min(PER_CALL, self.live), self.limit)
            if until <= state["sent"] or until - ledger.count > self.live:
                time.sleep(0.02)
                continue
            numbers = range(state["sent"], until)
            ledger.set(sent=until)
            self._submit(numbers)
            ledger.set(answered=until)

    def _read_all(self) -> None:
        while not self.stopping.is_set():
            self._read(wait=2)

    def _read(self, wait: float) -> int:
        options = {"wait": wait, "limit": PER_CALL, "include": "arrays"}
        page = self._call("results", self.ledger.state["cursor"], **options)
        self.ledger.enter(page)
        if page.rollouts:
            self._call("ack", [item.id for item in page.rollouts])
        self.ledger.set(cursor=page.cursor)
        return len(page.rollouts) + len(page.expired)
