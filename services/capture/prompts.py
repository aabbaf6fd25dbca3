"""The prompt of a call: ids that are kept of the tree, and its tail rendered behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from rollout.trajectory import Message
from services.capture import metrics
from services.capture.call import ModelCall, Refusal
from services.capture.tree import Attachment, Tree
from services.state.capture.nodes import ROOT
from workers.agent.formats import Codec, CodecError

log = structlog.get_logger("capture")

LARGE = 20_000
"""Characters of a prompt that is rendered in a thread."""


@dataclass(frozen=True)
class Prompt:
    """What the engine is to read."""

    ids: list[int]
    place: Attachment
    """Where they begin in the tree."""
    given: list[int]
    """Those of them that are new."""


async def prompt_of(tree: Tree, codec: Codec, call: ModelCall) -> Prompt:
    """The prompt of a call, where it belongs in the tree.

    Raises:
        Refusal: The model's chat format cannot hold the conversation.
    """
    place = tree.attach(call)
    if place.parent != ROOT:
        before, sampled = tree.prompt(place.parent), tree.sampled(place.parent)
        try:
            given = await _rendered(_size(place.tail), codec.bridge, before, sampled, place.tail)
            return Prompt([*before, *sampled, *given], place, given)
        except CodecError as error:
            log.info("begins a branch: the format cannot append", error=str(error))
            metrics.UNBRIDGED.inc()
            place = replace(place, parent=ROOT, tail=call.messages)
    try:
        size = call.size or _size(call.messages)
        ids = await _rendered(size, codec.render, call.messages, call.tools)
    except CodecError as error:
        raise Refusal("invalid", f"the model's chat format cannot hold these messages: {error}") from error
    return Prompt(ids, place, ids)


def _size(messages: list[Message]) -> int:
    return sum(len(message.text) for message in messages)


async def _rendered(size: int, render: Callable[..., list[int]], *args: Any) -> list[int]:
    """What a codec makes of messages. All other calls wait while this is not done in a thread."""
    return await asyncio.to_thread(render, *args) if size > LARGE else render(*args)
