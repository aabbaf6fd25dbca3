"""A session's tree as chains: every path from a root to a leaf is one, with its role and its parent.

Each sampled id has loss in exactly one chain, and is given in the others: in the chain that reached the end
(the latest leaf of role `agent`) if it is on its path, else in the latest one of a role that is trained, else
in the latest. Which ids a chain has depends on the tree alone. The roles are labels, guessed from what was
said, for a program does not tell them:

- `discarded`: a leaf beside a node that answered the same request and was gone on from (a retry's first
  answer).
- `compaction`: a leaf whose text, or a part of it in a tag such as <summary>, of at least 80 characters, is
  in the prompt of a later root: in a message that is not the assistant's, or in its first turn where the
  prompt has fewer messages than the leaf's conversation. That root has left it: its parent.
- `sub_agent`: chains of a root of which a leaf's text is in a tool message of another root's, behind a turn
  from before the root: the chain of that message is its parent. A text below 40 characters must be all of the
  message.
- `auxiliary`: chains of a root without tools, where others have them; or of one of a single turn that nothing
  repeats, where it began after the first other root and with another first message of a user.
- `agent`: all else. A later root of it (such as one with another system prompt) has as its parent the chain
  of the agent's turn that came before it.

A text is looked for with its spaces made single. What is taken for an agent's or a sub-agent's by mistake is
trained all the same; what is wrongly taken for auxiliary or discarded is not, and the receipt's share tells.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rollout.arrays import unpack_ids, unpack_logprobs
from rollout.schema.agents import Asked, CallRecord, Receipt
from rollout.schema.trajectory import TRAINED, Chain, ChainRole, Segment
from services.capture.matching import after
from services.capture.tree import Tree, answer_of
from services.engines.base import Completion
from services.state.capture.nodes import ROOT, Node
from services.state.turns.entries import from_json, sampled_segments

LEAST_SUMMARY = 80
"""Characters of a text that would hardly be in a prompt by chance."""
LEAST_REPORT = 40
MOST_ASKED = 32
"""Sets of parameters that a receipt tells: a program that has another one in each call fills no record."""
MOST_COMPARED = 2 << 30
"""Characters of prompts that are looked through for other calls' texts, about as many as take 2 s: where a
program has sent more, what is left counts as an agent's."""
_TAGGED = re.compile(r"<(\w+)>(.*?)</\1>")


def build(
    nodes: Sequence[Node], harness: str, *, retries: int = 0, refused: int = 0
) -> tuple[list[Chain], Receipt]:
    """The chains of a session, the one that reached the end last, and the receipt.

    Args:
        retries, refused: As the receipt has them: the nodes do not tell.

    Raises:
        ValueError: A node is damaged.
    """
    tree = Tree(nodes)
    labels = _Labels(tree)
    role, owner = labels.role, {}
    # The leaf in whose chain a node has its loss; what is behind a leaf's own node is its own, too.
    for leaf in sorted(role, key=lambda leaf: (leaf == labels.end, role[leaf] in TRAINED, leaf)):
        owner |= dict.fromkeys(tree.lineage(leaf), leaf)
    order = sorted(role, key=lambda leaf: (leaf == labels.end, leaf))
    asked = [_asked(node) for node in nodes]
    chains = []
    for leaf in order:
        path = tree.lineage(leaf)
        shared = [place for place in path if owner[place] != leaf]
        left = shared[-1] if shared else labels.left.get(path[0])
        parent = None if left is None or owner[left] == leaf else order.index(owner[left])
        chain = Chain(role=role[leaf], parent=parent)
        for place in path:
            for segment in (asked[place], *_said(nodes[place], given=owner[place] != leaf)):
                chain.append(segment)
        chains.append(chain)
    return chains, _receipt(tree, harness, chains, retries, refused)


def _asked(node: Node) -> Segment:
    messages = from_json(node.messages)
    return Segment(role=messages[-1].role, token_ids=unpack_ids(node.ids), messages=messages)


