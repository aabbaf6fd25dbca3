"""Backends in the heap of placement, and what tests ask of it."""

from __future__ import annotations

from rollout.schema import Backend
from services.state.backends.store import BackendStore, placed


def backend(name, **fields):
    return Backend(id=name, url=f"http://{name}", model="m", tokenizer="t", max_model_len=100, **fields)


def put(heap, *names, **fields):
    for name in names:
        heap.put(backend(name, **fields))


def home(placed):
    assert placed.word == "ok", placed
    return placed.backend.id


def loads(heap):
    return {backend.id: (backend.load, backend.live_rollouts) for backend in heap.list()}


class Heap(BackendStore):
    """Places one rollout at once, as a worker does many."""

    def acquire(self, *rollout, **options):
        return placed(*self.many([super().acquire(*rollout, **options)]))

    def extend(self, *rollout, **options):
        return placed(*self.many([super().extend(*rollout, **options)]))

    def release(self, *rollout):
        (released,) = self.many([super().release(*rollout)])
        return released
