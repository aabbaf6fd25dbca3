"""What a trainer knows of a million rollouts, in files: it goes on where it was, whatever was killed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rollout.client import ApiError, Client, RolloutError
from rollout.schema import Rollout, RolloutRequest, State
from tests.helpers.chaos_handlers import sampled_of

PER_CALL = 250
"""Rollouts of a call of submission."""
PAGE = 250
"""Results of a page at most."""
EXPIRED = 1
"""In place of a completion: it ended, and its record was past its retention before anybody read it."""
MOST_TOLD = 20


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
        self._file, counts = directory / "ledger.json", directory / "ended.u64"
        self._lock = threading.RLock()
        run = {"total": total, "seed": seed}
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        if known and {name: known[name] for name in run} != run:
            raise ValueError(f"{directory} is of --rollouts {known['total']} --seed {known['seed']}")
        self.state: dict[str, Any] = {
            **{"sent": 0, "answered": 0, "cursor": "0", "seconds": 0.0, "pieces": 0},
            **{"twice": [], "wrong": [], "not_completed": {}, "taken_back": 0, "missed": 0},
            **{"kills": {}, "rests": [], "growth": {}},
            **run,
            **known,
        }
        self.ended = np.memmap(counts, np.uint64, "r+" if counts.exists() else "w+", shape=(total,))
        self.count = int(np.count_nonzero(self.ended))
        self.total, self.seed = total, seed

    def save(self) -> None:
        """Put the file in its place, at once or not at all."""
        with self._lock:
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self.state))
            new.replace(self._file)

    def set(self, **fields: Any) -> None:
        with self._lock:
            self.state |= fields
            self.save()

    def open(self) -> list[int]:
        """Those that were sent, or were about to be, and have not ended."""
        return np.flatnonzero(self.ended[: self.state["sent"]] == 0).tolist()

    def name(self, number: int) -> str:
        return f"m{self.seed}-{number:07d}"

    def number(self, name: str) -> int:
        return int(name.rpartition("-")[2])

    def take_back(self, latest: str) -> None:
        """Forget ends after Redis' latest: it was killed with what it had not written (docs/redis.md)."""
        beyond = self.ended > max(EXPIRED, _packed(latest))
        self.ended[beyond] = 0
        if beyond.any():
            self.state["taken_back"] += int(beyond.sum())
            self.set(cursor=latest)
        self.count = int(np.count_nonzero(self.ended))

    def enter(self, items: Sequence[Rollout], expired: Sequence[str]) -> None:
        """Note results as read."""
        for item in items:
            number, place = self.number(item.id), _packed(item.completion)
            before, self.ended[number] = int(self.ended[number]), place
            self.count += before == 0
            if before not in (0, EXPIRED, place) or sum(e.state.terminal for e in item.timeline) != 1:
                self._tell("twice", f"{item.id}: {[(e.state, e.attempt, e.fence) for e in item.timeline]}")
            if item.state is not State.COMPLETED:
                why = f"{item.state}: {item.error and item.error.message}"
                counts = self.state["not_completed"]
                counts[why] = counts.get(why, 0) + 1
            elif item.reward != number % 2 or item.arrays.response_ids.tolist() != sampled_of(number):
                self._tell("wrong", f"{item.id}: reward {item.reward}, {item.trajectory_dropped}")
        for name in expired:
            self.count += not self.ended[self.number(name)]
            self.ended[self.number(name)] = self.ended[self.number(name)] or EXPIRED

    def _tell(self, what: str, text: str) -> None:
        self.state[what].append(text)
        if len(self.state[what]) <= MOST_TOLD:
            print(f"{what}: {text}", flush=True)


def _packed(completion: str) -> int:
    millis, _, place = completion.partition("-")
    return int(millis) << 20 | int(place or 0)


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
        for work in (self._submit_all, self._read_all):
            threading.Thread(target=self._guarded, args=(work,), name=work.__name__, daemon=True).start()

    def catch_up(self) -> None:
        """Read what had ended before; nobody may be at work."""
        while self._read(wait=0):
            pass

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error
            raise

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Ask one gateway after the other, for as long as it takes."""
        while not self.stopping.is_set():
            try:
                return getattr(self._clients[self._turn % len(self._clients)], method)(*args, **options)
            except ApiError as error:
                if error.status < 500 and error.status != 429:
                    raise
            except (RolloutError, httpx.HTTPError):
                pass
            self._turn += 1
            time.sleep(0.1)
        raise SystemExit

    def _submit(self, numbers: Sequence[int]) -> int:
        """Have the service know these; how many of them it did not."""
        names = map(self.ledger.name, numbers)
        requests = [
            RolloutRequest(handler="numbered", id=name, task={"number": number})
            for name, number in zip(names, numbers, strict=True)
        ]
        return sum(new.created for new in self._call("submit", requests))

    def _submit_all(self) -> None:
        state, total = self.ledger.state, self.ledger.total
        open_ = self.ledger.open()
        for first in range(0, len(open_), PER_CALL):
            part = open_[first : first + PER_CALL]
            created = self._submit(part)
            # Those of a call without an answer may be new.
            state["taken_back"] += max(0, created - sum(number >= state["answered"] for number in part))
        self.ledger.set(answered=state["sent"])
        while not self.stopping.is_set():
            until = min(state["sent"] + min(PER_CALL, self.live), self.limit, total)
            if until == state["sent"] or until - self.ledger.count > self.live:
                time.sleep(0.02)
                continue
            numbers = range(state["sent"], until)
            self.ledger.set(sent=until)
            self._submit(numbers)
            self.ledger.set(answered=until)

    def _read_all(self) -> None:
        while not self.stopping.is_set():
            self._read(wait=2)

    def _read(self, wait: float) -> int:
        page = self._call("results", self.ledger.state["cursor"], wait=wait, limit=PAGE, include="arrays")
        self.ledger.enter(page.rollouts, page.expired)
        if page.missed:
            self.ledger.state["missed"] += 1
        if page.rollouts:
            self._call("ack", [item.id for item in page.rollouts])
        self.ledger.set(cursor=page.cursor)
        return len(page.rollouts) + len(page.expired)
