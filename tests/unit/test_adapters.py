"""What the adapters make of rollouts that were dropped, cut off, or rewrote their history."""

from __future__ import annotations

import re
import sys
from unittest.mock import MagicMock

import numpy as np
import pytest

from rollout.adapters import areal, base, nemo_gym, prime_rl, skyrl, slime, trl, verl
from rollout.arrays import Arrays
from rollout.schema import Blame, ErrorInfo, Rollout, RolloutRequest, State
from rollout.trajectory import Chain, FinishReason, Message, Segment, ToolCall, Trajectory
from tests.helpers.rollouts import chain as chain_of
from tests.helpers.rollouts import ended, sampled
from tests.helpers.stack import ROOT
from workers.handlers.math import MathTask


def chain(*versions: str) -> Chain:
    """A prompt, then a call and an observation a version."""
    made = chain_of([1, 2])
    made.segments[0].messages = [Message(role="system", content="S"), Message(role="user", content="Q")]
    for turn, version in enumerate(versions):
        call = ToolCall(id=f"t{turn}", name="add", arguments={"a": 1})
        text = Message(role="assistant", content=f"A{turn}", tool_calls=[call])
        fields = {"policy_version": version, "call_id": f"c{turn}", "messages": [text]}
        made.append(sampled([10 + turn, 20 + turn], [-0.5, -0.25], **fields))
        answer = Message(role="tool", content="2", tool_call_id=f"t{turn}")
        made.append(Segment(role="tool", token_ids=[30 + turn], messages=[answer]))
    return made


def rollout(index=0, reward=1.0, *, chains=None, drop=False, **more) -> Rollout:
    fields = {
        "reward": None if drop else reward,
        "drop": drop,
        "finish_reason": FinishReason.STOP,
        "trajectory": Trajectory(chains=[chain("step-3", "step-4")] if chains is None else chains),
        "stage_seconds": {"run": 2.0, "eval": 0.5},
    }
    return ended(id=f"r{index}", index=index, **(fields | more))


DROPPED = rollout(
    2,
    drop=True,
    state=State.FAILED,
    error=ErrorInfo(blame=Blame.INFRASTRUCTURE, type="Gone", message="gone"),
)
GROUP = [rollout(0, 1.0), rollout(1, 0.0), DROPPED]


def test_a_dropped_rollout_teaches_nothing_and_shifts_no_baseline():
    zeros = [0] * 6
    assert base.neutral_reward(GROUP) == 0.5
    assert trl.rollout_func_result(GROUP)["reward"] == [1.0, 0.0, None]
    assert trl.rollout_func_result(GROUP)["env_mask"] == [[1, 1, 0, 1, 1, 0]] * 2 + [zeros]
    output = skyrl.generator_output(GROUP)
    assert (output["rewards"], output["loss_masks"][2]) == ([1.0, 0.0, 0.5], zeros)
    row = verl.agent_loop_output(DROPPED, neutral_reward=base.neutral_reward(GROUP))
    assert (row["reward_score"], row["response_mask"]) == (0.5, zeros)
    samples = slime.sample_dicts(GROUP, group_index=0)
    assert [sample["remove_sample"] for sample in samples] == [False, False, True]
    assert [sample["status"] for sample in samples] == ["completed", "completed", "failed"]
    assert samples[2]["loss_mask"] == zeros and samples[2]["reward"] == 0.5
    assert prime_rl.training_samples(DROPPED) == [] and areal.tensor_dict(DROPPED) is None
    trace = prime_rl.trace_fields(DROPPED)
    assert (trace["ok"], trace["rewards"], trace["errors"][0]["type"]) == (False, {}, "Gone")
    scored = DROPPED.model_copy(update={"reward_components": {"a": 1.0}})
    assert "reward_components" not in nemo_gym.run_response(scored)
    assert not any(name.startswith("reward/") for name in prime_rl.trace_fields(scored)["metrics"])
    answer = nemo_gym.run_response(DROPPED)
    assert answer["mask_sample"] is True and answer["_ng_failure_class"] == "infrastructure"
    assert answer["reward"] == 0.0
    # What was said is told, but its prompt is in nobody's group.
    said = answer["response"]["output"]
    assert [item["type"] for item in said[:2]] == ["message", "function_call"]
    assert [item["prompt_token_ids"] for item in said if "prompt_token_ids" in item] == [[0]]
    row = nemo_gym.run_response(DROPPED, {"instance_config": {"seed": 3}})
    assert row["instance_config"] == {"seed": 3, "mask_sample": True}
    assert nemo_gym.run_response(DROPPED, {"instance_config": "x"})["instance_config"] == {
        "mask_sample": True
    }


