"""The game of two policies, in real sandboxes: who alone is right has won, and both may be trained."""

from __future__ import annotations

import asyncio

import pytest

from rollout.adapters import base as adapters
from rollout.adapters import prime_rl, skyrl, slime
from rollout.schema import RolloutRequest, State
from services.settings import Settings
from workers.agent.replay import Action, Call
from workers.errors import AgentFault
from workers.handlers.calculator import Calculator
from workers.handlers.duel import Duel
from workers.inprocess import Actions, InProcess, demo_tokenizer

TASK = {"question": "37 times 85", "answer": "3145", "opponent": "rival"}


def player(answer: str, command: str = "echo $((37*85))") -> Actions:
    call = Call(name="execute_bash", arguments={"command": command})
    return Actions([Action(tool_calls=[call]), Action(content=answer)], demo_tokenizer())


def with_policy(rollout, policy):
    """A rollout as one whose agent has this policy."""
    return rollout.model_copy(update={"request": rollout.request.model_copy(update={"policy": policy})})


def duel(agent: Actions, rival: Actions, **request):
    runner = InProcess(Duel(), agent, Settings(), {"rival": rival})
    asked = {"trained_roles": ["opponent"], **request}
    (done,) = asyncio.run(runner.run(RolloutRequest(handler="duel", task=TASK, **asked)))
    return done


@pytest.mark.parametrize(("answer", "score"), [("3145", 0.0), ("3144", 1.0)])
def test_both_play_in_sandboxes_of_their_own_and_their_rewards_are_a_zero_sum(answer, score):
    done = duel(player("3145"), player(answer, "ls -A; touch mine; echo $((37*85))"))
    assert (done.state, done.reward, done.role_rewards) == (State.COMPLETED, score, {"opponent": -score})
    assert [(chain.role, chain.policy) for chain in done.trajectory.chains] == [
        ("opponent", "rival"),
        ("agent", None),
    ]
    heard = [m.text for s in done.trajectory.chains[0].segments for m in s.messages if m.role == "tool"]
    assert "3145" in heard[0] and "mine" not in heard[0]
    assert (done.metrics["opponent_calls"], done.metrics["turns"]) == (2, 2)


def test_trainers_get_both_sides_each_with_its_own_advantage():
    won, lost = duel(player("3145"), player("3144")), duel(player("3144"), player("3145"))
    group = [one.model_copy(update={"group_id": "g"}) for one in (won, lost)]
    assert (adapters.advantages(group), adapters.advantages(group, "opponent")) == ([1, -1], [-1, 1])
    # Each policy's trainer gets its own samples: the other's ids may be of another tokenizer.
    for policy, values in ((None, [1, -1]), ("rival", [-1, 1])):
        rows = slime.sample_dicts(group, group_index=0, centred=True, policy=policy)
        assert [(row["reward"], row["rollout_id"]) for row in rows] == [(values[0], 0), (values[1], 1)]
    both = [with_policy(one, "rival") for one in group]
    rows = slime.sample_dicts(both, group_index=0, centred=True)
    assert [row["reward"] for row in rows] == [-1, 1, 1, -1]  # opponent, agent; twice
    assert [row["rollout_id"] for row in rows] == [0, 0, 1, 1]
    # SkyRL gives a group's advantage to all rows of a rollout, so it has the agent's alone.
    assert len(skyrl.generator_output(group, step_wise=True)["rewards"]) == 2
    (side,) = prime_rl.training_samples(won, advantage=1.0)
    assert {value for value in side["advantages"] if value} == {1.0}
    sides = prime_rl.training_samples(both[0], advantage=1.0, role_advantages={"opponent": -1.0})
    assert [{value for value in side["advantages"] if value} for side in sides] == [{-1.0}, {1.0}]
    with pytest.raises(ValueError, match="has a reward of its own"):
        prime_rl.training_samples(both[0], advantage=1.0)
    untrained = duel(player("3145"), player("3144"), trained_roles=[])
    assert [sample.chain.role for sample in adapters.samples(untrained)] == ["agent"]


def test_a_side_whose_other_has_broken_its_sandbox_plays_on_to_its_end(monkeypatch):
    done = asyncio.Event()

    async def breaks(self, ctx):
        raise AgentFault("over its limits")

    async def plays(self, ctx):
        await asyncio.sleep(0.05)
        done.set()

    monkeypatch.setattr(Calculator, "run", breaks)
    monkeypatch.setattr(Duel, "_play_opponent", plays)
    with pytest.raises(AgentFault):
        asyncio.run(Duel().run(None))
    assert done.is_set()
