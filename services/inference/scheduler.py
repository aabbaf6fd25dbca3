"""Who is in the batch: admission in order of arrival, bounded by sequences and by cache memory.

Invariant: `running[i]` is row i of `batch`. A sequence is admitted only when its whole length fits beside
the others, so nothing is ever preempted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from services.inference.batch import COLUMN_STEP, Batch
from services.inference.sequence import Sequence

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass: bounds how long running sequences wait for newcomers."""


class Scheduler:
    """The queue and the rows; used by the engine thread only."""

    def __init__(self, batch: Batch, max_sequences: int, kv_capacity_tokens: int):
        self.batch = batch
        self.running: list[Sequence] = []
        self._queue: list[Sequence] = []
        self._max_sequences = max_sequences
        self._capacity = kv_capacity_tokens

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences by priority, then arrival."""
        for sequence in sequences:
            heapq.heappush(self._queue, sequence)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._queue)

    @property
    def reserved_columns(self) -> int:
        """Positions that the longest running sequence can come to need."""
        return max((s.reserved_tokens for s in self.running), default=0)

    @property
    def kv_usage(self) -> float:
        """Share of the cache that holds tokens, 0 to 1."""
        return sum(self.batch.lengths) / self._capacity

    def live(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [*self.running, *self._queue]

    def admit(self) -> list[Sequence]:
        """Move the next sequences that fit into one prefill pass to `running`; empty when none fits.

        The caller prefills them in this order, so that rows and `running` stay aligned.
        """
        admitted: list[Sequence] = []
        longest = 0
        while self._queue and len(self.running) < self._max_sequences:
            candidate = self._queue[0]
            padded = max(longest, len(candidate.prompt_ids)) * (len(admitted) + 1)
            if (admitted and padded > PREFILL_TOKENS) or not self._fits(candidate):
                break
            heapq.heappop(self._queue)
            longest = max(longest, len(candidate.prompt_ids))
            admitted.append(candidate)
            self.running.append(candidate)
        return admitted

    def _fits(self, candidate: Sequence) -> bool:
        """The slab is rectangular: every row is as wide as the widest."""
        width = max(candidate.reserved_tokens, self.reserved_columns)
        width = -(-width // COLUMN_STEP) * COLUMN_STEP
        return not self.running or (len(self.running) + 1) * width <= self._capacity

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Take ended sequences out of the rows or the queue."""
        gone = {id(s) for s in sequences}
        if not gone:
            return
        # From the last row down: a removed row is filled by the last one, which then is no candidate.
        for row in range(len(self.running) - 1, -1, -1):
            if id(self.running[row]) in gone:
                self.batch.remove(row)
                self.running[row] = self.running[-1]
                self.running.pop()
        kept = [s for s in self._queue if id(s) not in gone]
        if len(kept) != len(self._queue):
            heapq.heapify(kept)
            self._queue = kept

    def reset_running(self) -> None:
        """Forget all rows after a failed step, whose cache contents are unknown."""
        self.running = []
        self.batch.clear()
