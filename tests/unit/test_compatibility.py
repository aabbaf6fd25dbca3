"""What the compatible APIs make of instances, rows and rollouts, without a service."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rollout.schema import ErrorInfo, HandlerInfo, Rollout, RolloutRequest, State, TimelineEvent
from rollout.trajectory import Chain, Message, Segment, ToolCall, Trajectory
from services.gateway.compat import nemo_gym, nemo_gym_answers, prorl, prorl_result
from services.gateway.compat.rows import handler_of, task_of
from services.gateway.problems import ApiProblem
from services.settings import Settings, SettingsError
from tests.helpers import results
from tests.helpers.nemo_gym_client import check_response
from tests.helpers.prorl_client import check
from tests.helpers.prorl_trainers import nemo_rl_rows, verl_rows
from workers.agent.tools import ExecuteBash
from workers.handlers.code import Code
from workers.handlers.math import Math
from workers.handlers.reasoning_gym import ReasoningGym
from workers.handlers.stem import Stem
from workers.handlers.swe.handler import Swe

CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "How many?"}]
SWE = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "HEAD",
    "problem_statement": "Broken.",
    "test_patch": "",
    "FAIL_TO_PASS": '["t"]',
    "PASS_TO_PASS": ["u"],
}
OFFICIAL = "xingyaoww/sweb.eval.x86_64.a_s_b-1:latest"
R2E = {
    "problem_statement": "Broken.",
    "docker_image": "namanjain12/b_final:abc",
    "commit_hash": "abc",
    "expected_output_json": '{"t": "PASSED"}',
    "execution_result_content": {"test_file_names": ["t.py"], "test_file_codes": ["pass"]},
}


@pytest.mark.parametrize(
    ("source", "handler", "instance", "task"),
    [
        ("deepscaler", Math(), {"prompt": CHAT, "reward_model": {"ground_truth": "3"}}, {"answer": ["3"]}),
        ("DeepScaler", Math(), {"problem": "How many?", "answer": 3}, {"problem": "How many?"}),
        (
            "stem",
            Stem(),
            {"question": "?", "answer": "B", "extra_info": '{"choices": ["x", "y"]}'},
            {"kind": "choice"},
        ),
        (
            "apps",
            Code(),
            {"question": "?", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'},
            {"prompt": "?", "starter_code": ""},
        ),
        (
            "deepcoder",
            Code(),
            {
                "prompt": CHAT,
                "reward_model": {"ground_truth": '[{"testtype": "stdin", "input": "1", "output": "2"}]'},
            },
            {"prompt": "How many?"},
        ),
        (
            "taco",
            Code(),
            {"prompt": "?", "reward_model": {"ground_truth": {"inputs": ["1"], "outputs": ["2"]}}},
            {"prompt": "?"},
        ),
        ("reasoning_gym", ReasoningGym(), {"dataset": "dice", "seed": 1, "index": 2}, {"index": 2}),
        (
            "reasoning_gym",
            ReasoningGym(),
            {
                "prompt": "How many?",
                "reward_model": {"ground_truth": "3"},
                "extra_info": {"source_dataset": "dice"},
            },
            {"dataset": "dice", "question": "How many?", "answer": "3"},
        ),
        ("swebench", Swe(), SWE, {"instance_id": "a__b-1", "image": None}),
        ("swebench", Swe(), SWE | {"docker_image": "some/image"}, {"docker_image": "some/image"}),
        ("swebench", Swe(), R2E | {"instance_id": "r"}, {"docker_image": R2E["docker_image"]}),
    ],
)
def test_an_instance_becomes_a_task_of_its_handler(source, handler, instance, task):
    assert handler_of(source, {}, {}) == handler.name
    made = task_of(handler.info(), instance | {"data_source": source, "trajectory_id": "0"})
    Draft202012Validator(handler.info().task_schema).validate(made)  # as the gateway does
    read = handler.check_task(made)
    assert {name: getattr(read, name) for name in task} == task
    if handler.name == "code":
        assert [(case.stdin, case.stdout) for case in read.tests] == [("1", "2")]
    if handler.name == "swe":
        assert read.instance().source == ("r2e-gym" if "commit_hash" in instance else "swe-gym")
        assert read.instance().image == instance.get("docker_image", OFFICIAL)


@pytest.mark.parametrize(
    ("handler", "fields", "task"),
    [
        (Code(), {"question": "Q?"}, {"question": "Q?"}),
        (Code(), {"problem": "P?", "prompt": "S?"}, {"problem": "P?", "prompt": "S?"}),
        (Code(), {}, {"prompt": "Say it."}),
        (Math(), {"problem": "P?"}, {"problem": "P?"}),
        (None, {"question": "Q?"}, {"question": "Q?", "prompt": "Say it."}),
    ],
)
def test_the_input_of_a_gym_row_is_its_prompt_where_it_has_no_problem(handler, fields, task):
    name = handler.name if handler else "own"
    row = nemo_gym.RunRequest.model_validate(
        {"handler": name, "responses_create_params": {"input": "Say it."}, "answer": "1"} | fields
    )
    info = handler.info() if handler else HandlerInfo(name="own")
    asked_for = nemo_gym.rollout_request(row, {name: info}, Settings.from_env({}))
    assert asked_for.handler == name and asked_for.task == task | {"answer": "1"}


def test_metadata_of_a_gym_row_may_be_texts_of_json_as_its_values_must_be_texts():
    spec = {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"}
    metadata = SWE | {"spec": json.dumps(spec), "PASS_TO_PASS": '["u"]', "image": "twice"}
    packed = {"instance_id": "a__b-1", "instance_dict": json.dumps(metadata), "split": "train"}
    for given in (metadata, packed):
        params = {"input": [], "metadata": given}
        row = nemo_gym.RunRequest.model_validate({"responses_create_params": params})
        info = Swe().info()
        made = nemo_gym.rollout_request(row, {"swe": info}, Settings.from_env({})).task
        assert made["spec"] == spec and "instance_dict" not in made
        Draft202012Validator(info.task_schema).validate(made)
        assert Swe().check_task(made).instance_id == "a__b-1"
    for kept in ("3", "{", "[" * 99):
        params = {"input": "Q?", "metadata": {"answer": kept, "problem": "P?", "choices": kept}}
        row = nemo_gym.RunRequest.model_validate({"handler": "math", "responses_create_params": params})
        made = nemo_gym.rollout_request(row, {"math": Math().info()}, Settings.from_env({})).task
        assert made["answer"] == kept, "a text stays one where a text is fine"


def test_a_deployment_adds_data_sources_and_any_handler_is_its_own():
    settings = Settings.from_env({"ROLLOUT_DATA_SOURCES": "Mine=noop, deepscaler = math_tools"})
    more = settings.data_source_handlers
    assert handler_of("mine", {}, more) == "noop" and handler_of("deepscaler", {}, more) == "math_tools"
    assert handler_of("own", {"own": HandlerInfo(name="own")}, {}) == "own"
    assert task_of(HandlerInfo(name="own"), {"task": {"a": 1}, "b": 2}) == {"a": 1}
    assert task_of(None, {"a": 1, "data_source": "own", "instance_id": "x"}) == {"a": 1}
    with pytest.raises(ApiProblem, match=r"nowhere.*ROLLOUT_DATA_SOURCES"):
        handler_of("nowhere", {}, {})
    with pytest.raises(SettingsError, match=r"ROLLOUT_DATA_SOURCES.*source=handler"):
        Settings.from_env({"ROLLOUT_DATA_SOURCES": "mine"})


def asked(sampling: dict[str, Any], **settings: str) -> RolloutRequest:
    body = prorl.ProcessRequest.model_validate(
        {"instance": {"data_source": "noop", "reward": 1, "instance_id": 7}, "sampling_params": sampling}
    )
    return prorl.rollout_request(body, {"noop": HandlerInfo(name="noop")}, Settings.from_env(settings), 0)


def test_sampling_parameters_keep_their_meaning():
    request = asked({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 9, "max_output_tokens": 8})
    assert request.sampling.model_dump(exclude_defaults=True) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 8,
    }
    assert asked({"max_tokens": 9, "top_k": None}).sampling.max_tokens == 9
    assert asked({}).sampling.temperature == 1.0 and asked({}).limits.max_turns == 30
    request = asked({"max_iterations": 3, "api_key": "sk-1"}, ROLLOUT_PRORL_TIMEOUT_S="45")
    limits = request.limits
    assert limits.max_turns == 3
    assert (limits.init_timeout_s, limits.run_timeout_s, limits.eval_timeout_s) == (45, 45, 45)
    assert request.task == {"reward": 1} and "sk-1" not in request.model_dump_json()
    assert asked({}).group_id == asked({"top_k": 5}).group_id is not None, "instances of a name are a group"


def test_a_name_is_cancelled_once_all_of_its_rollouts_are():
    words = ["gone", "ended", "cancelled", "cancelling"]
    said = [prorl.status_of(words[:count]) for count in range(5)]
    assert said == ["unknown", "unknown", "ended", "cancelled", "cancelling"]


# -- results -----------------------------------------------------------------------------------


def ended(state: State = State.COMPLETED, **fields: Any) -> Rollout:
    values = {
        "trajectory": Trajectory(chains=[chain()], artifacts={"patch": "diff"}),
        "finish_reason": "stop",
        "stage_seconds": {"queued": 4.0, "init": 1.0, "run": 2.0},
    }
    return results.ended(state, **values | fields)


def chain(first: int = 1, finish_reason: str | None = "stop") -> Chain:
    """A prompt, a turn across a weight swap with two calls, their answers, a last turn."""
    calls = [ToolCall(id=f"c{n}", name="execute_bash", arguments={"command": "ls"}) for n in (1, 2)]
    question = [Message(role="system", content="S"), Message(role="user", content="Q")]
    turn = Message(role="assistant", reasoning="hm", tool_calls=calls)
    answers = [
        Message(role="tool", content="one", tool_call_id="c1"),
        Message(role="tool", content="malformed"),
    ]
    last = Message(role="assistant", content="A")

    def sampled(token: int, version: str, call: str, *messages: Message, **more: Any) -> Segment:
        fields = {"logprobs": [-0.5], "policy_version": version, "call_id": call, "messages": [*messages]}
        return Segment(role="assistant", sampled=True, token_ids=[token], **fields, **more)

    made = Chain()
    made.append(Segment(role="user", token_ids=[first, 2], messages=question))
    made.append(sampled(3, "a", "x"))
    made.append(sampled(4, "b", "x", turn))
    made.append(Segment(role="tool", token_ids=[5, 6], messages=answers))
    made.append(sampled(7, "b", "y", last, finish_reason=finish_reason))
    return made


def result(
    rollout: Rollout, *, ids: prorl_result.Ids = "sampled", info: HandlerInfo | None = None
) -> dict[str, Any]:
    return check(prorl_result.result(rollout, info, ids=ids))


def test_a_turn_across_a_weight_swap_is_one_message_with_all_its_ids():
    info = HandlerInfo(name="noop", tool_schemas=[ExecuteBash().spec()])
    row = result(ended(), info=info)
    first, second = [message for message in row["messages"] if message["role"] == "assistant"]
    assert (first["input_ids"], first["token_ids"], first["logprobs"]) == ([1, 2], [3, 4], [-0.5, -0.5])
    assert (second["input_ids"], second["token_ids"]) == ([1, 2, 3, 4, 5, 6], [7])
    assert first["tool_calls"][1] == {"name": "execute_bash", "arguments": {"command": "ls"}}
    assert row["git_patch"] == "diff" and row["tools"][0]["function"]["name"] == "execute_bash"
    assert row["timing"]["counted_elapsed"] == 3.0 and row["timing"]["others_time"] == 4.0


def test_compact_messages_together_are_the_context():
    row = result(ended(), ids="compact")
    assert [token for message in row["messages"] for token in message["token_ids"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [message["content"] for message in row["messages"]] == ["S", "Q", "", "one", "malformed", "A"]
    unread = [Message(role="tool", content="late", tool_call_id="c9")]
    row = result(ended(trajectory=Trajectory(chains=[chain(), chain(9)], unread=unread)), ids="compact")
    assert [message.get("chain") for message in row["messages"]] == [0] * 6 + [1] * 6 + [None]
    assert row["messages"][-1] == {"role": "tool", "content": "late", "tool_call_id": "c9", "token_ids": []}


def test_every_message_has_all_three_lists_where_a_trainer_reads_them_of_every_message():
    sampling = prorl.ProrlSampling(token_level_generation=True)
    unread = [Message(role="tool", content="late", tool_call_id="c9")]
    messages = result(ended(trajectory=Trajectory(chains=[chain()], unread=unread)), ids=sampling.ids)[
        "messages"
    ]
    # As verl's code of ProRL's server does, and NeMo RL's.
    assert [token for message in messages for token in message["token_ids"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [message["input_ids"] for message in messages] == [None] * 6, "NeMo RL cuts that many ids off"
    assert [message["logprobs"] for message in messages] == [None, None, [-0.5, -0.5], None, None, [-0.5]]
    assert messages[-1]["role"] == "assistant", "verl asserts it"
    assert prorl.ProrlSampling(token_level_generation=True, compact=True).ids == sampling.ids


def test_a_trainer_gets_the_last_context_alone():
    compacted = ended(trajectory=Trajectory(chains=[chain(), chain(9)]))
    messages = result(compacted, ids="all")["messages"]
    assert [token for message in messages for token in message["token_ids"]] == [9, 2, 3, 4, 5, 6, 7]
    assert [message["chain"] for message in result(compacted)["messages"]] == [0] * 6 + [1] * 6


def unsampled(blame: str) -> Rollout:
    asked = Chain(segments=[Segment(role="user", token_ids=[1] * 9000, messages=[])])
    error = ErrorInfo(blame=blame, stage="run", type="X", message="leaves no room for a turn")
    fields = {"finish_reason": "context_length", "trajectory": Trajectory(chains=[asked])}
    return ended(State.FAILED, drop=True, error=error, **fields)


def test_a_trainer_tries_again_what_another_try_may_mend_and_gets_a_turn_of_nothing_else():
    assert result(unsampled("sandbox"), ids="all")["messages"] == []
    asked, said = result(unsampled("task"), ids="all")["messages"]
    assert (asked["role"], asked["token_ids"], asked["input_ids"], asked["logprobs"]) == (
        "user",
        [0],
        None,
        None,
    )
    assert (said["token_ids"], said["input_ids"], said["logprobs"]) == ([0], None, [0.0])


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
@pytest.mark.parametrize("trainer", [nemo_rl_rows, verl_rows])
def test_what_was_dropped_after_its_turns_is_no_reward_of_nought(state, trainer):
    """A scorer that was down, a sandbox that was lost, a cancel: trainers read `messages` and `resolved`."""
    dropped = result(ended(state, drop=True, error=BROKEN), ids="all")
    assert dropped["filter"] and dropped["messages"] == []
    first, second = trainer([[dropped, result(ended(), ids="all")]])
    assert first.padded and first.response == second.response and first.resolved
    assert result(ended(State.FAILED, drop=True, error=BROKEN))["messages"], "a reader sees what there was"


def prompt_only(*roles: str) -> Chain:
    """A chain of a prompt alone."""
    question = [Message(role=role, content=role) for role in roles]
    return Chain(segments=[Segment(role="user", token_ids=[8, 9], messages=question)])


@pytest.mark.parametrize(
    "roles", [("user",), ("user", "assistant", "user"), ("user", "assistant"), ("assistant",)]
)
def test_a_context_in_which_nothing_was_sampled_is_not_what_a_trainer_gets(roles):
    """RUN's time limit, or a failed call, after a compaction."""
    trajectory = Trajectory(chains=[chain(), prompt_only(*roles)])
    for reason, properly in (("time_limit", False), ("stop", True)):
        row = result(ended(finish_reason=reason, trajectory=trajectory), ids="all")
        assert (row["success"], row["end_properly"]) == (True, properly)
        ids = [token for message in row["messages"] for token in message["token_ids"]]
        assert ids == [1, 2, 3, 4, 5, 6, 7] and row["messages"][-1]["logprobs"] == [-0.5]


