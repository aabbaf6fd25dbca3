"""The tree of a session's turns: where a call attaches, and the ids that are kept of what it repeats.

Invariant: the ids of a node are those that the engine was sent and what it sampled, as stored. Nothing here
renders or encodes anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from rollout.arrays import unpack_ids
from rollout.trajectory import Message
from services.capture.call import ModelCall
from services.capture.matching import after, onward, paths
from services.state.capture.nodes import ROOT, Node
from services.state.turns.entries import from_json


@dataclass(frozen=True)
class Attachment:
    """Where a call belongs."""

    parent: int
    """Place of the node whose conversation it repeats; `ROOT` = none."""
    tail: list[Message]
    """What follows the parent's answer, at least one message and none of the assistant; of a root all."""
    path: bytes
    """Digest of the whole request. That of its node is `matching.after(path, answer)`."""
    earlier: int
    """Nodes that answered this very request before: each is sampled by a seed of its own."""


class Tree:
    """The nodes of a session in the order in which they were written."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        """
        Raises:
            ValueError: A node names a parent that is not before it.
        """
        self.nodes: list[Node] = []
        self.bytes = 0
        """Of what they hold."""
        self._at: dict[bytes, list[int]] = {}
        """Places by path: several where a request was repeated and answered with the same words."""
        self._children: dict[int, list[int]] = {}
        self._asked: dict[int, bytes] = {}
        """Digests of nodes' requests, as far as they were wanted."""
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> int:
        """Take a node in, and tell its place.

        Raises:
            ValueError: The parent that it names is not there.
        """
        place = len(self.nodes)
        if not ROOT <= node.parent < place:
            raise ValueError(f"node {place} names {node.parent} as its parent, which is not there")
        self.nodes.append(node)
        held = (node.ids, node.messages, node.tools, node.sampled, node.logprobs, node.message)
        self.bytes += sum(map(len, held))
        self._at.setdefault(node.path, []).append(place)
        self._children.setdefault(node.parent, []).append(place)
        return place

    def attach(self, call: ModelCall) -> Attachment:
        """Where a call belongs: behind the deepest node whose conversation it repeats, answer included.

        That can only be a node whose answer is the call's last turn. One that is shallower would leave a turn
        in the tail, which cannot be put behind sampled ids without encoding it again; and where nothing
        follows the last turn, there is nothing to be answered. Either makes a root.
        """
        messages = call.messages
        digests = paths(call.tools, messages, call.history)
        end = next((at for at in range(len(messages), 0, -1) if messages[at - 1].role == "assistant"), 0)
        places = self._at.get(digests[end]) if 0 < end < len(messages) else None
        parent = self._nearest(places, messages[end - 1]) if places else ROOT
        tail = messages[end:] if places else list(messages)
        earlier = sum(self._answers(place, digests[-1]) for place in self.children(parent))
        return Attachment(parent, tail, digests[-1], earlier)

    def _nearest(self, places: list[int], turn: Message) -> int:
        """Of nodes that say the same, the one whose calls have the ids that were sent; else the last."""
        if len(places) > 1 and turn.tool_calls:
            sent = {call.id for call in turn.tool_calls}
            for place in reversed(places):
                if sent & {call.id for call in answer_of(self.nodes[place]).tool_calls}:
                    return place
        return places[-1]

    def children(self, place: int) -> list[int]:
        """Places of the nodes right behind a node; of `ROOT` the roots."""
        return self._children.get(place, [])

    def asked(self, place: int) -> bytes:
        """The digest of a node's request, worked out from what it and its parent say."""
        if place not in self._asked:
            node, messages = self.nodes[place], from_json(self.nodes[place].messages)
            if node.parent == ROOT:
                digests = paths(json.loads(node.tools or "[]"), messages)
            else:
                parent = self.nodes[node.parent]
                digests = list(onward(parent.path, messages, answer_of(parent)))
            self._asked[place] = digests[-1]
        return self._asked[place]

    def _answers(self, place: int, path: bytes) -> bool:
        """Whether a node answers the request of a digest. How that named its parent's calls, which a program
        may name and order anew, is not kept: the node's own digest tells of it.
        """
        node = self.nodes[place]
        return self.asked(place) == path or (
            node.parent != ROOT and after(path, answer_of(node)) == node.path
        )

    def lineage(self, place: int) -> list[int]:
        """Places from the root to a node, itself included."""
        places = []
        while place != ROOT:
            places.append(place)
            place = self.nodes[place].parent
        return places[::-1]

    def prompt(self, place: int) -> list[int]:
        """The ids that the engine was sent for a node.

        They are joined anew each time: of 70,000 ids in 200 turns that takes less than making a list of them,
        and nothing is kept.
        """
        return unpack_ids(self.packed_prompt(place))

    def packed_prompt(self, place: int) -> bytes:
        """The same as int32."""
        nodes = [self.nodes[place] for place in self.lineage(place)]
        return b"".join([piece for node in nodes for piece in (node.ids, node.sampled)][:-1])

    def sampled(self, place: int) -> list[int]:
        """The ids that it then sampled: with `prompt` what `Codec.bridge` wants."""
        return unpack_ids(self.nodes[place].sampled)


def answer_of(node: Node) -> Message:
    """The turn as the program was told it."""
    return Message.model_validate_json(node.message)
