"""Real rollouts as the records of trainers: their own classes take them, and say what the trajectory says."""

from __future__ import annotations

import dataclasses
import re
import sys
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import msgspec
import pytest
from pydantic import ConfigDict, TypeAdapter

from rollout.adapters import areal, nemo_gym, prime_rl, skyrl, slime, trl, verl
from rollout.adapters.base import advantages
from rollout.schema import RolloutRequest
from tests.helpers.lazy import Lazy
from tests.helpers.stack import ROOT
from tests.helpers.trainer_fields import SAMPLE, STATUS, TRAINING_SAMPLE, TrainingSample, fields_of
from tests.helpers.trainer_sources import SOURCES, classes, imported

torch = Lazy("torch")
GYM = ROOT / ".local" / "nemo-gym" / "0.7.0"
SKYRL = {"RoutedExpertIndices": object, "SampleSupport": object}


@pytest.fixture(scope="module")
def group(stack):
    """Real rollouts: turns of the demo model, with answers of a tool in between."""
    request = RolloutRequest(
        handler="calculator", task={"question": "37 times 85", "answer": "3145"}, n=4, limits={"max_turns": 4}
    )
    rollouts = stack.client.run([request])
    assert all(rollout.reward is not None and rollout.trajectory.turns for rollout in rollouts)
    return rollouts


@pytest.fixture(scope="module")
def silent(stack):
    """A real rollout without a model call: its prompt does not fit into the context."""
    (rollout,) = stack.client.run([RolloutRequest(handler="digits", task={"digits": 5000})])
    assert rollout.drop and rollout.reward is None
    return rollout


@pytest.fixture(scope="module")
def step(group, silent):
    """A step with a rollout without a model call among good ones."""
    return [group[0], silent, *group[1:]]


def test_verl_takes_its_agent_loop_output(group, silent):
    released = classes("verl/experimental/agent_loop/agent_loop.py", ["AgentLoopMetrics", "AgentLoopOutput"])
    for rollout in group:
        made = released.AgentLoopOutput(**verl.agent_loop_output(rollout))
        assert set(made.model_fields_set) <= set(released.AgentLoopOutput.model_fields)
        tensors = made.as_dict()
        t = rollout.trajectory
        assert tensors["prompts"].tolist() == t.prompt_ids and tensors["responses"].tolist() == t.response_ids
        assert tensors["response_mask"].tolist() == t.loss_mask
        assert tensors["rollout_log_probs"].tolist() == t.logprobs
        assert tensors["rm_scores"][-1] == rollout.reward
        assert made.extra_fields["min_global_steps"] == 0
    empty = released.AgentLoopOutput(**verl.agent_loop_output(silent, neutral_reward=0.5)).as_dict()
    assert (empty["response_mask"].tolist(), empty["rm_scores"].tolist()) == ([0], [0.5])


def test_skyrl_takes_its_generator_output(group):
    released = classes("skyrl/train/generators/base.py", ["TrajectoryID", "GeneratorOutput"], **SKYRL)
    made = skyrl.generator_output(group, trajectory_id=released.TrajectoryID)
    released.GeneratorOutput.__pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    TypeAdapter(released.GeneratorOutput).validate_python(made, strict=True)
    assert set(made) == set(released.GeneratorOutput.__annotations__)
    assert [id_.repetition_id for id_ in made["trajectory_ids"]] == [0, 1, 2, 3]
    for number, rollout in enumerate(group):
        assert made["response_ids"][number] == rollout.trajectory.response_ids
        assert made["rollout_logprobs"][number] == rollout.trajectory.logprobs
        assert made["rewards"][number] == rollout.reward


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrls_own_check_passes_a_step_with_a_rollout_without_a_turn(step, step_wise):
    released = classes("skyrl/train/generators/base.py", ["TrajectoryID", "GeneratorOutput"], **SKYRL)
    names = ["validate_generator_output", "_validate_step_wise_fields", "_validate_per_token_side_channels"]
    uses = {"GeneratorOutput": released.GeneratorOutput, "logger": (logger := MagicMock())}
    uses["SAMPLE_SUPPORT_FIELD"] = "rollout_sample_support"
    check = classes("skyrl/train/utils/trainer_utils.py", names, **uses)
    made = skyrl.generator_output(step, step_wise=step_wise, trajectory_id=released.TrajectoryID)
    check.validate_generator_output(len(step), made, step_wise)
    logger.warning.assert_not_called()
    assert sum(made["loss_masks"][1]) == 0 and made["rewards"][1] == 0.0