def test_ids_of_a_prompt_with_answers_in_it_are_never_an_assistants():
    """Trainers tell by the role what was sampled, and what comes before the first is the prompt."""
    shown = prompt_only("user", "assistant", "user")
    shown.append(chain().segments[-1])
    (row,) = verl_rows([[result(ended(trajectory=Trajectory(chains=[shown])), ids="all")]])
    assert (row.prompt, row.response, row.mask) == ([8, 9], [7], [1])


def test_a_reward_for_what_no_model_said_is_none():
    """Of a handler that calls no model, beside the good ones of a group."""
    silent = ended(trajectory=Trajectory(), reward=1.0)
    row = result(silent)
    assert (row["success"], row["filter"], row["resolved"], row["reward"]) == (False, True, False, None)
    assert row["critical_error"] == "run" and "not called once" in row["error"]
    answer = nemo_gym_answers.answer({"responses_create_params": {}}, silent, None)
    assert (answer["mask_sample"], answer["reward"], answer["reward_components"]) == (True, 0.0, {})
    assert check_response(answer["response"]) == [0, 0] and "not called once" in answer["error"]


def test_what_never_sampled_is_no_reward_for_clients_of_other_servers():
    rollout = unsampled("task")
    answer = result(rollout)
    assert (answer["success"], answer["filter"], answer["reward"]) == (False, True, None)
    assert "leaves no room for a turn" in answer["error"]
    row = nemo_gym_answers.answer({"responses_create_params": {}}, rollout, None)
    assert row["mask_sample"] and row["reward"] == 0.0
    (item,) = row["response"]["output"]
    assert (item["prompt_token_ids"], item["generation_token_ids"]) == ([0], [0]), "NeMo RL wants some"


