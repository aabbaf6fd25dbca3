"""Answers with trajectories: JSON, or msgpack with typed arrays for those who ask for it (`rollout.arrays`).

On the second way no trajectory is read: each goes from Redis to its reader while the answer is sent, so that
an answer of any length takes the memory of one of them, or of a few where Redis is reached over TLS. Large
answers of the first kind go out compressed to those who accept it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flask import Flask, Response, request
from pydantic import BaseModel

from rollout import arrays as wire
from rollout.schema import Rollout
from services.gateway.context import gateway
from services.gateway.http import JSON

LEAST_BYTES = 32 << 10
"""The smallest answer that is compressed; below it compressing takes longer than it saves on the wire."""
LEVEL = 1
"""The gateway has one processor for everybody; higher levels take more of it for a few percent."""


class Answer:
    """The answer to the request under way, in the form that it asks for; with `msgpack` in that one."""

    def __init__(self, *, msgpack: bool = False) -> None:
        # The first one where the reader has no wish, or accepts both alike.
        wish = request.accept_mimetypes.best_match([JSON, wire.MEDIA_TYPE])
        self._msgpack = msgpack or wish == wire.MEDIA_TYPE
        self._store = gateway().rollouts
        self._kept: dict[str, int] = {}
        """Bytes of each record in Redis."""
        self._made: dict[str, bytes] = {}

    def rollouts(self, ids: Iterable[str], *, trajectory: bool, tenant: str | None = None) -> list[Rollout]:
        """Rollouts to be put into the answer; see `RolloutStore.get_many`."""
        if not (trajectory and self._msgpack):
            return list(self._store.get_many(ids, trajectory=trajectory, tenant=tenant))
        rollouts = []
        for rollout, record in self._store.get_records(ids, tenant=tenant):
            if isinstance(record, int):
                self._kept[rollout.id] = record
            elif record is not None:
                self._made[rollout.id] = record
            rollouts.append(rollout)
        return rollouts

    def send(self, model: BaseModel) -> Response:
        """The response."""
        if self._msgpack:
            packed = self.pack(model)
            response = Response(packed, content_type=wire.MEDIA_TYPE)
            response.content_length = packed.nbytes
        else:
            response = Response(model.model_dump_json(), content_type=JSON)
        response.vary.add("Accept")
        return response

    def pack(self, model: BaseModel) -> wire.PackedAnswer:
        """The msgpack of it, in pieces."""
        sizes = self._kept | {name: len(record) for name, record in self._made.items()}
        return wire.PackedAnswer(model.model_dump_json(), sizes, self._records())

    def _records(self) -> Iterator[bytes]:
        if self._kept:
            yield from self._store.records(self._kept)
        yield from self._made.values()


def event_stream(body: Iterable[Any], *on_close: Callable[[], None]) -> Response:
    """Server-sent events, and what is to be done when they end, however that comes."""
    response = Response(body, content_type="text/event-stream")
    # A proxy must not collect the events into larger pieces.
    response.headers.update({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
    for call in on_close:  # not in the generator: one that was never begun runs no `finally`
        response.call_on_close(call)
    return response


def compress_answers(app: Flask) -> None:
    """Compress what is large, unless the reader prefers it as it is."""

    @app.after_request
    def _compress(response: Response) -> Response:
        if response.is_streamed or response.direct_passthrough or "Content-Encoding" in response.headers:
            return response
        if (response.content_length or 0) < LEAST_BYTES:
            return response
        response.vary.add("Accept-Encoding")
        accepted = request.accept_encodings
        wish = accepted.quality("gzip")
        if wish > 0 and wish >= accepted.quality("identity"):
            response.set_data(gzip.compress(response.get_data(), LEVEL, mtime=0))
            response.headers["Content-Encoding"] = "gzip"
        return response