def test_every_chain_is_a_sample_where_the_trainer_takes_several():
    rewritten = rollout(chains=[chain("step-3"), Chain(), chain("step-4", "step-5")])
    assert [sample.last for sample in base.samples(rewritten)] == [False, True]
    output = skyrl.generator_output([rewritten], step_wise=True)
    assert (output["is_last_step"], len(output["response_ids"])) == ([False, True], 2)
    assert len(output["trajectory_generation_times"]) == 1
    assert skyrl.generator_output([rewritten])["response_ids"] == [rewritten.trajectory.response_ids]
    assert [len(sample["token_ids"]) for sample in prime_rl.training_samples(rewritten)] == [5, 8]
    fields = slime.sample_dicts([rewritten, rewritten], group_index=0, first_index=8)
    assert [one["index"] for one in fields] == [8, 9, 10, 11]
    assert [one["rollout_id"] for one in fields] == [8, 8, 9, 9], "slime weighs siblings as one rollout"
    nodes = prime_rl.trace_fields(rewritten)["nodes"]
    assert [n for n, node in enumerate(nodes) if node["parent"] is None] == [0, 4]
    assert verl.agent_loop_output(rewritten)["extra_fields"]["min_global_steps"] == 4


def captured() -> Rollout:
    """Of a program: a retry's first answer, an agent that it started, a title, and what it did itself."""
    chains = [chain("step-1"), chain("step-2"), chain("step-3"), chain("step-4")]
    shared = chains[1].segments[2]
    chains[3].segments[1:1] = [Segment(role="assistant", token_ids=[7, 8], call_id="c9"), shared]
    for made, role in zip(chains, ("discarded", "sub_agent", "auxiliary", "agent"), strict=True):
        made.role = role
    return rollout(chains=chains)


ADAPTED = {
    "skyrl": lambda r: skyrl.generator_output([r], step_wise=True)["response_ids"],
    "slime": lambda r: [
        row["tokens"][-row["response_length"] :] for row in slime.sample_dicts([r], group_index=0)
    ],
    "prime-rl": lambda r: [
        row["token_ids"][row["mask"].index(True) :] for row in prime_rl.training_samples(r)
    ],
}


@pytest.mark.parametrize("adapted", ADAPTED.values(), ids=ADAPTED.keys())
def test_what_was_discarded_or_beside_the_task_is_nobodys_sample(adapted):
    assert adapted(captured()) == [[10, 20, 30], [10, 20, 30]]


def test_one_row_a_rollout_is_of_the_last_chain_to_learn_from():
    other = captured()
    other.trajectory.chains[3].role = "auxiliary"
    for made, prompt in ((captured(), [1, 2, 7, 8, 30]), (other, [1, 2])):
        assert trl.rollout_func_result([made])["prompt_ids"] == [prompt]
        assert verl.agent_loop_output(made)["prompt_ids"] == prompt
        assert areal.tensor_dict(made)["input_ids"].tolist() == [[*prompt, 10, 20, 30]]
        light = rollout(trajectory=None)
        light.__dict__["arrays"] = Arrays.of(made.trajectory)
        assert areal.tensor_dict(light)["input_ids"].tolist() == [[*prompt, 10, 20, 30]]
        item = nemo_gym.run_response(made)["response"]["output"][1]
        assert item["prompt_token_ids"] == prompt and item["generation_token_ids"] == [10, 20]


@pytest.mark.parametrize("role", ["discarded", "auxiliary"])
def test_a_rollout_of_nothing_to_learn_from_is_as_one_without_a_turn(role):
    made = chain("step-1")
    made.role = role
    rows = [rollout(chains=[made, chain_of([1])])]
    assert not base.usable(rows[0]) and base.last_sample(rows[0]).loss_mask == [0]
    assert areal.tensor_dict(rows[0]) is None and trl.rollout_func_result(rows)["reward"] == [None]