BROKEN = ErrorInfo(blame="sandbox", stage="run", type="X", message="gone", traceback="Traceback …")
LATE = ErrorInfo(blame="timeout", stage="eval", type="X", message="too long")


def at(state: State) -> list[TimelineEvent]:
    return [TimelineEvent(state=passed, at=1.0, attempt=1, fence=0) for passed in (state, State.CANCELLED)]


@pytest.mark.parametrize(
    ("rollout", "critical", "filtered", "timeout"),
    [
        (ended(), None, False, False),
        (ended(reward=0.0), None, False, False),
        (ended(State.TIMED_OUT, finish_reason="time_limit"), None, False, True),
        (ended(State.TIMED_OUT, drop=True), "timeout", True, True),
        (ended(State.FAILED, drop=True, error=BROKEN), "run", True, False),
        (ended(State.FAILED, drop=True, error=LATE), "timeout", True, True),
        (ended(State.CANCELLED, drop=True, timeline=at(State.QUEUED)), "init", True, False),
        (ended(State.CANCELLED, drop=True, timeline=at(State.RUNNING)), "run", True, False),
        (ended(State.CANCELLED, drop=True, timeline=at(State.EVALUATING)), "eval", True, False),
        (ended(trajectory=None, trajectory_dropped="size"), "final_result", True, False),
    ],
)
def test_only_what_the_service_failed_at_is_filtered(rollout, critical, filtered, timeout):
    body = result(rollout)
    assert (body["critical_error"], body["filter"], body["success"]) == (critical, filtered, not filtered)
    assert body["timing"]["timeout_triggered"] is timeout
    assert (body["reward"] is None) == filtered and bool(body["error"]) == filtered
    assert not (filtered and body["resolved"])
    row = nemo_gym_answers.answer({"responses_create_params": {}}, rollout, None)
    assert bool(row.get("mask_sample")) == filtered
    # Without tokens a row would end the step of a trainer that masks it, and with its own be in its group.
    assert check_response(row["response"]) == ([0, 0] if filtered else [1, 2, 3, 4, 5, 6, 7])
    assert bool((row.get("instance_config") or {}).get("mask_sample")) == filtered


