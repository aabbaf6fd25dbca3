"""Everything that goes wrong ends in a clear error and a terminal state, never in a false reward."""

from __future__ import annotations

import pytest

from rollout.client import ApiError
from rollout.schema import RolloutRequest, State, new_id
from tests.helpers.blocking import SyncHostClient
from tests.helpers.keys import http
from tests.helpers.sandboxes import kill_from_outside, leftovers
from tests.helpers.stack import wait_until


def post(stack, content, content_type="application/json"):
    return http.post(f"{stack.url}/v1/rollouts", content=content, headers={"Content-Type": content_type})


def problem(response):
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == response.status_code and body["title"]
    return body


@pytest.fixture(scope="module", autouse=True)
def unplaced(stack):
    """The id of a rollout that waits for a backend twice, for as long as that may take: the last test's."""
    request = RolloutRequest(
        handler="calculator",
        task={"question": "1 plus 1", "answer": "2"},
        policy_version="step-999",
        limits={"max_attempts": 2},
    )
    (new,) = stack.client.submit(request)
    return new.id


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"handler": "no_such"}, "handler"),
        ({"handler": "calculator", "task": {"question": "1 plus 1"}}, "task"),
        ({"handler": "calculator", "task": {"question": 7, "answer": "2"}}, "task.question"),
        ({"handler": "noop", "n": 0}, "n"),
        ({"handler": "noop", "limits": {"max_turn": 1}}, "limits.max_turn"),
        ({"handler": "noop", "id": "a/b"}, "id"),
        ({"requests": [{"handler": "noop"}, {"handler": "noop", "n": "x"}]}, "requests.1.n"),
        ({"requests": [{"handler": "noop"}, {"handler": "no_such"}]}, "requests.1.handler"),
        ({"requests": []}, "requests"),
        ([], "(body)"),
        ("text", "(body)"),
    ],
)
def test_a_bad_request_names_the_field_and_enqueues_nothing(stack, client, body, field):
    before = client.status()["states"]
    response = http.post(f"{stack.url}/v1/rollouts", json=body)
    assert response.status_code == 400
    assert field in [error["field"] for error in problem(response)["errors"]]
    assert sum(client.status()["states"].values()) == sum(before.values())


def test_what_is_not_json_is_refused(stack):
    assert post(stack, b"{").status_code == 400
    assert post(stack, b"\xff\xfe").status_code == 400
    assert problem(post(stack, b"handler=noop", "application/x-www-form-urlencoded"))["status"] == 415


def test_a_body_over_the_limit_is_refused(stack):
    response = post(stack, b'{"handler": "noop", "task": {"x": "' + b"a" * (33 << 20) + b'"}}')
    assert response.status_code == 413
    assert "bytes" in problem(response)["detail"]


def test_paths_and_methods_that_do_not_exist_are_problems_too(stack):
    assert problem(http.get(f"{stack.url}/v1/nothing"))["status"] == 404
    assert problem(http.delete(f"{stack.url}/v1/rollouts"))["status"] == 405
    assert problem(http.get(f"{stack.url}/v1/rollouts/no-such"))["status"] == 404
    assert problem(http.post(f"{stack.url}/v1/rollouts/no-such/cancel"))["status"] == 404


@pytest.mark.parametrize(
    "query",
    ["wait=x", "wait=-1", "wait=1e9", "include=all", "unknown=1"],
    ids=lambda q: q.split("=")[0] + q[-2:],
)
def test_a_bad_query_parameter_is_named(stack, client, query):
    (new,) = client.submit(RolloutRequest(handler="noop"))
    response = http.get(f"{stack.url}/v1/rollouts/{new.id}?{query}")
    assert problem(response)["errors"][0]["field"] == query.split("=")[0]


def test_the_same_id_with_the_same_body_is_the_same_rollout(client):
    request = RolloutRequest(handler="noop", id=new_id(), task={"reward": 0.5})
    assert client.submit(request)[0].created is True
    assert client.submit(request)[0].created is False
    done = client.wait(request.id, timeout=240)
    assert done.reward == 0.5
    again = client.submit(request)[0]
    assert (again.created, again.state) == (False, State.COMPLETED)


def test_the_same_id_with_another_body_is_a_conflict_and_nothing_is_enqueued(client):
    request = RolloutRequest(handler="noop", id=new_id())
    client.submit(request)
    bystander = RolloutRequest(handler="noop", id=new_id())
    with pytest.raises(ApiError, match="in use with another body") as caught:
        client.submit([bystander, request.model_copy(update={"task": {"reward": 1.0}})])
    assert caught.value.status == 409
    with pytest.raises(ApiError):
        client.get(bystander.id)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