def test_a_rollout_counts_once_in_its_group_whatever_its_chains():
    group = [captured(), rollout(1, 0.0), DROPPED]
    assert base.advantages(group) == [0.5, -0.5, 0.0]
    rows = slime.sample_dicts(group, group_index=0, centred=True)
    assert [row["reward"] for row in rows] == [0.5, 0.5, -0.5, 0.0]
    assert [row["rollout_id"] for row in rows] == [0, 0, 1, 2]
    assert skyrl.generator_output(group, step_wise=True)["is_last_step"] == [False, True, True, True]


def test_verl_gets_no_more_than_its_limits_and_no_prompt_that_it_would_cut():
    row = verl.agent_loop_output(rollout(), prompt_length=2, response_length=4)
    assert row["response_ids"] == [10, 20, 30, 11] and row["response_mask"] == [1, 1, 0, 1]
    assert row["response_logprobs"] == [-0.5, -0.25, 0.0, -0.5]
    with pytest.raises(ValueError, match=r"prompt of r0 has 2 ids and rollout.prompt_length is 1; raise it"):
        verl.agent_loop_output(rollout(), prompt_length=1)


def test_a_chain_that_ends_in_a_prompt_still_gives_the_last_one_with_a_turn():
    cut = rollout(chains=[chain("step-1"), chain_of([1])])
    assert base.last_sample(cut).response_ids == [10, 20, 30]
    assert skyrl.generator_output([cut], step_wise=True)["is_last_step"] == [True]


def test_areals_row_is_of_what_was_sampled_and_no_prompt_beyond_the_context():
    cut = rollout(chains=[chain("step-1"), chain_of([1] * 5000)])
    row = areal.tensor_dict(cut)
    assert row["input_ids"].tolist() == [[1, 2, 10, 20, 30]] and row["rewards"].tolist() == [1.0]
    assert row["loss_mask"].tolist() == [[0, 0, 1, 1, 0]]


WITHOUT_A_TURN = {
    "no chain": rollout(7, chains=[], drop=True),
    "prompt only": rollout(8, chains=[chain_of([1] * 5000)], drop=True),
    "with a reward": rollout(9, reward=0.0, chains=[chain_of([1] * 5000)]),
    "none made": rollout(10, drop=True, trajectory=None),
    "none kept": rollout(11, trajectory=None, trajectory_dropped="size"),
}