@pytest.mark.parametrize(
    ("reason", "engine", "finish", "properly"),
    [
        ("stop", "stop", True, True),
        ("turn_limit", "stop", False, True),
        ("length", "length", False, False),
        ("token_limit", "length", False, False),
        ("token_limit", "stop", False, True),
        ("time_limit", "stop", False, False),
    ],
)
def test_an_end_in_the_middle_of_a_turn_is_told(reason, engine, finish, properly):
    trajectory = Trajectory(chains=[chain(finish_reason=engine)])
    row = result(ended(finish_reason=reason, trajectory=trajectory))
    assert (row["finish"], row["end_properly"]) == (finish, properly)


def test_the_reward_must_be_whole_to_count_as_resolved():
    rewards = (1.0, 0.991, 0.99, 0.5)
    assert [result(ended(reward=reward))["resolved"] for reward in rewards] == [True, True, False, False]


def test_tokens_are_on_the_last_item_of_their_call():
    response = nemo_gym_answers.response({}, ended(), None)
    items = response["output"]
    kinds = [item["type"] for item in items]
    answers = ["function_call_output", "message"]
    assert kinds == ["reasoning", "function_call", "function_call", *answers, "message"]
    assert [n for n, item in enumerate(items) if "generation_token_ids" in item] == [2, 5]
    assert items[2]["generation_token_ids"] == [3, 4] and items[5]["prompt_token_ids"] == [1, 2, 3, 4, 5, 6]
    assert items[4]["role"] == "user", "what answers no call has no id to name"
    several = nemo_gym_answers.response({}, ended(trajectory=Trajectory(chains=[chain(), chain(9)])), None)
    assert check_response(several) == [9, 2, 3, 4, 5, 6, 7], "one growing context, the last"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, None),
        ({"_ng_task_index": 4}, None),
        ({"_ng_task_index": 4, "_ng_rollout_index": 2}, "4-2"),
        ({"_ng_task_index": 4, "_ng_rollout_index": 2, "_ng_attempt_index": 0}, "4-2"),
        ({"_ng_task_index": 4, "_ng_rollout_index": 2, "_ng_attempt_index": 1}, "4-2-a1"),
        ({"_ng_rollout_id": "x.y", "_ng_task_index": 4, "_ng_rollout_index": 2}, "x.y"),
    ],
)
def test_a_row_names_its_rollout(fields, name):
    assert nemo_gym.RunRequest.model_validate({"responses_create_params": {}, **fields}).name == name


