"""Whole rollouts: HTTP in, three stages, a container, a model in token ids, a reward out."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest

from examples.demo_model.task import make_tasks
from rollout.schema import Blame, RolloutRequest, State
from rollout.trajectory import FinishReason, Message
from tests.helpers.chat_formats import save
from tests.helpers.checkpoints import random_qwen3
from tests.helpers.llm_reference import chain_logprobs
from tests.helpers.llm_servers import DEMO_MODEL, embedded_server, vllm_server
from tests.helpers.long_forms import CHAOS, MODELS_LONG
from tests.helpers.published import directory
from tests.helpers.recorder import recorder
from tests.helpers.sandboxes import leftovers, require_apptainer
from tests.helpers.stack import NODE, wait_until
from workers.agent.codec import load_codec

TASKS = CHAOS("tasks, of which each has four rollouts at once", short=8, long=64)


def calculator(n_tasks: int, **fields) -> list[RolloutRequest]:
    return [
        RolloutRequest(handler="calculator", task=task, **{"sampling": {"max_tokens": 128}, **fields})
        for task in make_tasks(n_tasks, seed=7)
    ]


def check_invariants(item) -> None:
    trajectory = item.trajectory
    assert trajectory.prompt_ids and trajectory.response_ids
    for segment in trajectory.chain.segments:
        if segment.sampled:
            assert len(segment.logprobs) == len(segment.token_ids)
            assert all(math.isfinite(value) and value <= 0 for value in segment.logprobs)
        else:
            assert segment.logprobs is None
    sampled = [t for s in trajectory.chain.segments if s.sampled for t in s.token_ids]
    masked = [t for t, m in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if m]
    assert masked == sampled
    assert item.policy_versions == trajectory.versions_used
    assert item.metrics["policy_versions"] == len(item.policy_versions)


def test_many_rollouts_at_once_all_end_and_leave_nothing(stack, client):
    require_apptainer()
    # So few are right to within bounds by the same draw each time.
    seed = {} if CHAOS else {"sampling": {"max_tokens": 128, "seed": 1}}
    done = client.run(calculator(TASKS, n=4, tags=["bulk"], **seed))
    assert len(done) == 4 * TASKS
    assert {item.state for item in done} == {State.COMPLETED}
    rewards = [item.reward for item in done]
    assert set(rewards) == {0.0, 1.0}
    assert 0.2 < sum(rewards) / len(rewards) < 0.6, "the demo model is right in 35 to 40 % of its tries"
    for item in done:
        check_invariants(item)
        assert item.sandbox.runtime == "apptainer" and item.sandbox.node == NODE
        # A loaded machine may miss a lease; nothing else may cost an attempt.
        lost = [event.text for event in item.notes if "was lost in state" in event.text]
        assert item.attempt == 1 + len(lost) and not item.drop, item.notes
        assert [event.state for event in item.timeline][-1] == State.COMPLETED
    (backend,) = client.backends()
    assert (backend.load, backend.live_rollouts) == (0.0, 0)
    states = client.status()["states"]
    assert all(states[state] == 0 for state in State if not state.terminal)
    # A message that the reaper has sent again is dropped by whoever takes it.
    wait_until(lambda: not any(client.status()["queues"].values()), 120, "the queues to be empty")
    wait_until(lambda: leftovers(stack.sandbox_dir) == [], 120, "what a lost lease has left to be gone")


@contextmanager
def recorded_alone(client, engine, embedded):
    """The only backend of the service, through a proxy that writes down every call."""
    ours = client.backends()[0]
    client.remove_backend(ours.id)
    with recorder(engine.url) as proxy:
        # Stock vLLM does not tell its log-prob mode; who started it does.
        client.add_backend(proxy.url, id="recorded", logprobs_mode="processed_logprobs")
        yield proxy
        client.remove_backend("recorded")
    client.add_backend(embedded.url)


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def recorded(request, client, embedded):
    with recorded_alone(client, request.getfixturevalue(request.param), embedded) as proxy:
        yield proxy


def check_exact(item, proxy, model_dir) -> None:
    """Prompts, ids and log-probs of a trajectory are those of its calls, and the log-probs the model's."""
    calls = {call.request["request_id"]: call for call in proxy.calls if call.request.get("request_id")}
    assert item.state is State.COMPLETED and item.backend == "recorded", item.error
    check_invariants(item)
    context: list[int] = []
    segments = item.trajectory.chain.segments
    for segment in segments:
        if segment.sampled:
            call = calls[segment.call_id]
            assert call.request["token_ids"] == context, "the prompt of a call is everything before it"
            choice = call.answer["choices"][0]
            assert choice["token_ids"] == segment.token_ids
            assert [c["logprob"] for c in choice["logprobs"]["content"]] == segment.logprobs
            assert segment.finish_reason == choice["finish_reason"]
            assert segment.policy_version is not None
        context += segment.token_ids
    assert context == item.trajectory.chain.token_ids
    assert item.trajectory.prompt_ids + item.trajectory.response_ids == context
    assert segments[-1].sampled
    ours, reference = chain_logprobs(item.trajectory.chain, model_dir)
    assert ours == pytest.approx(reference, abs=1e-3)
    assert item.trajectory.logprobs_mode == "processed_logprobs"