@pytest.mark.parametrize("empty", WITHOUT_A_TURN.values(), ids=WITHOUT_A_TURN.keys())
def test_a_rollout_without_a_turn_weighs_nothing_and_ends_no_step(empty):
    step = [GROUP[0], empty, GROUP[1]]
    rows = trl.rollout_func_result(step)
    assert rows["reward"] == [1.0, None, 0.0]
    assert [sum(mask) for mask in rows["env_mask"]] == [4, 0, 4]
    assert {len(rows[name][1]) for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")} == {1}
    for step_wise in (False, True):
        output = skyrl.generator_output(step, step_wise=step_wise)
        assert output["rewards"] == [1.0, 0.5, 0.0] and sum(output["loss_masks"][1]) == 0
        assert {len(output[name]) for name in ("prompt_token_ids", "response_ids", "rollout_logprobs")} == {3}
    row = verl.agent_loop_output(empty, prompt_length=2, neutral_reward=0.5)
    assert (row["response_mask"], row["reward_score"]) == ([0], 0.5)
    assert len(row["prompt_ids"]) == len(row["response_ids"]) == len(row["response_logprobs"]) == 1
    sample = slime.sample_dicts(step, group_index=0)[1]
    assert sample["remove_sample"] and sample["reward"] == 0.5
    assert (len(sample["tokens"]), sample["response_length"], sample["loss_mask"]) == (2, 1, [0])
    assert prime_rl.training_samples(empty) == [] and areal.tensor_dict(empty) is None
    answer = nemo_gym.run_response(empty)
    assert (answer["mask_sample"], answer["reward"]) == (True, 0.0)
    (item,) = answer["response"]["output"]
    fields = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    assert [item[name] for name in fields] == [[0], [0], [0.0]]
    assert base.advantages(step) == [0.5, 0.0, -0.5]


def test_prime_rl_takes_an_advantage_a_token_and_no_reward():
    (sample,) = prime_rl.training_samples(GROUP[0], advantage=base.advantages(GROUP)[0])
    assert sample["advantages"] == [0.5 * bit for bit in sample["mask"]]
    fields = {"token_ids", "mask", "logprobs", "temperatures", "env_name", "advantages"}
    assert set(sample) == fields, "`TrainingSample` refuses what it does not know"


def test_policy_versions_become_steps():
    row = verl.agent_loop_output(GROUP[0])["extra_fields"]
    assert (row["min_global_steps"], row["max_global_steps"]) == (3, 4)
    assert areal.tensor_dict(GROUP[0])["versions"].tolist() == [[-1, -1, 3, 3, -1, 4, 4, -1]]
    assert [base.step_of(version) for version in (None, "default", "17", "v2.10")] == [0, 0, 17, 10]
    with pytest.raises(ValueError, match=r"'final' does not end in a number.*step_of="):
        areal.tensor_dict(rollout(chains=[chain("final")]))
    assert areal.tensor_dict(rollout(chains=[chain("final")]), step_of=lambda _: 9)["versions"].max() == 9


def test_arrays_alone_serve_as_well_as_lists():
    whole, light = rollout(), rollout(trajectory=None)
    light.__dict__["arrays"] = Arrays.of(whole.trajectory)
    assert trl.rollout_func_result([light]) == trl.rollout_func_result([whole])
    assert slime.sample_dicts([light], group_index=0) == slime.sample_dicts([whole], group_index=0)
    of_arrays, of_lists = areal.tensor_dict(light), areal.tensor_dict(whole)
    assert all(np.array_equal(of_arrays[name], of_lists[name]) for name in of_arrays | of_lists)


def test_what_cut_a_rollout_off_is_told():
    cut = rollout(finish_reason=FinishReason.CONTEXT_LENGTH)
    assert skyrl.generator_output([cut])["stop_reasons"] == ["length"]
    assert slime.sample_dicts([cut], group_index=0)[0]["status"] == "truncated"
    cancelled = rollout(drop=True, state=State.CANCELLED)
    assert slime.sample_dicts([cancelled], group_index=0)[0]["status"] == "aborted"
    late = prime_rl.trace_fields(rollout(state=State.TIMED_OUT, finish_reason=FinishReason.TIME_LIMIT))
    assert late["is_timeout"] and late["stop_condition"] == "time_limit"


def test_calls_across_a_weight_swap_are_one_call():
    swapped = chain("step-1")
    swapped.append(sampled([91], policy_version="step-1", call_id="c9"))
    done = [Message(role="assistant", content="done")]
    swapped.append(sampled([92], policy_version="step-2", call_id="c9", messages=done))
    result = rollout(chains=[swapped])
    items = nemo_gym.run_response(result)["response"]["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output", "message"]
    assert "generation_token_ids" not in items[0] and items[1]["prompt_token_ids"] == [1, 2]
    assert items[3]["generation_token_ids"] == [91, 92]
    assert items[3]["prompt_token_ids"] == [1, 2, 10, 20, 30]
    node = prime_rl.trace_fields(result)["nodes"][-1]
    assert (node["token_ids"], node["logprobs"]) == ([91, 92], [-1.0, -1.0])
    assert slime.sample_dicts([result], group_index=0)[0]["weight_versions"] == ["step-1", "step-2"]


def test_the_pages_rollout_func_gives_tasks_their_answers_and_each_step_its_weights(monkeypatch, tmp_path):
    page = (ROOT / "docs" / "trainers.md").read_text()
    (block,) = re.findall(r"## TRL\n.*?```python\n(.*?)```", page, re.DOTALL)
    for name in ("trl", "datasets"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    client, trainer = MagicMock(), MagicMock()
    client.run.side_effect = lambda requests: [GROUP[0]] * sum(request.n for request in requests)
    client.update_policy.return_value.state = "done"
    names = {"client": client, "model": None, "RolloutRequest": RolloutRequest}
    exec(block.replace("/shared/weights", str(tmp_path)), names)
    (prompt, task) = next(iter(names["tasks"].items()))
    assert MathTask.model_validate(task).answer == ["68"]
    for step in (0, 0, 1):
        trainer.state.global_step = step
        assert names["rollout_func"]([prompt] * 8, trainer)["reward"] == [1.0] * 8
    (request,) = client.run.call_args.args[0]
    assert (request.n, request.task) == (8, task)
    versions = [call.args[0] for call in client.update_policy.call_args_list]
    assert [base.step_of(version) for version in versions] == [0, 1], "once for each step"