def test_an_answer_repeats_the_request_as_it_came():
    row = {"responses_create_params": {"input": "x", "temperature": "0.7", "top_p": 1}, "agent_ref": None}
    repeated = nemo_gym.RunRequest.model_validate(row | {"_ng_task_index": 3, "question": "y"}).repeated()
    assert repeated == {"responses_create_params": row["responses_create_params"], "_ng_task_index": 3}


def test_numbers_of_many_answers_leave_masked_ones_out():
    rows = [
        {"_ng_task_index": task, "reward": reward, "reward_components": {"correct": reward}}
        for task, reward in ((0, 1.0), (0, 0.0), (1, 0.0), (1, 0.0))
    ]
    rows.append({"_ng_task_index": 1, "reward": 0, "mask_sample": True, "_ng_failure_class": "sandbox"})
    numbers = nemo_gym_answers.aggregate(rows)
    assert (
        numbers["agent_metrics"]
        | {
            "rollouts": 5,
            "mean/reward": 0.25,
            "pass@2": 0.5,
            "dropped/sandbox": 1,
            "component/correct": 0.25,
        }
        == numbers["agent_metrics"]
    )
    assert numbers["key_metrics"] == {"mean/reward": 0.25, "pass@1": 0.25, "pass@2": 0.5}
    assert [(group["_ng_task_index"], group["mean/reward"]) for group in numbers["group_level_metrics"]] == [
        (0, 0.5),
        (1, 0.0),
    ]
    assert nemo_gym_answers.aggregate([])["key_metrics"] == {}


@pytest.mark.parametrize("task", ["²", "--5", "-", "9" * 5000, ""])
def test_a_task_that_is_called_anything_keeps_its_name(task):
    (group,) = nemo_gym_answers.aggregate([{"_ng_task_index": task, "reward": 1.0}])["group_level_metrics"]
    assert group["_ng_task_index"] == task


@pytest.mark.parametrize(
    "number", ["much", "nan", "1e400", "-Infinity", "1e151", 10**400, -1e151, [1], "9" * 5000]
)
@pytest.mark.parametrize("place", ["reward", "metrics", "reward_components"])
def test_what_cannot_be_summed_is_refused_by_its_row(number, place):
    row = {"reward": 1.0} | {place: number if place == "reward" else {"a": number}}
    with pytest.raises(ApiProblem, match=r"verify_responses\.1"):
        nemo_gym_answers.aggregate([{"reward": 1.0}, row])


def test_the_largest_numbers_of_many_rows_have_a_sum():
    rows = [{"reward": "1e150", "metrics": {"a": "1e150"}, "reward_components": {"a": -1e150}}] * 1000
    assert "inf" not in json.dumps(nemo_gym_answers.aggregate(rows)).lower()
