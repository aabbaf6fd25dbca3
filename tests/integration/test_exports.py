"""`rollout export` of real rollouts, from the service and from a file: each format by its own reader."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rollout import cli
from rollout.exports.steps import file_name
from rollout.schema import RolloutRequest
from tests.helpers.readers import read

TASK = {"question": "37 times 85", "answer": "3145"}


@pytest.fixture(scope="module")
def group(stack):
    """Real rollouts with turns of the demo model and answers of a tool in between."""
    request = RolloutRequest(handler="calculator", task=TASK, n=4, id="exported", limits={"max_turns": 4})
    return stack.client.run([request])


@pytest.fixture
def export(stack, monkeypatch):
    monkeypatch.setenv("ROLLOUT_URL", stack.url)

    def run(*args: str):
        done = CliRunner().invoke(cli.main, ["export", *map(str, args)])
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def test_atif_has_every_id_and_log_prob_that_the_trajectory_has(group, export, tmp_path):
    rollout = group[0]
    export(rollout.id, "-o", tmp_path / "r.json")
    document = read("atif", tmp_path / "r.json")
    made = [step["metrics"] for step in document["steps"] if "metrics" in step]
    trajectory = rollout.trajectory
    assert [token for part in made for token in part["completion_token_ids"]] == [
        *(token for s in trajectory.chain.segments if s.sampled for token in s.token_ids)
    ]
    assert [value for part in made for value in part["logprobs"]] == [
        *(value for s in trajectory.chain.segments for value in s.logprobs or [])
    ]
    last = made[-1]["prompt_token_ids"] + made[-1]["completion_token_ids"]
    assert trajectory.chain.token_ids[: len(last)] == last
    assert made[0]["prompt_token_ids"] == trajectory.prompt_ids
    assert document["extra"]["reward"] == rollout.reward


def test_a_group_is_a_log_a_job_and_traces(group, export, tmp_path):
    rewards = {rollout.id: rollout.reward for rollout in group}
    export("exported", "-o", tmp_path / "g.eval")
    samples = read("inspect", tmp_path / "g.eval")["samples"]
    assert {item["uuid"]: item["scores"]["reward"]["value"] for item in samples} == rewards
    assert [item["epoch"] for item in samples] == [1, 2, 3, 4]

    export("exported", "--format", "harbor", "-o", tmp_path / "jobs" / "exported")
    trials = read("harbor", tmp_path / "jobs")["exported"]["trials"]
    tools = [r.id for r in group if len(r.trajectory.calls) > r.trajectory.turns]
    played = [path.parts[-3] for path in tmp_path.rglob("recording.cast")]
    assert sorted(played) == sorted(map(file_name, tools)) and tools
    read_back = {
        name: trial["result"]["verifier_result"]["rewards"]["reward"] for name, trial in trials.items()
    }
    assert read_back == {file_name(name): reward for name, reward in rewards.items()}

    (tmp_path / "out.jsonl").write_text("".join(rollout.model_dump_json() + "\n" for rollout in group))
    export(tmp_path / "out.jsonl", "--format", "otel", "-o", tmp_path / "spans.json")
    for spans, rollout in zip(read("otel", tmp_path / "spans.json"), group, strict=True):
        chats = [span for span in spans if span["name"].startswith("chat ")]
        assert len(chats) == rollout.trajectory.turns
        begin, end = spans[0]["times"]
        assert all(begin <= at <= until <= end + 0.1 for at, until in (span["times"] for span in spans))
        assert not [span for span in spans if "rollout.times_estimated" in span["attributes"]]
        calls = [span["attributes"]["gen_ai.response.id"] for span in chats]
        assert calls == [call.id for call in rollout.trajectory.calls if call.kind == "model"]


def test_a_page_is_one_file_with_all_that_its_view_asks_for(group, export, tmp_path):
    for name, view in ((group[0].id, "rollouts"), ("exported", "groups")):
        export(name, "-o", tmp_path / f"{name}.html")
        page = (tmp_path / f"{name}.html").read_text()
        assert page.startswith("<!doctype html>") and f'"#/{view}/{name}"' in page
        assert "src=" not in page.partition('id="embedded"')[0].partition("<body")[2]
