"""Collectors of NeMo Gym, against the whole service."""

from __future__ import annotations

import re
from typing import Any

import httpx

from tests.helpers.compatibility import PATIENCE_S, SOLVED, Service, waiters
from tests.helpers.gym_collector import RELEASES, Collection
from tests.helpers.keys import http
from tests.helpers.nemo_gym_client import check_response
from tests.helpers.stack import ROOT, wait_until


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
