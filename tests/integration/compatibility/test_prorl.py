"""Clients that were written for ProRL-Agent-Server, against the whole service."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.schema import Rollout, State
from services.state import keys
from services.state.jobs import REPLAY_S
from tests.helpers.compatibility import (
    PATIENCE_S,
    SOLVED,
    hang_up,
    rollouts_of,
    solvable,
    too_long,
)
from tests.helpers.fake_engine import fake_engine
from tests.helpers.keys import http
from tests.helpers.prorl_client import Process, turns
from tests.helpers.prorl_trainers import TOKENS, ask, nemo_rl_rows, verl_rows
from tests.helpers.stack import wait_until

EXITS = {"data_source": "judged", "task": {"function": "tests.helpers.scorers:exits"}}


def test_a_prorl_client_gets_every_token_by_changing_the_url_only(service, trainer):
    assert trainer.post("/start").status_code == 400, "it runs, and clients take 400 for fine"
    assert http.get(f"{service.url}/health").status_code == 200
    assert trainer.status()["llm_servers"] == [service.address]
    instance = {
        "data_source": "deepscaler",
        "instance_id": "sum-1",
        "trajectory_id": 3,
        "prompt": [{"role": "user", "content": service.asks("prorl-sum", *SOLVED)}],
        "reward_model": {"ground_truth": "7"},
    }
    sampling = {"temperature": 1.0, "max_output_tokens": 500, "max_iterations": 5, "api_key": "sk-secret-1"}
    row = trainer.process(instance, sampling | {"model": "hosted_vllm/x", "unheard_of": 1})
    assert (row["instance_id"], row["trajectory_id"]) == ("sum-1", 3)
    assert (row["success"], row["finish"], row["end_properly"]) == (True, True, True)
    assert (row["resolved"], row["reward"], row["score"], row["filter"]) == (True, 1.0, 1.0, False)
    assert (row["critical_error"], row["error"], row["git_patch"]) == (None, None, None)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    first, second = turns(row)
    assert first["tool_calls"] == [{"name": "calculator", "arguments": {"sum": "4 + 3"}}]
    assert second["tool_calls"] == [] and second["content"] == SOLVED[1]
    before = first["input_ids"] + first["token_ids"]
    assert second["input_ids"][: len(before)] == before
    (kept,) = rollouts_of(service, "sum-1")
    trajectory = kept.trajectory
    assert second["input_ids"] + second["token_ids"] == trajectory.prompt_ids + trajectory.response_ids
    sampled = [value for value, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask]
    assert first["logprobs"] + second["logprobs"] == pytest.approx(sampled, abs=1e-6)
    assert (kept.request.limits.max_turns, kept.request.sampling.max_tokens) == (5, 500)
    assert "sk-secret-1" not in kept.model_dump_json(), "a key is nobody's to keep"
    timing = row["timing"]
    assert timing["run_time"] > 0 and not timing["timeout_triggered"]
    assert timing["counted_elapsed"] == pytest.approx(
        timing["init_time"] + timing["run_time"] + timing["eval_time"]
    )
    short = trainer.process(instance | {"instance_id": "sum-2"}, sampling | {"compact": True})
    assert all("input_ids" not in message for message in short["messages"])
    ids = [token for message in short["messages"] for token in message["token_ids"]]
    assert ids == second["input_ids"] + second["token_ids"], "the messages together are the context"


def test_a_wrong_answer_is_no_reason_to_drop_a_sample(service, trainer):
    instance = {"data_source": "my_math", "problem": service.asks("wrong", r"\boxed{8}"), "answer": "7"}
    row = trainer.process(instance)
    assert (row["success"], row["resolved"], row["reward"], row["filter"]) == (
        True,
        False,
        0.0,
        False,
    )


def test_a_scorer_that_is_out_of_order_sets_filter_and_no_reward(trainer):
    row = trainer.process(EXITS)
    assert (row["filter"], row["success"], row["resolved"], row["reward"]) == (
        True,
        False,
        False,
        None,
    )
    assert row["critical_error"] == "eval" and "infrastructure" in row["error"]
    assert "score" not in row, "none is no zero"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "instance"),
        ({"instance": []}, "instance"),
        ({"instance": {"data_source": "nowhere"}}, "instance.data_source"),
        ({"instance": {"problem_statement": 3}}, "instance.problem_statement"),
        ({"instance": {"data_source": "deepscaler", "answer": "7"}}, "instance"),
        ({"instance": {"data_source": "deepscaler", "prompt": "?"}}, "instance"),
        ({"instance": {"data_source": "noop", "run_s": "x"}}, "instance.run_s"),
        ({"instance": {"data_source": "noop", "run_s": "x" * 2_000_000}}, "instance.run_s"),
        (
            {"instance": {"data_source": "noop"}, "sampling_params": {"temperature": 9}},
            "sampling_params.temperature",
        ),
        (
            {"instance": {"data_source": "noop"}, "sampling_params": {"max_iterations": 0}},
            "sampling_params.max_iterations",
        ),
        ({"instance": {"data_source": "noop"}, "job_id": []}, "job_id"),
    ],
)
def test_a_bad_instance_is_refused_by_its_field_and_starts_nothing(service, trainer, body, field):
    before = trainer.status()["pending_jobs"]
    answer = trainer.post("/process", body)
    assert answer.status_code == 400 and len(answer.text) < 5000, answer.text
    assert field in [error["field"] for error in answer.json()["errors"]]
    assert trainer.status()["pending_jobs"] == before


def test_without_an_llm_server_a_job_is_filtered_and_another_one_helps(service, trainer):
    assert trainer.post("/add_llm_server", {"address": "http://127.0.0.1:9/v1"}).status_code == 400
    assert trainer.post("/clear_llm_server").status_code == 200
    assert trainer.status()["llm_servers"] == [] and service.client.backends() == []
    instance = {"data_source": "deepscaler", "prompt": service.asks("none", r"\boxed{7}"), "answer": "7"}
    try:
        row = trainer.process(instance, job_id="retried")
        assert (row["filter"], row["critical_error"], row["reward"]) == (True, "run", None)
    finally:
        trainer.post("/add_llm_server", {"address": service.address}).raise_for_status()
    row = trainer.process(instance, job_id="retried")
    assert row["resolved"], "a job that failed is tried anew under the same id"
    again = trainer.process(instance, job_id="retried")
    assert turns(again) == turns(row), "one that did not is given again"


# -- ProRL's own clients, with faults ----------------------------------------------------------


def test_verl_learns_from_every_token_and_from_none_of_what_never_began(service, trainer):
    broken = {"data_source": "unready", "instance_id": "verl-mixed"}
    groups = [
        [too_long(service, "verl-long")] * 2,
        [solvable(service, "verl-mixed"), broken, solvable(service, "verl-mixed")],
        [broken | {"instance_id": "verl-broken"}] * 2,
    ]
    answers = ask(trainer, groups, TOKENS)
    rows = verl_rows(answers)
    long, mixed, broken_rows = rows[:2], rows[2:5], rows[5:]
    assert [(row.prompt, row.response, row.error, row.resolved) for row in long] == [
        ([0], [0], True, False)
    ] * 2
    assert [row.padded for row in mixed] == [False, True, False], (
        "one dropped in INIT is a copy of a good one"
    )
    assert [row.padded for row in broken_rows] == [True] * 2
    (kept, *_) = rollouts_of(service, "verl-mixed", State.COMPLETED)
    for row in (mixed[0], mixed[2]):
        assert (row.prompt, row.response) == (kept.trajectory.prompt_ids, kept.trajectory.response_ids)
        assert (row.mask, row.resolved, row.error) == (kept.trajectory.loss_mask, True, False)
        assert row.logprobs == pytest.approx(kept.trajectory.logprobs, abs=1e-6)


def test_nemo_rl_learns_from_every_token(service, trainer):
    broken = {"data_source": "unready", "instance_id": "rl-mixed"}
    groups = [[solvable(service, "rl-mixed"), broken], [too_long(service, "rl-long")] * 2]
    rows = nemo_rl_rows(ask(trainer, groups, TOKENS, attempts=3))
    (kept, *_) = rollouts_of(service, "rl-mixed", State.COMPLETED)
    t = kept.trajectory
    sampled = [token for token, bit in zip(t.response_ids, t.loss_mask, strict=True) if bit]
    assert (rows[0].response, rows[0].padded, rows[1].padded) == (sampled, False, True)
    assert [row.resolved for row in rows] == [True, True, False, False]
    assert [row.score for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert [row.response for row in rows[2:]] == [[0], [0]]


@pytest.mark.parametrize("rows_of", [nemo_rl_rows, verl_rows])
def test_a_scorer_that_dies_after_the_turns_teaches_no_trainer(service, trainer, rows_of):
    name = f"late-{rows_of.__name__.replace('_', '-')}"
    task = {"function": "tests.helpers.scorers:exits", "payload": service.asks(f"{name}-x", r"\boxed{7}")}
    group = [{"data_source": "questioned", "instance_id": name, "task": task}, solvable(service, name)]
    first, second = rows_of(ask(trainer, [group], TOKENS))
    assert first.padded and first.resolved and first.response == second.response
    (dropped,) = rollouts_of(service, name, State.FAILED)
    assert dropped.trajectory.turns == 1, "it is one that said something"


def test_a_step_lasts_over_a_dead_backend_and_the_next_over_a_new_gateway(service, trainer):
    with fake_engine(script="tests.helpers.policy_script:play", max_model_len=65536) as other:
        trainer.post("/add_llm_server", {"address": f"{other.url}/v1"}).raise_for_status()
    assert len(trainer.status()["llm_servers"]) == 2
    try:
        rows = verl_rows(ask(trainer, [[solvable(service, "dead-backend")] * 6], TOKENS))
        assert [(row.resolved, row.padded) for row in rows] == [(True, False)] * 6
        service.stack.gateway.kill()
        service.stack.gateway = service.stack.start_gateway()
        rows = verl_rows(ask(trainer, [[solvable(service, "new-gateway")] * 2], TOKENS))
        assert [row.resolved for row in rows] == [True] * 2
    finally:
        trainer.post("/clear_llm_server").raise_for_status()
        trainer.post("/add_llm_server", {"address": service.address}).raise_for_status()


def test_a_script_in_text_mode_starts_asks_and_stops(service, trainer):
    sampling = {
        **{"model": "openai/any", "api_key": "mykey", "modify_params": False, "log_completions": False},
        **{"native_tool_calling": True, "temperature": 0.6, "top_p": 0.9, "max_iterations": 3},
    }
    trainer.start()
    assert trainer.status()["running"] is True
    calls = [
        Process(trainer, solvable(service, "script", trajectory_id=number), sampling) for number in range(3)
    ]
    rows = [call.result() for call in calls]
    assert sorted(row["trajectory_id"] for row in rows) == [0, 1, 2]
    for row in rows:
        assert row["resolved"] and turns(row)[-1]["content"] == SOLVED[1]
        assert all(
            "token_ids" not in message for message in row["messages"] if message["role"] != "assistant"
        )
    assert trainer.post("/stop").status_code == 200 and trainer.status()["running"] is False
    assert trainer.post("/start").status_code == 200


def test_a_job_named_as_its_task_is_a_rollout_each_time(service, trainer):
    """As NeMo Gym's agent for ProRL's server names them."""
    instance = solvable(service, "copies")
    rows = [call.result() for call in [Process(trainer, instance, job_id="copies") for _ in range(3)]]
    rows.append(trainer.process(instance, job_id="copies"))
    assert [(row["resolved"], row["replayed"]) for row in rows] == [(True, False)] * 4
    assert len(rollouts_of(service, "copies")) == 4
    repeat = [trainer.process(instance | {"trajectory_id": 1}, job_id="copies") for _ in range(2)]
    assert [row["replayed"] for row in repeat] == [False, True], "one that names its repeat can be had again"
    assert len(rollouts_of(service, "copies")) == 5


def test_what_nobody_was_told_of_is_marked_and_is_not_kept_for_the_next_run(service, trainer, tmp_path):
    """A trainer was killed, and the one that is started in its place numbers its jobs anew."""

    def left(job: str) -> dict[str, Any]:
        """The instance of a job that ended once its client had gone."""
        gates = tmp_path / job
        gates.mkdir()
        instance = {"data_source": "gated", "instance_id": "untold", "task": {"gates": str(gates)}}
        hang_up(service.stack, json.dumps({"instance": instance, "job_id": job}))
        for stage in ("init", "run", "eval"):
            (gates / stage).touch()
        return instance

    def ended() -> list[Rollout]:
        return rollouts_of(service, "untold", State.COMPLETED)

    instance = left("step-0")
    (untold,) = wait_until(ended, PATIENCE_S, "its end")
    record, redis = keys.record(untold.id), service.stack.redis.client
    assert redis.hincrby(record, "finished", -int((REPLAY_S + 1) * 1000)) > 0
    assert trainer.process(instance, job_id="step-0")["replayed"] is False
    assert len(ended()) == 2, "the old one is of an old policy"
    instance = left("step-1")
    wait_until(lambda: len(ended()) == 3, PATIENCE_S, "its end")
    assert trainer.process(instance, job_id="step-1")["replayed"] is True
    assert len(ended()) == 3, "a retry soon after costs nothing"
