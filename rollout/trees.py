"""Rollouts and their forks as a tree: what each turn of it is worth, for trainers that give credit by turn.

A fork has the turns that it shares as its prompt: they are sampled, and trained, in the rollout that it left.
So a tree is its rollouts, each cut at the turns at which others leave it; such a part is a `Span`.

The estimator: a span's value is the mean reward of the leaves below it, the judged rollouts that go through
it. Its advantage is that value less the mean of the values of the spans that begin where it begins, itself
included: what goes on there in the rollout that was left, and in each of the forks. Where only one of them
was judged there is nothing to compare, and it has the advantage of the span that it goes on from. Rollouts
of a group begin at one point as well: without forks this is GRPO's advantage, not divided by a deviation.

Such values are those of TreeRL (arXiv 2506.11902); Tree-GRPO (2509.21240) compares the leaves themselves, in
a tree and over the trees of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Literal

from rollout.adapters.base import own_samples, reward_of, trajectory_of, usable
from rollout.schema import Rollout

Point = tuple[str, int]
"""A rollout and so many turns of it, after which others go on; before the first turn a group and 0."""


@dataclass(frozen=True)
class Span:
    """Turns of a rollout that no other one leaves in their middle."""

    rollout: str
    after: int
    """Turns of the rollout before it, shared ones included."""
    until: int | None
    """The turn that it ends with; None = it ends with the rollout."""
    leaves: int
    """Judged rollouts that go through it, or begin below it; the others do not count."""
    value: float | None
    """Their mean reward; None where there is none."""
    advantage: float
    """0.0 where there is no value."""


class Tree:
    """Rollouts with the forks of them, and forks of those; or several trees, which need not share a group."""

    def __init__(
        self, rollouts: Iterable[Rollout], *, absent: Literal["refused", "root"] = "refused"
    ) -> None:
        """
        Args:
            absent: What a fork is whose source is not among them: refused, or the root of a tree of its own,
                beside the other forks of the same turn.

        Raises:
            ValueError: There are two of an id, a source is missing or has not so many turns, forks lead in a
                circle, or one that was not dropped has no reward.
        """
        self.rollouts: dict[str, Rollout] = {}
        for rollout in rollouts:
            if self.rollouts.setdefault(rollout.id, rollout) is not rollout:
                raise ValueError(f"rollout {rollout.id} is there twice")
            if rollout.reward is None and not rollout.drop:
                raise ValueError(f"rollout {rollout.id} has no reward: it is {rollout.state.value}")
        self._absent = absent
        self._turns = {name: _turns_of(rollout) for name, rollout in self.rollouts.items()}
        self._points = {name: self._point(rollout) for name, rollout in self.rollouts.items()}
        self._spans = self._valued()

    def spans(self, rollout_id: str) -> list[Span]:
        """The parts of a rollout's own turns, in order. KeyError: it is not of the tree."""
        return self._spans[rollout_id]

    def advantages(self, rollout_id: str) -> list[list[float]]:
        """For each of `own_samples` the advantages of its tokens, parallel to `response_ids`.

        0.0 where the mask is 0: on what was given, and all over a rollout that must not be learned from.
        """
        rollout = self.rollouts[rollout_id]
        numbers, spans = self._turns[rollout_id], self._spans[rollout_id]
        rows = []
        for sample in own_samples(rollout):
            row = []
            for segment in sample.chain.segments:
                turn = numbers[segment.call_id] if segment.sampled else 0
                of = (span.advantage for span in spans if span.until is None or turn <= span.until)
                row += [next(of) if segment.sampled else 0.0] * len(segment.token_ids)
            response = row[len(sample.prompt_ids) :]
            rows.append([value * bit for value, bit in zip(response, sample.loss_mask, strict=True)])
        return rows

    def _point(self, rollout: Rollout) -> Point:
        """Where it begins: a group, or the rollout that has sampled the last of the turns that it shares."""
        seen = {rollout.id}
        point = (rollout.group_id, 0)
        origin = rollout.request.origin
        turn = origin.turn if origin else 0
        while origin is not None and turn <= origin.turn:
            point = (origin.rollout, turn)
            if origin.rollout in seen:
                raise ValueError(f"the forks of rollout {origin.rollout} lead back to it")
            seen.add(origin.rollout)
            source = self.rollouts.get(origin.rollout)
            if source is None:
                if self._absent == "refused":
                    raise ValueError(
                        f"rollout {rollout.id} is a fork of {origin.rollout}, which is not among them: "
                        "add it, or say absent='root'"
                    )
                break
            origin = source.request.origin
            known = max(self._turns[source.id].values(), default=origin.turn if origin else 0)
            if turn > known and trajectory_of(source) is not None:
                raise ValueError(
                    f"rollout {rollout.id} is a fork of {source.id} at turn {turn}, which has {known}"
                )
        return point

    def _order(self) -> list[str]:
        """Ids, each behind the one that it was forked from; `_point` has refused circles."""
        sources = {name: [source] if turn else [] for name, (source, turn) in self._points.items()}
        return [name for name in TopologicalSorter(sources).static_order() if name in self.rollouts]

    def _valued(self) -> dict[str, list[Span]]:
        """The spans of all."""
        forks: dict[Point, list[str]] = {}
        for name, point in self._points.items():
            forks.setdefault(point, []).append(name)
        cuts = {name: [turn] for name, (_, turn) in self._points.items()}
        for source, turn in sorted(point for point in forks if point[1] and point[0] in cuts):
            cuts[source].append(turn)
        sums: dict[Point, tuple[float, int]] = {}
        order = self._order()
        for name in reversed(order):
            rollout = self.rollouts[name]
            total, count = (float(reward_of(rollout)), 1) if usable(rollout) else (0.0, 0)
            for place, turn in reversed([*enumerate(cuts[name])]):
                sums[name, turn] = total, count
                for fork in forks.get((name, turn), ()) if place else ():
                    total += sums[fork, turn][0]
                    count += sums[fork, turn][1]
        spans: dict[str, list[Span]] = {}
        for name in order:
            spans[name] = []
            for place, (turn, until) in enumerate(zip(cuts[name], [*cuts[name][1:], None], strict=True)):
                point = (name, turn) if place else self._points[name]
                source = point[0] if turn and point[0] in cuts else None
                beside = [sums[each, turn] for each in (*forks[point], *filter(None, [source]))]
                means = [total / count for total, count in beside if count]
                total, count = sums[name, turn]
                value = total / count if count else None
                advantage = 0.0 if value is None else value - sum(means) / len(means)
                if source and value is not None and len(means) == 1:
                    advantage = next(span.advantage for span in spans[source] if span.until == turn)
                spans[name].append(Span(name, turn, until, count, value, advantage))
        return spans


def _turns_of(rollout: Rollout) -> dict[str | None, int]:
    """The number of each call that was sampled in it; the first one comes after the turns that it shares."""
    trajectory = trajectory_of(rollout)
    chains = trajectory.own if trajectory else ()
    calls = dict.fromkeys(s.call_id for chain in chains for s in chain.segments if s.sampled)
    first = rollout.request.origin.turn if rollout.request.origin else 0
    return {call: number for number, call in enumerate(calls, start=first + 1)}


def tokens_ratio(rollouts: Sequence[Rollout]) -> float:
    """Tokens that were sampled for these rollouts, to those of as many that share nothing.

    Raises:
        ValueError: None was sampled, or they came without trajectories.
    """
    sampled = shared = 0
    for trajectory in filter(None, map(trajectory_of, rollouts)):
        sampled += trajectory.sampled_tokens
        shared += trajectory.branch.sampled_tokens if trajectory.branch else 0
    if not sampled:
        raise ValueError("no token was sampled in these rollouts, or they came without trajectories")
    return sampled / (sampled + shared)
