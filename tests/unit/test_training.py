"""The mathematics, data and files of the reference trainer (`examples/training`)."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.training.feed import read_lines
from rollout.batch import Group
from rollout.schema import Rollout, Trajectory
from tests.helpers.lazy import Lazy
from tests.helpers.rollouts import chain, ended, sampled

torch = Lazy("torch")
data, losses, record = (Lazy(f"examples.training.{name}") for name in ("data", "losses", "record"))


def table(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def gradient(new, start, behaviour, advantages, mask=None, tokens=None):
    """Of the loss, by the new log-probs."""
    new = table(new).requires_grad_()
    mask = torch.ones_like(new, dtype=torch.bool) if mask is None else table(mask).bool()
    tokens = tokens or int(mask.sum())
    clip = losses.Clip(low=0.2, high=0.28, truncate=2.0)
    policy = losses.policy_loss(new, table(start), table(behaviour), table(advantages), mask, tokens, clip)
    policy.loss.backward()
    return new.grad[0].tolist(), policy


# -- advantages ------------------------------------------------------------------------------


def test_group_advantages_are_distances_from_the_mean_in_standard_deviations():
    assert losses.group_advantages([0, 0, 0, 1]) == pytest.approx(
        [-0.57735, -0.57735, -0.57735, 1.73205], abs=1e-4
    )


def test_leave_one_out_compares_with_the_mean_of_the_others():
    assert losses.group_advantages([1, 0, 0.5], "loo") == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("kind", ["group", "loo"])
@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.0] * 3, [0.7], []])
def test_equal_rewards_teach_nothing(kind, rewards):
    assert losses.group_advantages(rewards, kind) == pytest.approx([0.0] * len(rewards), abs=1e-6)


def test_tokens_have_the_advantage_of_their_rollout_or_each_its_own():
    sampled_of = {"token_ids": [1, 2, 3], "sampled": [False, True, True], "logprobs": [0.0, -1.0, -1.0]}
    both = [
        data.Sample(**sampled_of, versions=[None, "v", "v"], reward=1.0, advantage=advantage)
        for advantage in (0.5, [9.0, 0.25, -0.25])
    ]
    assert data.collate(both, "v").advantages.tolist() == [[0.5, 0.5], [0.25, -0.25]]


# -- policy loss -----------------------------------------------------------------------------


def test_on_policy_the_gradient_is_the_policy_gradient_averaged_over_tokens():
    same = [-0.5, -1.0, -2.0]
    slopes, loss = gradient(same, same, same, [1.0, -2.0, 0.5])
    assert slopes == pytest.approx([-1 / 3, 2 / 3, -0.5 / 3]) and loss.clipped == loss.truncated == 0


def test_clip_higher_lets_a_ratio_rise_further_than_it_may_fall():
    ratios = [1.25, 1.30, 0.85, 0.75]
    new = [math.log(ratio) for ratio in ratios]
    zeros = [0.0] * 4
    upwards, up = gradient(new, zeros, zeros, [1.0] * 4)
    downwards, down = gradient(new, zeros, zeros, [-1.0] * 4)
    # What goes too far in the wanted direction has no gradient; what has to come back has.
    assert [value != 0 for value in upwards] == [True, False, True, True] and up.clipped == 1
    assert [value != 0 for value in downwards] == [True, True, True, False] and down.clipped == 1


def test_the_weight_of_off_policy_tokens_is_bounded():
    start, behaviour = [0.0, 0.0, 0.0], [0.0, math.log(0.1), math.log(2.0)]
    slopes, loss = gradient(start, start, behaviour, [1.0] * 3)
    assert slopes == pytest.approx([-1 / 3, -2.0 / 3, -0.5 / 3]) and loss.truncated == 1


def test_tokens_that_were_not_sampled_move_nothing():
    same = [-0.5, -1.0]
    # Not even when what stands there is no number.
    slopes, loss = gradient(same, same, [-0.5, -900.0], [1.0, 1.0], mask=[1.0, 0.0])
    assert slopes == [-1.0, 0.0] and loss.loss.isfinite() and loss.truncated == 0


def test_the_kl_penalty_is_zero_at_the_reference_and_positive_elsewhere():
    here, mask = table([-1.0, -2.0]), torch.ones(1, 2, dtype=torch.bool)
    assert losses.kl_penalty(here, here, mask, 2).item() == 0
    assert losses.kl_penalty(here, here + 0.5, mask, 2).item() > 0
    assert losses.kl_penalty(here, here - 0.5, mask, 2).item() > 0


# -- the critic ------------------------------------------------------------------------------


def advantages_by_definition(values, reward, gamma, lam):
    """The sum over later errors, for one row in which everything was sampled."""
    n = len(values)
    errors = [(reward if t == n - 1 else gamma * values[t + 1]) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, n)) for t in range(n)]


@settings(max_examples=60, deadline=None)
@given(
    row=st.lists(st.tuples(st.floats(-2, 2), st.booleans()), min_size=1, max_size=12),
    reward=st.floats(-1, 1),
    gamma=st.floats(0.5, 1),
    lam=st.floats(0, 1),
)
def test_gae_is_its_definition_over_the_sampled_tokens_alone(row, reward, gamma, lam):
    values, mask = table([value for value, _ in row]), table([float(on) for _, on in row]).bool()
    advantages, returns = losses.gae(values, torch.tensor([reward]), mask, gamma, lam)
    expected = advantages_by_definition([value for value, on in row if on], reward, gamma, lam)
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-4)
    assert returns[mask].tolist() == pytest.approx((advantages + values)[mask].tolist())
    assert advantages[~mask].abs().sum() == 0 and returns[~mask].abs().sum() == 0


def test_with_lambda_one_an_advantage_is_the_reward_above_the_value():
    advantages, returns = losses.gae(
        table([0.2, 9.0, 0.6]), torch.tensor([1.0]), table([1, 0, 1]).bool(), 1.0, 1.0
    )
    assert advantages[0].tolist() == pytest.approx([0.8, 0.0, 0.4])
    assert returns[0].tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_whitening_sees_only_what_was_sampled():
    parts = [table([1.0, 100.0, 3.0]), table([1.0, 3.0])]
    out = losses.whiten(parts, [table([1, 0, 1]).bool(), table([1, 1]).bool()])
    assert out[0][0].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-4)
    assert out[1][0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-4)


def test_the_critics_error_counts_sampled_tokens_only():
    mask = table([1, 0]).bool()
    assert losses.value_loss(table([0.5, 7.0]), table([1.0, 0.0]), mask, 1).item() == pytest.approx(0.125)


# -- data ------------------------------------------------------------------------------------


def rollout(index: int, reward: float | None, versions=("r-1", "r-2"), drop=False) -> Rollout:
    first = sampled([4, 5], [-0.1, -0.2], policy_version=versions[0])
    second = sampled([7], [-0.3], policy_version=versions[1])
    trajectory = Trajectory(chains=[chain([1, 2, 3], first, [6], second)])
    return ended(id=f"g.{index}", index=index, reward=reward, drop=drop, trajectory=trajectory)


def group(*rollouts: Rollout) -> Group:
    return Group(id="g", batch="b", verdict="kept", rollouts=list(rollouts))


def test_rows_line_up_ids_masks_logprobs_and_versions():
    samples = data.samples_of(group(rollout(0, 1.0), rollout(1, 0.0)), losses.group_advantages)
    rows = data.collate(samples, "r-2")
    assert rows.ids[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    # Position t is about the id at t + 1.
    assert rows.mask[0].tolist() == [False, False, True, True, False, True]
    assert rows.behaviour[0].tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, -0.3])
    assert rows.current[0].tolist() == [False] * 5 + [True]
    assert rows.advantages[0].tolist() == pytest.approx([0, 0, 1, 1, 0, 1], abs=1e-4)
    assert rows.advantages[1].tolist() == pytest.approx([0, 0, -1, -1, 0, -1], abs=1e-4)
    assert rows.rewards.tolist() == [1.0, 0.0]


def test_dropped_and_silent_rollouts_are_neither_learned_from_nor_part_of_the_mean():
    silent = ended(id="g.3", index=3, reward=0.0, trajectory=Trajectory(chains=[chain([1, 2, 3])]))
    whole = group(rollout(0, 1.0), rollout(1, None, drop=True), rollout(2, 0.0), silent)
    samples = data.samples_of(whole, losses.group_advantages)
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    assert [sample.advantage for sample in samples] == pytest.approx([1.0, -1.0], abs=1e-4)
    assert data.is_informative(whole) and not data.is_informative(
        group(rollout(0, 1.0), rollout(1, None, drop=True))
    )


def test_every_chain_of_a_rollout_is_a_sample_with_its_advantage():
    first, second = rollout(0, 1.0), rollout(1, 0.0)
    first.trajectory.chains.append(first.trajectory.chains[0])
    samples = data.samples_of(group(first, second), losses.group_advantages)
    assert [sample.advantage for sample in samples] == pytest.approx([1.0, 1.0, -1.0], abs=1e-4)


def test_chains_that_are_not_to_be_learned_from_are_left_out_and_shift_no_mean():
    first, second = rollout(0, 1.0), rollout(1, 0.0)
    for role in ("discarded", "sub_agent", "auxiliary", "compaction"):
        first.trajectory.chains.insert(0, first.trajectory.chains[0].model_copy(update={"role": role}))
    samples = data.samples_of(group(first, second), losses.group_advantages)
    assert [sample.advantage for sample in samples] == pytest.approx([1.0] * 3 + [-1.0], abs=1e-4)


# -- files -----------------------------------------------------------------------------------


def row(step: int, reward: float | None = 0.5, gap: float | None = 1e-6) -> dict:
    return {
        "step": step, "reward": reward, "informative": None if reward is None else 1.0, "staleness": 0.2,
        "staleness_max": 1, "logprob_gap": gap, "scored": 4, "dropped": 1,
        "groups": {"kept": ["a", "b"], "filtered": ["c"], "failed": [], "cancelled": []},
        "seconds": {"rollouts": 2.0, "train": 1.0, "save": 0.5, "update": 0.5},
    }  # fmt: skip


def test_the_log_survives_a_line_cut_off_and_takes_no_step_twice(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2)) + "\n" + json.dumps(row(3))[:20])
    log = record.Log(file)
    log.keep_until(2)
    log.add(row(2))
    log.add(row(3))
    assert [line["step"] for line in read_lines(file)] == [1, 2, 3] == [line["step"] for line in log.rows]


def test_the_report_compares_the_ends_and_gives_the_largest_gap():
    rows = [row(step, reward=0.2 if step <= 20 else 0.9) for step in range(1, 61)]
    rows[30] = row(31, reward=None, gap=None)
    rows[35] = row(36, gap=3e-5)
    summary = record.report(rows, {"seed": 0})
    assert summary["results"] == {"reward_first20": 0.2, "reward_last20": 0.9, "max_logprob_gap": 3e-5}
    assert summary["groups"] == {"kept": 120, "filtered": 60, "failed": 0} and summary["minutes"] == 4.0
    json.dumps(summary)


def test_the_picture_is_drawn_even_where_steps_had_nothing_to_learn_from(tmp_path):
    path = tmp_path / "progress.png"
    record.plot([row(1), row(2, None, None), row(3)], path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
