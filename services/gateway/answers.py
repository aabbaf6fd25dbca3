"""Answers with trajectories: JSON, or msgpack with typed arrays for those who ask for it (`rollout.wire`).

On the second way no trajectory is read: what lies in Redis is passed on.
"""

from __future__ import annotations

from collections.abc import Iterable

from flask import Response, request
from pydantic import BaseModel

from rollout import wire
from rollout.schema import Rollout
from services.gateway.context import gateway
from services.state import payloads

JSON = "application/json"


class Answer:
    """The answer to the request under way, in the form that it asks for."""

    def __init__(self) -> None:
        # The first one where the reader has no wish, or accepts both alike.
        self._msgpack = request.accept_mimetypes.best_match([JSON, wire.MEDIA_TYPE]) == wire.MEDIA_TYPE
        self._records: dict[str, bytes | memoryview] = {}

    def rollouts(self, ids: Iterable[str], *, trajectory: bool, tenant: str | None = None) -> list[Rollout]:
        """Rollouts to be put into the answer; see `RolloutStore.get_many`."""
        store = gateway().rollouts
        if not (trajectory and self._msgpack):
            return list(store.get_many(ids, trajectory=trajectory, tenant=tenant))
        found = []
        for rollout, stored in store.get_stored(ids, tenant=tenant):
            if stored:
                self._add(rollout, stored)
            found.append(rollout)
        return found

    def _add(self, rollout: Rollout, stored: bytes) -> None:
        try:
            self._records[rollout.id] = payloads.record(stored)
        except wire.WireError:  # it stays JSON
            rollout.trajectory = payloads.decode_trajectory(stored)

    def send(self, model: BaseModel) -> Response:
        """The response."""
        body = model.model_dump_json()
        if self._msgpack:
            packed = wire.PackedAnswer(body, self._records)
            response = Response(packed, content_type=wire.MEDIA_TYPE)
            response.content_length = packed.nbytes
        else:
            response = Response(body, content_type=JSON)
        response.vary.add("Accept")
        return response
