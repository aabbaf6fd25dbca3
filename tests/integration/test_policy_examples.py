"""The examples of several policies, in a short form, on a whole service with the demo model."""

from __future__ import annotations

from examples import judge, selfplay
from rollout.adapters.base import samples
from rollout.schema import State


def test_both_players_of_a_game_are_samples_with_rewards_that_sum_to_nothing(client):
    rows = selfplay.play(client, groups=2, n=3, opponent="default")
    agents = {row["rollout"]: row for row in rows if row["side"] == "agent"}
    others = {row["rollout"]: row for row in rows if row["side"] == "opponent"}
    assert len(agents) == len(others) == 6
    for name, row in agents.items():
        assert row["reward"] + others[name]["reward"] == 0
        assert row["sampled"] > 0 and others[name]["sampled"] > 0 and others[name]["versions"]
    for rollout in map(client.get, agents):
        assert [sample.chain.role for sample in samples(rollout)] == ["opponent", "agent"]
        assert rollout.role_rewards == {"opponent": -rollout.reward}
        assert rollout.metrics["opponent_calls"] >= 1
    assert selfplay.table(rows).row_count == len(rows)
    assert all(backend.live_rollouts == 0 for backend in client.backends()), "each place is given back"


def test_games_go_on_where_their_agents_have_every_place_there_is(client, embedded):
    client.add_backend(embedded.url, max_rollouts=2)
    try:
        # Were the opponents to wait for room, all would wait for each other until RUN's time is over.
        rollouts = client.run(selfplay.games(2, 3, "default", seed=1), timeout=60)
    finally:
        client.add_backend(embedded.url)
    assert [rollout.state for rollout in rollouts] == [State.COMPLETED] * 6


def test_a_provider_judges_in_words_by_a_rubric(client):
    with judge.stand_in() as at:
        rollouts = judge.judged(client, at, model=None, key=None, n=4, votes=3)
    assert [rollout.state for rollout in rollouts] == [State.COMPLETED] * 4
    for rollout in rollouts:
        assert rollout.reward in (0.0, 0.25, 0.625, 1.0)
        assert set(rollout.reward_components) == {"right", "number"}
        asked = [chain for chain in rollout.trajectory.chains if chain.role == "judge"]
        assert len(asked) == rollout.metrics.get("judge_calls", 0) in (0, 3)
        assert all(chain.text_only and chain.model == "stand-in" for chain in asked)
        assert rollout.trajectory.chain.policy is None
        kept = client.get(rollout.id, include="arrays")
        assert kept.arrays.token_ids.tolist() == rollout.trajectory.chain.token_ids
    assert any(rollout.metrics.get("judge_calls", 0) for rollout in rollouts)
    assert "stand-in" not in {backend.model for backend in client.backends()}