def test_a_trajectory_is_exactly_what_the_engine_saw_and_sampled(client, recorded):
    for item in client.run(calculator(8)):
        check_exact(item, recorded, DEMO_MODEL)


CALL, END = 151_657, 151_645
"""`<tool_call>` and `<|im_end|>` of Qwen3."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A random model with Qwen3's published tokenizer, which often begins a call and often ends its turn."""
    model_dir = directory("Qwen3", tmp_path_factory.mktemp("published"))
    return random_qwen3(model_dir, often={CALL: 0.3, END: 0.1})


def check_published(client, engine, embedded, model_dir, rollouts) -> None:
    limits = {"max_turns": 6, "max_malformed_calls": 6, "max_repeated_actions": None}
    with recorded_alone(client, engine, embedded) as proxy:
        done = client.run(calculator(rollouts, limits=limits, sampling={"max_tokens": 256, "seed": 1}))
    codec = load_codec(str(model_dir))
    turns = 0
    for item in done:
        check_exact(item, proxy, model_dir)
        assert item.trajectory.tokenizer == codec.digest
        turns += item.trajectory.turns
        for segment in item.trajectory.chain.segments[2::2]:
            assert codec._guard.decode(segment.token_ids).startswith("\n<|im_start|>user\n<tool_response>\n")
    assert turns >= 2 * len(done), "three of four turns of such a model call something"


def test_rollouts_of_a_model_with_the_vocabulary_and_the_tokenizer_of_qwen3(client, embedded, qwen3):
    with embedded_server(qwen3) as engine:
        check_published(client, engine, embedded, qwen3, rollouts=2)


@MODELS_LONG.only
def test_rollouts_of_such_a_model_by_vllm(client, embedded, qwen3):
    with vllm_server(qwen3) as engine:
        check_published(client, engine, embedded, qwen3, rollouts=16)


def test_a_model_without_a_place_for_tools_is_refused_to_a_handler_that_has_some(client, embedded, tmp_path):
    ours = client.backends()[0]
    client.remove_backend(ours.id)
    client.add_backend(embedded.url, id="gemma", tokenizer=str(save("turns", tmp_path / "gemma")))
    (item,) = client.run(calculator(1))
    client.remove_backend("gemma")
    client.add_backend(embedded.url)
    assert item.state is State.FAILED and item.attempt == 1
    assert (item.error.type, item.error.blame) == ("CodecError", Blame.INFRASTRUCTURE)
    assert item.error.message.startswith("backend gemma, tokenizer '/")
    assert "this model takes no tool answers" in item.error.message


def test_a_seed_makes_a_rollout_repeatable_and_group_mates_differ(client):
    task = make_tasks(1, seed=3)[0]
    request = {"handler": "calculator", "task": task, "n": 4, "sampling": {"seed": 11, "max_tokens": 128}}
    first = client.run([RolloutRequest(**request)])
    second = client.run([RolloutRequest(**request)])
    ids = [item.trajectory.response_ids for item in first]
    assert ids == [item.trajectory.response_ids for item in second]
    assert len({tuple(sampled) for sampled in ids}) > 1, "another seed for each rollout of the group"
    assert [item.index for item in first] == list(range(4))
    assert len({item.group_id for item in first}) == 1