def test_verifiers_takes_its_message_nodes_and_they_join_to_the_same_tokens(group):
    contents = ("TextContentPart", "ImageUrlSource", "ImageUrlContentPart", "ContentPart", "MessageContent")
    messages = ("SystemMessage", "UserMessage", "ToolCall", "AssistantMessage", "ToolMessage", "Message")
    types = classes("verifiers/v1/types.py", [*contents, *messages, "Tool"])
    names = {"Message": types.Message, "Tool": types.Tool, "ParentLink": dict, "SamplingMask": object}
    graph = classes("verifiers/v1/graph.py", ["MessageNode"], **names)
    names |= {"MessageNode": graph.MessageNode, "ModelCall": dict, "Messages": list, "Usage": dict}
    trace = classes("verifiers/v1/trace.py", ["Branch", "Reward", "Error"], **names)
    for rollout in group:
        fields = prime_rl.trace_fields(rollout)
        nodes = [graph.MessageNode(**node) for node in fields["nodes"]]
        assert [node.parent for node in nodes] == [None, *range(len(nodes) - 1)]
        branch = trace.Branch(index=0, nodes=nodes)
        t = rollout.trajectory
        assert branch.token_ids == t.chain.token_ids
        prompt = len(t.prompt_ids)
        assert branch.sampled_mask == [False] * prompt + [bit == 1 for bit in t.loss_mask]
        assert branch.logprobs == [0.0] * prompt + t.logprobs
        assert sum(trace.Reward(**reward).value for reward in fields["rewards"].values()) == rollout.reward
        (sample,) = prime_rl.training_samples(rollout)
        assert (sample["token_ids"], sample["mask"]) == (branch.token_ids, branch.sampled_mask)


def test_trl_finds_the_keys_that_it_requires_in_what_a_rollout_func_returns(group):
    made = trl.rollout_func_result(group)
    # Its source, for to import it takes many seconds; `examples/train_trl.py` runs it.
    released = SOURCES / "trl"
    package = released if released.is_dir() else Path(find_spec("trl").origin).parent
    source = (package / "trainer" / "grpo_trainer.py").read_text()
    (required,) = re.findall(r"required_keys = \{([^}]*)\}", source)
    assert {name.strip('" ') for name in required.split(",")} <= set(made)
    assert 'extra_fields.pop("env_mask"' in source
    # A reward of None counts in no mean; test_training.py runs it.
    assert "rewards[unscorable_mask] = torch.nan" in source
    assert [len(row) for row in made["completion_ids"]] == [len(row) for row in made["logprobs"]]
    assert made["env_mask"] == [rollout.trajectory.loss_mask for rollout in group]
    assert trl.reward([], **{"reward": made["reward"]}) == [rollout.reward for rollout in group]


def test_areal_gets_tensors_of_one_row_as_its_own_workflows_make_them(stack, group, silent):
    path = "areal/infra/workflow_executor.py"
    uses = {"InteractionWithTokenLogpReward": MagicMock, "torch": torch, "logging": MagicMock()}
    check = classes(path, ["check_trajectory_format"], **uses).check_trajectory_format
    logger = MagicMock()
    assert areal.tensor_dict(silent) is None and check(None)
    for rollout in (*group, stack.client.get(group[0].id, include="arrays")):
        arrays = areal.tensor_dict(rollout)
        made = {name: torch.from_numpy(value) for name, value in arrays.items()}
        assert check(made, 1, set(made), logger) and not logger.mock_calls
        t = rollout.arrays.trajectory()
        tokens = len(t.chain.token_ids)
        rows = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask")
        shapes = dict.fromkeys(rows, (1, tokens)) | {"rewards": (1,)}
        assert {name: tuple(tensor.shape) for name, tensor in made.items()} == shapes
        assert made["input_ids"][0].tolist() == t.chain.token_ids
        prompt = len(t.prompt_ids)
        assert made["loss_mask"][0].tolist() == [0] * prompt + t.loss_mask
        assert made["versions"][0].tolist() == [-1] * prompt + [bit - 1 for bit in t.loss_mask]
        assert made["logprobs"][0, prompt:].tolist() == t.logprobs


