"""The prompt of a call: ids that are kept of the tree, and its tail rendered behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
from cachetools import LRUCache

from rollout.arrays import pack_ids
from rollout.trajectory import Message
from services.capture import metrics
from services.capture.call import ModelCall, Refusal
from services.capture.tree import Attachment, Tree
from services.state.capture.nodes import ROOT
from workers.agent.formats import Codec, CodecError

log = structlog.get_logger("capture")

LARGE = 20_000
"""Characters of a prompt that is rendered in a thread."""
MOST_IDS = 1 << 20
"""Ids that a process keeps as lists, 36 bytes each: to unpack 70,000 takes a millisecond."""


@dataclass(frozen=True)
class Prompt:
    """What the engine is to read."""

    ids: list[int]
    place: Attachment
    """Where they begin in the tree."""
    given: list[int]
    """Those of them that are new."""


class Prompts:
    """Makes prompts, and keeps the latest one of each tree for the next."""

    def __init__(self, most_ids: int = MOST_IDS) -> None:
        self._latest: LRUCache[Tree, Prompt] = LRUCache(most_ids, lambda prompt: len(prompt.ids))

    async def of(self, tree: Tree, codec: Codec, call: ModelCall) -> Prompt:
        """The prompt of a call, where it belongs in the tree.

        Raises:
            Refusal: The model's chat format cannot hold the conversation.
        """
        place = tree.attach(call)
        if place.parent != ROOT:
            before, sampled = self._prompt(tree, place.parent), tree.sampled(place.parent)
            try:
                given = await _rendered(_size(place.tail), codec.bridge, before, sampled, place.tail)
                return self._keep(tree, Prompt(before + (sampled + given), place, given))
            except CodecError as error:
                log.info("begins a branch: the format cannot append", error=str(error))
                metrics.UNBRIDGED.inc()
                place = replace(place, parent=ROOT, tail=call.messages)
        try:
            size = call.size or _size(call.messages)
            ids = await _rendered(size, codec.render, call.messages, call.tools)
        except CodecError as error:
            raise Refusal(
                "invalid", f"the model's chat format cannot hold these messages: {error}"
            ) from error
        return self._keep(tree, Prompt(ids, place, ids))

    def _prompt(self, tree: Tree, place: int) -> list[int]:
        """Of a node: the latest one if it was made for that, else as stored."""
        latest, node = self._latest.get(tree), tree.nodes[place]
        made = latest and latest.place.parent == node.parent and pack_ids(latest.given) == node.ids
        return latest.ids if made else tree.prompt(place)

    def _keep(self, tree: Tree, prompt: Prompt) -> Prompt:
        if len(prompt.ids) <= self._latest.maxsize:
            self._latest[tree] = prompt
        return prompt


def _size(messages: list[Message]) -> int:
    return sum(len(message.text) for message in messages)


async def _rendered(size: int, render: Callable[..., list[int]], *args: Any) -> list[int]:
    """What a codec makes of messages. All other calls wait while this is not done in a thread."""
    return await asyncio.to_thread(render, *args) if size > LARGE else render(*args)
