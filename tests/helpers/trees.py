"""Rollouts that share turns, made of their calls, without a service."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.schema import Origin, Rollout, RolloutRequest, Segment, Trajectory
from rollout.trajectory import Branch, Chain, Message
from tests.helpers.rollouts import chain, ended, sampled

PROMPT = [1, 2]


def turn_ids(call: str) -> list[int]:
    """Ids of a call: two or three."""
    number = int(call, 36)
    return [100 + number, 200 + number, 300 + number][: 2 + number % 2]


def rolled(
    name: str,
    calls: Sequence[str],
    reward: float | None = 1.0,
    origin: tuple[str, int] | None = None,
    **fields,
) -> Rollout:
    """A rollout of these calls, an observation behind each; those before its origin's turn are given."""
    made, shared = chain(PROMPT), origin[1] if origin else 0
    made.segments[0].messages = [Message(role="user", content="Q")]
    for number, call in enumerate(calls):
        said = {"call_id": call, "messages": [Message(role="assistant", content=call)]}
        if number < shared:
            made.append(Segment(role="assistant", token_ids=turn_ids(call), **said))
        else:
            ids = turn_ids(call)
            made.append(sampled(ids, [-0.5] * len(ids), policy_version="step-3", **said))
        answer = Message(role="tool", content=f"saw {call}")
        made.append(Segment(role="tool", token_ids=[9], messages=[answer]))
    request = RolloutRequest(
        handler="h", origin=Origin(rollout=origin[0], turn=origin[1]) if origin else None
    )
    branch = branch_of(made, calls, origin) if origin else None
    values = {"reward": reward, "drop": reward is None, "request": request, "finish_reason": "stop"}
    values["group_id"] = f"forks-{origin[0]}-{origin[1]}" if origin else "g"
    values["trajectory"] = Trajectory(chains=[made], branch=branch)
    return ended(id=name, **(values | fields))


def branch_of(made: Chain, calls: Sequence[str], origin: tuple[str, int]) -> Branch:
    """What a fork says of the turns that it shares."""
    rollout, turn = origin
    sampled_there = sum(len(turn_ids(call)) for call in calls[:turn])
    tokens = len(PROMPT) + sampled_there + turn
    return Branch(
        rollout=rollout, turn=turn, tokens=tokens, sampled_tokens=sampled_there, policy_versions=["step-3"]
    )


def family() -> list[Rollout]:
    """A source and two forks of its first turn."""
    return [
        rolled("s", "abc", 1.0),
        rolled("f1", "ad", 0.0, ("s", 1), index=0),
        rolled("f2", "aef", 0.0, ("s", 1), index=1),
    ]
