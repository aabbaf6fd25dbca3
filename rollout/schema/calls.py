"""Segments by the model call that they belong to, for who writes calls down."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.schema.trajectory import Chain, Segment


def calls_of(chain: Chain) -> Iterator[list[Segment]]:
    """Segments of a chain, those of one model call together."""
    together: list[Segment] = []
    for segment in chain.segments:
        if together and not (segment.sampled and together[-1].call_id == segment.call_id):
            yield together
            together = []
        together.append(segment)
    if together:
        yield together