def test_prime_rl_takes_its_training_samples_and_none_for_a_rollout_without_a_turn(step):
    path = "prime_rl/transports/rollouts/types.py"
    sample_class = TrainingSample
    if (SOURCES / path).is_file():
        names = ["EncodedTensor", "RoutedExperts", "TrainingSample"]
        sample_class = classes(path, names, msgspec=msgspec).TrainingSample
        assert fields_of(sample_class) == set(TRAINING_SAMPLE)
    made = [
        sample_class(**fields)
        for rollout, advantage in zip(step, advantages(step), strict=True)
        for fields in prime_rl.training_samples(rollout, advantage=advantage)
    ]
    assert len(made) == len(step) - 1
    for sample in made:
        # As it goes to the trainer, where each type is checked.
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=sample_class) == sample
        parts = (sample.mask, sample.logprobs, sample.temperatures, sample.advantages)
        assert {len(part) for part in parts} == {len(sample.token_ids)}


def test_slime_takes_its_samples(step):
    path, fields = "slime/utils/types.py", SAMPLE
    made = slime.sample_dicts(step, group_index=7)
    assert {one["status"] for one in made} <= STATUS and all(set(one) <= fields for one in made)
    if (SOURCES / path).is_file():
        uses = {name: MagicMock() for name in imported(path)} | {"Any": object, "torch": torch}
        uses |= {"field": dataclasses.field, "dataclass": dataclasses.dataclass, "Enum": Enum}
        released = classes(path, ["Sample"], **uses).Sample
        assert fields_of(released) == fields
        assert {status.value for status in released.Status} == STATUS
        samples = [released.from_dict(one) for one in made]
        assert [one.effective_response_length for one in samples] == [sum(one["loss_mask"]) for one in made]


def test_nemo_gym_takes_its_response_and_nemo_rl_a_row_without_a_turn(step, monkeypatch):
    for name in ("nemo_gym", "nemo_gym.server_utils"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    sources = SOURCES if (SOURCES / "nemo_gym").is_dir() else GYM
    if not (sources / "nemo_gym").is_dir():
        pytest.skip(f"there is no {sources}/nemo_gym: run `make setup-tests`")
    released = ModuleType("nemo_gym.openai_utils")
    monkeypatch.setitem(sys.modules, released.__name__, released)
    exec((sources / "nemo_gym/openai_utils.py").read_text(), vars(released))
    for rollout in step:
        answer = nemo_gym.run_response(rollout)
        made = released.NeMoGymResponse.model_validate(answer["response"])
        trained = [item for item in made.output if getattr(item, "generation_token_ids", None)]
        assert len(trained) == (1 if rollout.drop else rollout.trajectory.turns)
        # Where NeMo RL looks for it.
        assert bool((answer.get("instance_config") or {}).get("mask_sample")) == rollout.drop


def test_slime_and_nemo_gym_get_what_the_trajectory_says(group):
    made = slime.sample_dicts(group, group_index=7, first_index=28)
    assert [sample["index"] for sample in made] == [28, 29, 30, 31]
    for sample, rollout in zip(made, group, strict=True):
        t = rollout.trajectory
        length = sample["response_length"]
        assert sample["tokens"][-length:] == t.response_ids and sample["tokens"][:-length] == t.prompt_ids
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == length
        assert len(sample["weight_versions"]) == t.turns
        answer = nemo_gym.run_response(rollout, {"_ng_task_index": 3})
        calls = [item for item in answer["response"]["output"] if "generation_token_ids" in item]
        assert len(calls) == t.turns and answer["_ng_task_index"] == 3 and "mask_sample" not in answer
        context: list[int] = []
        for call in calls:
            assert call["prompt_token_ids"][: len(context)] == context
            context = call["prompt_token_ids"] + call["generation_token_ids"]
            assert len(call["generation_token_ids"]) == len(call["generation_log_probs"])
        assert context == t.chain.token_ids[: len(context)]