@pytest.mark.parametrize(
    ("limits", "sampling", "reason"),
    [
        ({"max_turns": 1}, {}, FinishReason.TURN_LIMIT),
        ({"max_response_tokens": 5}, {}, FinishReason.TOKEN_LIMIT),
        ({}, {"max_tokens": 5}, FinishReason.LENGTH),
    ],
)
def test_a_limit_ends_the_turns_and_the_part_is_scored(client, limits, sampling, reason):
    (item,) = client.run(calculator(1, limits=limits, sampling={"max_tokens": 128, **sampling}))
    assert item.state is State.COMPLETED and item.reward == 0.0
    assert item.finish_reason is reason and item.trajectory.finish_reason is reason
    check_invariants(item)


@pytest.mark.parametrize("room", [2, 0, -5])
def test_a_full_context_ends_the_rollout_with_its_own_reason(client, room):
    """Room for two tokens, for none, and a prompt that does not fit at all."""
    codec = load_codec(str(DEMO_MODEL))
    frame = len(codec.render([Message(role="user", content="1")], [])) - 1
    request = RolloutRequest(handler="digits", task={"digits": 2048 - room - frame}, sampling={"seed": 1})
    (item,) = client.run([request])
    assert item.finish_reason is FinishReason.CONTEXT_LENGTH
    if room > 0:
        assert item.state is State.COMPLETED and item.reward == 0.5
    else:
        assert item.state is State.FAILED and item.drop and item.reward is None, "nothing was sampled"
        assert item.error.blame is Blame.TASK and "leaves no room for a turn" in item.error.message
        assert item.attempt == 1
    assert len(item.trajectory.chain.token_ids) == 2048 - min(room, 0)
    assert item.trajectory.sampled_tokens == max(room, 0)


@pytest.mark.parametrize("runtime", ["bubblewrap", "local-unsafe"])
def test_another_runtime_is_recorded_with_what_it_lacks(client, runtime):
    """No Apptainer: only by name, or by the fallback; a trajectory says how it came about."""
    requests = calculator(2, sandbox_runtime=runtime)
    for item in client.run(requests):
        assert item.state is State.COMPLETED and item.reward is not None
        assert item.sandbox.runtime == runtime
        missing = item.sandbox.isolation_missing
        assert missing and f"sandbox ran without: {', '.join(missing)}" in item.trajectory.warnings
        assert ("network" in missing) == (runtime == "local-unsafe")


def test_state_of_the_shell_lives_from_run_to_eval(client):
    (item,) = client.run([RolloutRequest(handler="in_tool", task={"command": "cd /tmp && x=1"})])
    assert item.reward_components == {"cwd_kept": 1.0} and item.metrics["exit_code"] == 0


def test_ipython_and_editor_share_the_sandbox(client):
    (item,) = client.run([RolloutRequest(handler="notebook")])
    assert item.state is State.COMPLETED, item.error
    assert item.metrics["answer"] == 42


def test_the_run_time_limit_keeps_and_scores_the_part(client):
    request = RolloutRequest(handler="in_tool", task={"command": "sleep 60"}, limits={"run_timeout_s": 1.0})
    (item,) = client.run([request])
    assert item.state is State.TIMED_OUT and item.finish_reason is FinishReason.TIME_LIMIT
    assert item.reward == 1.0 and not item.drop, "the handler scores what is there"
    assert item.stage_seconds["run"] < 50, "long before the command ends"


def test_the_deadline_ends_a_rollout_wherever_it_is(stack, client):
    request = RolloutRequest(handler="in_tool", task={"command": "sleep 60"}, limits={"deadline_s": 2.0})
    (item,) = client.run([request])
    assert item.state is State.TIMED_OUT and item.drop and item.reward is None
    assert item.error.blame == "timeout"
    assert item.finished_at - item.created_at < 50, "long before the command ends"
    wait_until(lambda: leftovers(stack.sandbox_dir) == [], 120, "the sandbox to be gone")