def _said(node: Node, given: bool) -> list[Segment]:
    """What a node sampled; given: where another chain has its loss."""
    ids, turn = unpack_ids(node.sampled), answer_of(node)
    if given:
        return [Segment(role="assistant", token_ids=ids, call_id=node.call_id, messages=[turn])]
    logprobs = unpack_logprobs(node.logprobs, node.width)
    more = (node.finish_reason, node.spans, node.cached_tokens, node.routed_experts)
    return sampled_segments(Completion(node.call_id, ids, logprobs, *more), turn)


def _receipt(tree: Tree, harness: str, chains: Sequence[Chain], retries: int, refused: int) -> Receipt:
    nodes = tree.nodes
    digest, drift = b"", 0
    for place, node in enumerate(nodes):
        digest = hashlib.sha256(digest + tree.packed_prompt(place) + node.sampled).digest()
        drift += node.parent != ROOT and after(tree.asked(place), answer_of(node)) != node.path
    delivered, sampled = (
        sum(len(s.token_ids) for chain in some for s in chain.segments if s.sampled)
        for some in ([chain for chain in chains if chain.role in TRAINED], chains)
    )
    return Receipt(
        harness=harness,
        engines=list(dict.fromkeys(node.backend for node in nodes)),
        versions=list(dict.fromkeys(name for node in nodes for name, _, _ in node.spans if name is not None)),
        calls=len(nodes),
        retries=retries,
        refused=refused,
        branches=len(tree.children(ROOT)),
        drift=drift,
        sampled_tokens=sampled,
        share_delivered=delivered / sampled if sampled else 1.0,
        asked=_parameters(nodes),
        digest=digest.hex(),
    )


