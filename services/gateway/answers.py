"""Answers with trajectories: JSON, or msgpack with typed arrays for those who ask for it (`rollout.arrays`).

On the second way no trajectory is read: each goes from Redis to its reader while the answer is sent, so that
an answer of any length takes the memory of one of them, or of a few where Redis is reached over TLS.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flask import Response, request
from pydantic import BaseModel

from rollout import arrays as wire
from rollout.schema import Rollout
from services.gateway.context import gateway

JSON = "application/json"


class Answer:
    """The answer to the request under way, in the form that it asks for."""

    def __init__(self) -> None:
        # The first one where the reader has no wish, or accepts both alike.
        self._msgpack = request.accept_mimetypes.best_match([JSON, wire.MEDIA_TYPE]) == wire.MEDIA_TYPE
        self._store = gateway().rollouts
        self._kept: dict[str, int] = {}
        """Bytes of each record in Redis."""
        self._made: dict[str, bytes] = {}

    def rollouts(self, ids: Iterable[str], *, trajectory: bool, tenant: str | None = None) -> list[Rollout]:
        """Rollouts to be put into the answer; see `RolloutStore.get_many`."""
        if not (trajectory and self._msgpack):
            return list(self._store.get_many(ids, trajectory=trajectory, tenant=tenant))
        found = []
        for rollout, record in self._store.get_records(ids, tenant=tenant):
            if isinstance(record, int):
                self._kept[rollout.id] = record
            elif record is not None:
                self._made[rollout.id] = record
            found.append(rollout)
        return found

    def send(self, model: BaseModel) -> Response:
        """The response."""
        body = model.model_dump_json()
        if self._msgpack:
            sizes = self._kept | {name: len(record) for name, record in self._made.items()}
            packed = wire.PackedAnswer(body, sizes, self._records())
            response = Response(packed, content_type=wire.MEDIA_TYPE)
            response.content_length = packed.nbytes
        else:
            response = Response(body, content_type=JSON)
        response.vary.add("Accept")
        return response

    def _records(self) -> Iterator[bytes]:
        if self._kept:
            yield from self._store.records(self._kept)
        yield from self._made.values()