@pytest.mark.parametrize("how", ["raise", "timeout", "cancel"])
def test_a_handler_that_raises_fails_the_rollout_with_its_traceback(stack, client, stage, how):
    (item,) = client.run([RolloutRequest(handler="faulty", task={"stage": stage, "how": how})])
    assert item.state is State.FAILED and item.attempt == 1
    assert (item.error.blame, item.error.stage) == ("handler", stage)
    assert "_go_wrong" in item.error.traceback or how == "cancel"
    assert item.reward is None and item.drop and item.drop_reason
    wait_until(lambda: leftovers(stack.sandbox_dir) == [], 120, "the sandbox to be gone")


@pytest.mark.parametrize("stage", ["init", "eval"])
def test_a_stage_that_hangs_is_cut_off_and_tried_again(client, stage):
    limits = {f"{stage}_timeout_s": 0.5, "max_attempts": 2}
    request = RolloutRequest(handler="faulty", task={"stage": stage, "how": "hang"}, limits=limits)
    (item,) = client.run([request])
    assert item.state is State.FAILED and item.attempt == 2
    assert item.error.blame == "timeout" and item.reward is None and item.drop


def test_a_sandbox_that_does_not_start_is_told_in_the_runtimes_words(client):
    (item,) = client.run([RolloutRequest(handler="bad_image", limits={"max_attempts": 2})])
    assert item.state is State.FAILED and item.attempt == 2
    assert item.error.blame == "sandbox" and "no-such-image" in item.error.message
    assert item.reward is None and item.drop


def test_a_sandbox_that_dies_under_the_agent_is_no_reward_of_zero(stack, client):
    """Somebody on the node kills it, in each attempt."""
    request = RolloutRequest(handler="in_tool", task={"command": "sleep 60"}, limits={"max_attempts": 2})
    (submitted,) = client.submit(request)
    host, killed = SyncHostClient(stack.sandbox_dir), set()

    def kill_or_end():
        for box in host.list():
            if box["owner"].startswith(f"{submitted.id}/") and box["id"] not in killed:
                killed.add(box["id"])
                kill_from_outside(box["pid"])
        return client.get(submitted.id).state is State.FAILED

    wait_until(kill_or_end, 120, "the rollout to fail")
    item = client.get(submitted.id)
    assert item.attempt == 2 and len(killed) == 2
    assert item.error.blame == "sandbox" and item.reward is None and item.drop


def test_an_agent_that_kills_everything_it_can_reach_is_scored(client):
    task = {"command": "kill -STOP $PPID; kill -9 $PPID; kill -9 -1; kill -9 $$"}
    (item,) = client.run([RolloutRequest(handler="in_tool", task=task, limits={"max_attempts": 1})])
    assert (item.state, item.attempt, item.reward, item.drop) == (State.COMPLETED, 1, 1.0, False)
    assert item.reward_components == {"cwd_kept": 1.0}


def test_an_unknown_sandbox_runtime_is_told(client):
    request = RolloutRequest(handler="in_tool", sandbox_runtime="docker", limits={"max_attempts": 1})
    (item,) = client.run([request])
    assert item.state is State.FAILED and "docker" in item.error.message


def test_what_is_no_llm_server_is_not_registered(stack, client):
    with pytest.raises(ApiError, match="does not answer as an LLM server"):
        client.add_backend(stack.url)
    with pytest.raises(ApiError) as caught:
        client.remove_backend("no-such")
    assert caught.value.status == 404


def test_an_agent_that_overruns_its_limits_is_scored_and_has_no_second_attempt(stack, client):
    (item,) = client.run([RolloutRequest(handler="greedy")])
    assert item.state is State.COMPLETED and not item.drop and item.error is None
    assert (item.finish_reason, item.reward, item.attempt) == ("sandbox_limit", 1.0, 1)
    assert any("disk limit again" in warning for warning in item.trajectory.warnings)


def test_without_a_fitting_backend_a_rollout_fails_as_infrastructure(client, unplaced):
    item = client.wait(unplaced, timeout=240)
    assert item.state is State.FAILED and item.attempt == 2
    assert item.error.blame == "infrastructure" and "step-999" in item.error.message
    assert item.reward is None and item.drop