def timed(nodes: Sequence[Node]) -> list[CallRecord]:
    """When the calls were. A node of an earlier release does not tell."""
    lengths: list[int] = []
    """Ids of each node's prompt and answer."""
    calls = []
    for node in nodes:
        prompt = len(node.ids) // 4 + (lengths[node.parent] if node.parent != ROOT else 0)
        lengths.append(prompt + len(node.sampled) // 4)
        if node.at_ms:
            took_s, more = node.took_ms / 1000, {"prompt_tokens": prompt, "cached_tokens": node.cached_tokens}
            at, backend = node.at_ms / 1000 - took_s, node.backend.partition(" ")[2]
            calls.append(
                CallRecord(kind="model", id=node.call_id, at=at, seconds=took_s, backend=backend, **more)
            )
    return calls


def _parameters(nodes: Sequence[Node]) -> list[Asked]:
    sets: dict[str, Asked] = {}
    for node in nodes:
        name = json.dumps(node.asked, sort_keys=True)
        if name in sets or len(sets) < MOST_ASKED:
            sets.setdefault(name, Asked(parameters=node.asked, calls=0)).calls += 1
    return list(sets.values())


class _Labels:
    """The role of each leaf, the leaf that reached the end, and where roots come from."""

    def __init__(self, tree: Tree) -> None:
        self._tree, nodes = tree, tree.nodes
        self._compared = 0
        self._same: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        """Nodes that answered the same request, by their parent and its digest."""
        self._root: list[int] = []
        """Of each node."""
        for place, node in enumerate(nodes):
            self._same[node.parent, tree.asked(place)].append(place)
            self._root.append(place if node.parent == ROOT else self._root[node.parent])
        self._roots = tree.children(ROOT)
        self._said = [_single(answer_of(node).text) for node in nodes]
        self._heard = [[(m.role, _single(m.text)) for m in from_json(node.messages)] for node in nodes]
        leaves = [place for place in range(len(nodes)) if not tree.children(place)]
        self._summary: dict[int, int] = {}
        """By root the leaf that it was made of."""
        for leaf in leaves:
            if (root := self._made_of(leaf)) is not None:
                self._summary.setdefault(root, leaf)
        self._kind: dict[int, ChainRole] = {}
        self.left: dict[int, int] = {}
        """By root the node whose chain it has left, or that it was started from."""
        for root in self._roots:
            self._look_at(root, [leaf for leaf in leaves if self._root[leaf] == root])
        self.role = {leaf: self._role(leaf) for leaf in leaves}
        self.end = max(
            leaves,
            key=lambda leaf: (self.role[leaf] == "agent", self.role[leaf] in TRAINED, leaf),
            default=ROOT,
        )

    def _role(self, leaf: int) -> ChainRole:
        if leaf in self._summary.values():
            return "compaction"
        kind = self._kind[self._root[leaf]]
        return "discarded" if leaf != self._root[leaf] and self._beside(leaf) is not None else kind

    def _beside(self, leaf: int) -> int | None:
        """The node for which a leaf was discarded."""
        tree = self._tree
        same = reversed(self._same[tree.nodes[leaf].parent, tree.asked(leaf)])
        return next((place for place in same if place != leaf and tree.children(place)), None)

    def _look_at(self, root: int, leaves: Sequence[int]) -> None:
        """Find out what the chains of a root are for, and what they have left."""
        reader = next((place for leaf in leaves for place in self._readers(leaf)), None)
        before = self._summary.get(root)
        if before is not None:
            self._kind[root] = "agent" if reader is None else "sub_agent"
        elif reader is not None:
            self._kind[root], before = "sub_agent", reader
        elif root in leaves and (before := self._beside(root)) is not None:
            self._kind[root] = "discarded"
        elif self._is_beside_the_task(root):
            self._kind[root] = "auxiliary"
        else:
            self._kind[root] = "agent"
            agents = (at for at in reversed(range(root)) if self._kind[self._root[at]] == "agent")
            used = (at for at in agents if self._tree.children(at) or self._beside(at) is None)
            before = next(used, None)
        if before is not None:
            self.left[root] = before

    def _made_of(self, leaf: int) -> int | None:
        """The first root that was made of a leaf's summary."""
        texts = [self._said[leaf], *(match[2].strip() for match in _TAGGED.finditer(self._said[leaf]))]
        texts = [text for text in texts if len(text) >= LEAST_SUMMARY]
        length = sum(len(self._heard[place]) + 1 for place in self._tree.lineage(leaf))
        bare = not self._has_tools(self._root[leaf])
        for root in self._roots if texts else ():
            if root <= leaf:
                continue
            shorter = len(self._heard[root]) < length or (bare and self._has_tools(root))
            first = next((at for at, (role, _) in enumerate(self._heard[root]) if role == "assistant"), None)
            for at, (role, heard) in enumerate(self._heard[root]):
                fits = role != "assistant" or (at == first and shorter)
                if fits and any(self._has(heard, text) for text in texts):
                    return root
        return None

    def _readers(self, leaf: int) -> Iterator[int]:
        """Nodes of other roots that were told a leaf's text by a tool, called before its root."""
        text, root = self._said[leaf], self._root[leaf]
        for place in range(leaf + 1, len(self._tree.nodes) if text else 0):
            if self._root[place] == root or not ROOT < self._tree.nodes[place].parent < root:
                continue
            for role, heard in self._heard[place]:
                if role == "tool" and (
                    text == heard or (len(text) >= LEAST_REPORT and self._has(heard, text))
                ):
                    yield place

    def _is_beside_the_task(self, root: int) -> bool:
        equipped = [place for place in self._roots if self._has_tools(place)]
        first, text = (equipped or self._roots)[0], self._said[root]
        if equipped and root not in equipped:
            return True
        if root <= first or self._tree.children(root) or self._asks(root) == self._asks(first):
            return False
        others = (heard for place, heard in enumerate(self._heard) if place != root)
        unheard = not text or not any(self._has(said, text) for heard in others for _, said in heard)
        return unheard and self._compared < MOST_COMPARED

    def _has(self, heard: str, text: str) -> bool:
        """Whether a text was heard, as long as so much may be looked through."""
        self._compared += len(heard)
        return self._compared < MOST_COMPARED and text in heard

    def _has_tools(self, root: int) -> bool:
        return self._tree.nodes[root].tools not in ("", "[]")

    def _asks(self, root: int) -> str:
        """The first message of a user."""
        return next((text for role, text in self._heard[root] if role == "user"), "")


def _single(text: str) -> str:
    return " ".join(text.split())
