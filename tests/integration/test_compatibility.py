"""Clients that were written for ProRL-Agent-Server and for NeMo Gym, against the whole service."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rollout.schema import Rollout, State
from services.state import keys
from services.state.fleet import FleetStore
from services.state.jobs import REPLAY_S
from services.state.tenants import DEFAULT_TENANT
from tests.helpers.fake_engine import fake_engine
from tests.helpers.gym_collector import RELEASES, Collection
from tests.helpers.keys import HEADER, http, metric
from tests.helpers.nemo_gym_client import GymClient, check_response
from tests.helpers.policy_script import VARIABLE, Plans
from tests.helpers.prorl_client import Process, ProrlClient, turns
from tests.helpers.prorl_trainers import TOKENS, ask, nemo_rl_rows, verl_rows
from tests.helpers.stack import ROOT, Stack, free_port, wait_until
from workers.agent.replay import Action, Call
from workers.handlers.noop import Noop

PATIENCE_S = 120.0
EXITS = {"data_source": "judged", "task": {"function": "tests.helpers.scorers:exits"}}
SOLVED = (Action(tool_calls=[Call(name="calculator", arguments={"sum": "4 + 3"})]), r"It is \boxed{7}.")
"""A tool that there is not, answered with an error; then the answer. No sandbox is needed."""


class Service:
    """A stack whose only LLM server plays plans; it was registered by no one yet."""

    def __init__(self, stack: Stack, plans: Plans, engine_url: str) -> None:
        self.stack, self.url, self.client = stack, stack.url, stack.client
        self.address = f"{engine_url}/v1"
        self._plans = plans

    def asks(self, name: str, *actions: Action | str) -> str:
        """A question that the policy meets with these actions."""
        played = [Action(content=action) if isinstance(action, str) else action for action in actions]
        return f"What is 4 + 3? ({self._plans.add(name, played)})"


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> Iterator[Plans]:
    plans = Plans(tmp_path_factory.mktemp("plans"))
    os.environ[VARIABLE] = str(plans.directory)
    yield plans
    del os.environ[VARIABLE]


@pytest.fixture(scope="module")
def idle(tmp_path_factory) -> Iterator[Stack]:
    """A gateway that knows a handler, and no worker yet: jobs stay queued. For the tests that come first."""
    directory = tmp_path_factory.mktemp("stack")
    env = {
        "ROLLOUT_DATA_SOURCES": "my_math=math",
        "ROLLOUT_BACKEND_WAIT_S": "0.2",
        # A slow machine must not make the one LLM server look dead.
        "ROLLOUT_BACKEND_PROBE_S": "600",
        # These clients know of no keys.
        "ROLLOUT_COMPAT_PORT": str(free_port()),
        "ROLLOUT_COMPAT_TENANT": DEFAULT_TENANT,
    }
    with Stack(directory, directory / "sbx", env) as stack:
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        yield stack


@pytest.fixture(scope="module")
def service(idle, plans) -> Iterator[Service]:
    """The same stack with a worker. The policy plays plans; nobody has registered it yet."""
    with fake_engine(script="tests.helpers.policy_script:play", max_model_len=65536) as engine:
        idle.start_worker("init,run,eval", "all")
        yield Service(idle, plans, engine.url)


@pytest.fixture(scope="module")
def trainer(service) -> ProrlClient:
    client = ProrlClient(service.stack.compat_url)
    client.post("/add_llm_server", {"address": service.address}).raise_for_status()
    client.start()
    return client


@pytest.fixture(scope="module")
def collector(service, trainer) -> GymClient:
    return GymClient(service.stack.compat_url)


@pytest.fixture
def waiting(idle) -> ProrlClient:
    client = ProrlClient(idle.compat_url)
    client.start()
    return client


def queued(stack: Stack, count: int) -> list[Rollout]:
    """The rollouts that wait, once they are so many."""

    def look() -> list[Rollout] | None:
        rollouts = stack.client.list(state=State.QUEUED).rollouts
        return rollouts if len(rollouts) == count else None

    return wait_until(look, PATIENCE_S, f"{count} queued rollouts") or []


def rollout_of(service: Service, instance_id: str) -> Rollout:
    named = [
        rollout
        for rollout in service.client.list(limit=1000).rollouts
        if rollout.request.metadata.get("instance_id") == instance_id
    ]
    assert len(named) == 1
    return service.client.get(named[0].id)


# -- before there is a worker --------------------------------------------------------------------


def test_cancelling_a_queued_job_answers_at_once(idle, waiting):
    held = Process(waiting, {"data_source": "noop", "instance_id": "a"}, job_id="one")
    queued(idle, 1)
    status = waiting.status()
    assert (status["running"], status["pending_jobs"], status["jobs"], status["init_queue"]) == (
        True,
        1,
        0,
        1,
    )
    assert waiting.cancel("one") == "cancelled"
    row = held.result()
    assert (row["filter"], row["success"], row["critical_error"]) == (True, False, "init")
    assert row["replayed"] is False, "nobody had it before"
    assert waiting.cancel("one") in ("unknown", "ended") and waiting.cancel("never there") == "unknown"
    assert waiting.status()["pending_jobs"] == 0


def test_stop_cancels_what_is_under_way_and_ids_begin_anew(idle, waiting):
    held = [Process(waiting, {"data_source": "noop", "instance_id": k}, job_id=str(k)) for k in range(3)]
    queued(idle, 3)
    assert waiting.post("/stop").json()["cancelled"] == 3
    assert [call.result()["filter"] for call in held] == [True] * 3
    assert waiting.post("/process", {"instance": {"data_source": "noop"}}).status_code == 409
    assert waiting.status()["running"] is False
    assert waiting.post("/start").status_code == 200
    fresh = Process(waiting, {"data_source": "noop", "instance_id": "other"}, job_id="1")
    queued(idle, 1)
    waiting.cancel("1")
    assert fresh.result()["instance_id"] == "other"


def test_a_killed_gateway_costs_a_job_with_an_id_nothing(idle, waiting):
    held = Process(waiting, {"data_source": "noop", "instance_id": "kept"}, job_id="kept-0")
    (before,) = queued(idle, 1)
    idle.gateway.kill()
    idle.gateway = idle.start_gateway()
    # Its client sends the same again by itself; here it did, once the gateway has one that waits.
    wait_until(lambda: waiters(idle) == 1, PATIENCE_S, "the client to come back")
    assert [rollout.id for rollout in queued(idle, 1)] == [before.id]
    answer = waiting.post("/process", {"instance": {"data_source": "noop", "run_s": 1}, "job_id": "kept-0"})
    assert answer.status_code == 409 and answer.json()["errors"][0]["field"] == "job_id"
    waiting.cancel("kept-0")
    assert held.result()["instance_id"] == "kept"


def test_a_client_that_hangs_up_cancels_a_job_that_nobody_could_ask_for_again(idle, waiting):
    cancelled = idle.client.status()["states"]["cancelled"]
    hang_up(idle, '{"instance": {"data_source": "noop"}, "job_id": "named"}')
    (named,) = queued(idle, 1)
    hang_up(idle, '{"instance": {"data_source": "noop"}}')
    wait_until(lambda: idle.client.status()["states"]["cancelled"] == cancelled + 1, PATIENCE_S, "its end")
    assert [rollout.id for rollout in queued(idle, 1)] == [named.id]
    assert waiting.cancel("named") == "cancelled"


@pytest.mark.parametrize("job", [{"job_id": "left"}, {"job_id": "task-9"}])
def test_a_cancelled_job_that_nobody_waited_for_runs_anew_under_its_id(idle, waiting, job):
    instance = {"data_source": "noop", "instance_id": "task-9", "trajectory_id": 4}
    hang_up(idle, json.dumps({"instance": instance} | job))
    (left,) = queued(idle, 1)
    assert waiting.cancel(job["job_id"]) == "cancelled"
    held = Process(waiting, instance, **job)
    (anew,) = queued(idle, 1)
    assert anew.id != left.id
    assert waiting.cancel(job["job_id"]) == "cancelled" and held.result()["filter"]


def hang_up(stack: Stack, body: str) -> None:
    """Send a `/process`, wait until it is parked, and go."""
    before = waiters(stack)
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        head = "POST /process HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + HEADER
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: waiters(stack) == before + 1, PATIENCE_S, "it to wait")
    wait_until(lambda: waiters(stack) == before, PATIENCE_S, "its place to be free")


def waiters(stack: Stack) -> float:
    return metric(stack.url, "rollout_gateway_waiters")


def test_cancelling_a_name_that_several_repeats_share_ends_all_of_them(idle, waiting):
    instance = {"data_source": "noop", "instance_id": "task-1"}
    held = [Process(waiting, instance, job_id="task-1") for _ in range(2)]
    held.append(Process(waiting, instance | {"trajectory_id": 3}, job_id="task-1"))
    assert len({rollout.id for rollout in queued(idle, 3)}) == 3
    assert waiting.cancel("task-1") == "cancelled"
    assert [call.result()["filter"] for call in held] == [True] * 3
    assert waiting.cancel("task-1") == "ended" and waiting.cancel("task-2") == "unknown"


# -- ProRL -------------------------------------------------------------------------------------


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
    assert (row["resolved"], row["reward"], row["filter"]) == (True, 1.0, False)
    assert (row["critical_error"], row["error"], row["git_patch"]) == (None, None, None)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    first, second = turns(row)
    assert first["tool_calls"] == [{"name": "calculator", "arguments": {"sum": "4 + 3"}}]
    assert second["tool_calls"] == [] and second["content"] == SOLVED[1]
    before = first["input_ids"] + first["token_ids"]
    assert second["input_ids"][: len(before)] == before
    kept = rollout_of(service, "sum-1")
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


def solvable(service: Service, name: str, **more: Any) -> dict[str, Any]:
    asked = service.asks(name, *SOLVED)
    return {"data_source": "math", "instance_id": name, "problem": asked, "answer": "7"} | more


def too_long(service: Service, name: str) -> dict[str, Any]:
    """An instance whose prompt leaves the model no room."""
    return solvable(service, name) | {"problem": "1" * 70_000}


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


def test_what_nobody_was_told_of_is_marked_and_is_not_kept_for_the_next_run(service, trainer):
    """A trainer was killed, and the one that is started in its place numbers its jobs anew."""
    instance = {"data_source": "noop", "instance_id": "untold", "run_s": 2}
    hang_up(service.stack, json.dumps({"instance": instance, "job_id": "step-0"}))

    def ended() -> list[Rollout]:
        return rollouts_of(service, "untold", State.COMPLETED)

    (untold,) = wait_until(ended, PATIENCE_S, "its end")
    record, redis = keys.record(untold.id), service.stack.redis.client
    assert redis.hincrby(record, "finished", -int((REPLAY_S + 1) * 1000)) > 0
    assert trainer.process(instance, job_id="step-0")["replayed"] is False
    assert len(ended()) == 2, "the old one is of an old policy"
    hang_up(service.stack, json.dumps({"instance": instance, "job_id": "step-1"}))
    wait_until(lambda: len(ended()) == 3, PATIENCE_S, "its end")
    assert trainer.process(instance, job_id="step-1")["replayed"] is True
    assert len(ended()) == 3, "a retry soon after costs nothing"


def rollouts_of(service: Service, instance_id: str, state: State | None = None) -> list[Rollout]:
    named = [
        rollout.id
        for rollout in service.client.list(limit=1000, state=state).rollouts
        if rollout.request.metadata.get("instance_id") == instance_id
    ]
    return [service.client.get(rollout_id) for rollout_id in named]


# -- NeMo Gym ----------------------------------------------------------------------------------


def test_a_gym_collector_gets_contiguous_tokens_and_a_reward(service, collector):
    assert http.get(f"{service.url}/").status_code == 200
    text = service.asks("gym-sum", *SOLVED)
    row = collector.run(text, "math", task=1, rollout=2, expected_answer=7)
    assert (row["reward"], row["reward_components"]["correct"]) == (1.0, 1.0)
    assert not row.get("mask_sample")
    kept = service.client.get(row["rollout_id"]).trajectory
    assert check_response(row["response"]) == kept.prompt_ids + kept.response_ids
    kinds = [item["type"] for item in row["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]
    again = collector.run(text, "math", task=1, rollout=2, expected_answer=7)
    assert again["rollout_id"] != row["rollout_id"], "indices begin anew with every collection"
    named = [
        collector.run(text, "math", expected_answer=7, _ng_rollout_id="mine", _ng_attempt_index=attempt)
        for attempt in (0, 0, 1)
    ]
    ids = [answer["rollout_id"] for answer in named]
    assert ids[0] == ids[1] != ids[2], "another attempt is another rollout"


def test_a_gym_collector_gets_every_failure_as_a_masked_row(service, collector):
    outage = collector.run("", "judged", function="tests.helpers.scorers:exits")
    assert (outage["mask_sample"], outage["_ng_failure_class"]) == (True, "infrastructure")
    assert outage["_ng_failure_terminal"] is False
    nobody = collector.run("?", "no-such-agent")
    misfit = collector.run("", "noop", run_s="x")
    policy = collector.run("", "noop", policy_base_url="http://127.0.0.1:9/v1", policy_api_key="sk-secret-2")
    for row in (nobody, misfit, policy):
        assert (row["_ng_failure_class"], row["_ng_failure_terminal"]) == ("task", True)
    assert "sk-secret-2" not in str(policy)
    silent = collector.run("", "noop", reward=0.5)
    assert (silent["mask_sample"], silent["reward"]) == (True, 0), "no model was called"
    asked = service.asks("gym-well", r"\boxed{7}")
    policy = {"policy_base_url": service.address, "policy_api_key": "sk-secret-2"}
    well = collector.run(asked, "math", answer="7", **policy)
    assert well["reward"] == 1.0
    assert "sk-secret-2" not in service.client.get(well["rollout_id"]).model_dump_json()
    assert collector.post("/run", {"no": "row"}).status_code == 400
    numbers = collector.post("/aggregate_metrics", {"verify_responses": [outage, silent, well]}).json()
    assert numbers["agent_metrics"]["mean/reward"] == 1.0, "a failure is not a reward of 0"
    assert numbers["agent_metrics"]["dropped/infrastructure"] == 1
    assert numbers["key_metrics"]["mean/reward"] == 1.0 and len(numbers["group_level_metrics"]) == 1


def test_a_row_of_swe_keeps_its_instance_in_the_metadata(collector):
    """`/v1/responses` takes what `responses_create_params` is; here of a repository nobody knows."""
    metadata = {
        "instance_id": "me__it-1",
        "repo": "me/it",
        "base_commit": "HEAD",
        "problem_statement": "It is broken.",
        "test_patch": "",
        "FAIL_TO_PASS": '["a"]',
        "PASS_TO_PASS": "[]",
    }
    answer = collector.post("/v1/responses", {"input": [], "metadata": metadata})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert check_response(body) == [0, 0] and body["status"] == "failed", (
        "a masked row with a turn of nothing"
    )
    assert "no test command is known for 'me/it'" in body["error"]["message"]
    assert body["metadata"] == metadata


def test_collectors_of_two_releases_of_nemo_gym_get_rewards_and_failures_over_a_killed_gateway(
    service, collector, tmp_path
):
    guide = (ROOT / "docs" / "compatibility.md").read_text()
    (config,) = re.findall(r"<!-- tested: gym_config -->\n```yaml\n(.*?)```", guide, re.DOTALL)
    address = httpx.URL(service.stack.compat_url)
    config = config.replace("127.0.0.1", address.host).replace("8006", str(address.port))
    found = [Collection(name, config, gym_rows(service, name), tmp_path, num_repeats=2) for name in RELEASES]
    # Those that wait for the slow row of each.
    wait_until(lambda: waiters(service.stack) >= 2 * len(found), PATIENCE_S, "the slow rows")
    service.stack.gateway.kill()
    service.stack.gateway = service.stack.start_gateway()
    for collection in found:
        collection.wait()
        assert sorted(row["reward"] for row in collection.successes) == [0.0, 0.0, 1.0, 1.0]
        for row in collection.successes:
            check_response(row["response"])
        causes = sorted((row["_ng_task_index"], row["_ng_failure_class"]) for row in collection.failures)
        assert causes == [(number, blame) for number, blame in GYM_FAILURES for _ in range(2)]
        assert all(row["reward"] == 0.0 and row["mask_sample"] for row in collection.failures)
        assert collection.metrics()["agent_metrics"]["mean/reward"] == 0.5
    slow = [
        rollout
        for rollout in service.client.list(handler="noop", limit=1000).rollouts
        if rollout.request.tags
    ]
    assert sum(rollout.request.task.get("run_s") == SLOW_S for rollout in slow) == 2 * len(found)


GYM_FAILURES = ((2, "task"), (3, "handler"), (4, "handler"))
SLOW_S = 8.0


def gym_rows(service: Service, release: str) -> list[dict[str, Any]]:
    """Solved, failed, a prompt that is too long, one dropped in INIT, a slow one that calls no model."""
    name = f"collect-{release.replace('.', '-')}"
    texts = (
        service.asks(f"{name}-right", *SOLVED),
        service.asks(f"{name}-wrong", r"\boxed{8}"),
        "1" * 70_000,
    )
    fields = [{"expected_answer": "7"}] * 3
    # Another run_s for each, or both releases' rows would be one rollout: they have the same indices.
    fields += [
        {"handler": "unready"},
        {"handler": "noop", "run_s": SLOW_S, "eval_s": float(release[2]) / 1e3},
    ]
    return [
        {"responses_create_params": {"input": [{"role": "user", "content": text}]}, "agent_ref": GYM_AGENT}
        | more
        for text, more in zip((*texts, f"{name}-init", f"{name}-slow"), fields, strict=True)
    ]


GYM_AGENT = {"type": "responses_api_agents", "name": "math"}


@pytest.mark.parametrize("name", ["prorl", "nemo_gym"])
def test_the_examples_of_the_guide_run_as_written(service, trainer, name, monkeypatch, capsys):
    pattern = rf"<!-- tested: {name} -->\n```python\n(.*?)```"
    (code,) = re.findall(pattern, (ROOT / "docs" / "compatibility.md").read_text(), re.DOTALL)
    question = "What is 6 times 7?"
    assert question in code and len(code.splitlines()) <= 20
    monkeypatch.setenv("ROLLOUT_URL", service.stack.compat_url)
    monkeypatch.setenv("LLM_SERVER", service.address)
    asked = service.asks(f"guide-{name.replace('_', '-')}", r"It is \boxed{42}.")
    exec(code.replace(question, asked), {})
    assert "1.0" in capsys.readouterr().out
