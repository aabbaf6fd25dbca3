"""Harbor tasks end to end, in sandboxes of the base image; each uses some fields of the format."""

from __future__ import annotations

import json

import pytest

from rollout.schema import State
from rollout.trajectory import FinishReason
from services.settings import settings
from tests.helpers.harbor_tasks import NO_NETWORK, Play, bash, refused, said
from workers.handlers.base import MAX_ARTIFACT_BYTES, check_artifacts
from workers.handlers.harbor.artifacts import MAX_BYTES, MAX_LOG_BYTES, keep_log


def test_an_agent_works_where_the_image_says_and_is_scored_by_the_tests(play: Play):
    done = play(
        bash("pwd; ls -d /tests /solution; ls /logs"),
        bash("touch done.txt"),
        instruction="<!-- harbor-canary 1 -->\n\nMake the file done.txt.\n",
    )
    assert (done.state, done.reward, done.reward_components) == (State.COMPLETED, 1.0, {"reward": 1.0})
    assert done.trajectory.messages[0].text == "Make the file done.txt.\n\nThe working directory is /."
    assert done.trajectory.messages[0].role == "user", "no system text"
    first = said(done)[0]
    assert first.startswith("/\n") and first.count("No such file or directory") == 2
    assert first.endswith("agent  artifacts  verifier")
    assert play(bash("true")).reward == 0.0


def test_variables_come_from_the_task_and_of_the_workers_own_only_those_that_are_permitted(
    play: Play, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GIVEN", "of the worker")
    monkeypatch.setenv("SECRET", "of the worker, too")
    toml = """
    [environment]
    workdir = "/srv/work/here"
    env = { PLAIN = "a b", DEFAULT = "${ABSENT:-else}", PERMITTED = "${GIVEN:-no}", NOT = "${SECRET:-no}" }
    """
    monkeypatch.setenv("ROLLOUT_TASK_VARIABLES", "GIVEN, UNSET")
    settings.cache_clear()
    done = play(
        bash('echo "$PLAIN|$DEFAULT|$PERMITTED|$NOT|$SECRET|$PWD"; env | grep -c "of the worker"'), toml=toml
    )
    assert said(done)[0] == "a b|else|of the worker|no||/srv/work/here\n1"
    why = refused(play(toml="[environment]\nenv = { KEY = '${SECRET}' }"))
    assert "SECRET" in why and "ROLLOUT_TASK_VARIABLES" in why
    settings.cache_clear()


def test_the_agents_own_time_limit_ends_its_turns_and_they_are_scored(play: Play):
    toml = NO_NETWORK + "[agent]\ntimeout_sec = 2\n"
    done = play(
        bash("touch done.txt"), bash("sleep 30", timeout=30), toml=toml, task={"timeout_multiplier": 0.5}
    )
    assert (done.state, done.reward) == (State.TIMED_OUT, 1.0)
    assert done.finish_reason is FinishReason.TIME_LIMIT and done.stage_seconds["run"] < 5


def test_a_healthcheck_is_waited_for_and_one_that_fails_is_the_tasks_fault(play: Play):
    health = NO_NETWORK + "healthcheck = { command = %s, interval_sec = 0.05, %s }\n"
    # Fails at first: a look that Docker would not take does not count, even where one may fail.
    slow = "test -e /tmp/up || { touch /tmp/up; exit 1; }"
    assert play(bash("touch done.txt"), toml=health % (json.dumps(slow), "retries = 1")).reward == 1.0
    why = refused(play(toml=health % ("'echo not well; false'", "retries = 2")))
    assert "failed 2 times" in why and "not well" in why
    # Ten failures within the start period are none.
    slow = "echo >>/tmp/looks; test $(wc -l </tmp/looks) -gt 10"
    starting = "retries = 1, start_period_sec = 30, start_interval_sec = 0.01"
    assert play(bash("touch done.txt"), toml=health % (json.dumps(slow), starting)).reward == 1.0
    why = refused(play(toml=health % ("'sleep 20'", "retries = 1, timeout_sec = 0.2")))
    assert "took too long" in why


def test_skills_are_told_and_what_an_agent_did_before_is_its_history(play: Play):
    steps = [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "List it."}]},
        {
            "step_id": 3,
            "source": "agent",
            "message": "Looking.",
            "reasoning_content": "It may be large.",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "execute_bash", "arguments": {"command": "ls"}}
            ],
            "observation": {"results": [{"source_call_id": "c1", "content": "a.txt"}]},
        },
    ]
    document = json.dumps({"schema_version": "ATIF-v1.6", "steps": steps})
    toml = NO_NETWORK + "skills_dir = '/opt/skills'\n"
    done = play(bash("touch done.txt"), toml=toml, files={"trajectory.json": document})
    messages = done.trajectory.messages
    assert [message.role for message in messages[:5]] == ["system", "user", "assistant", "tool", "user"]
    assert messages[2].tool_calls[0].arguments == {"command": "ls"} and messages[3].text == "a.txt"
    assert messages[4].text.endswith("are in /opt/skills.") and done.reward == 1.0
    assert not done.trajectory.chain.segments[0].sampled, "what came before is not trained on"
    broken = json.dumps({"steps": [{"source": "agent", "message": "x"}, {"source": "nobody"}]})
    assert "trajectory.json, step 2" in refused(play(files={"trajectory.json": broken}))


@pytest.mark.parametrize("image", ["/", "/etc", "~/image", "a/../../etc"])
def test_a_task_names_no_place_of_the_node_as_its_image(play: Play, image: str):
    why = refused(play(toml=f"[environment]\nnetwork_mode = 'no-network'\ndocker_image = '{image}'\n"))
    assert f"environment.docker_image: {image!r} is a path" in why


def test_no_name_of_an_artifact_ends_a_sample(play: Play):
    done = play(bash("touch done.txt; echo kept >\"/logs/artifacts/$(printf 'od\\377d')\""))
    assert done.reward == 1.0, done.error
    assert done.model_dump_json()


def test_logs_and_files_of_all_steps_have_room_in_a_record():
    kept: dict[str, str] = {"steps": "[]"}
    for number in range(40):
        keep_log(kept, f"verifier.log/{number}", "é" * 100_000 + str(number))
    check_artifacts(dict(kept), "harbor")
    assert len(kept) > 8 and kept["verifier.log/0"].endswith("é0")
    assert sum(len(text.encode()) for text in kept.values()) <= MAX_LOG_BYTES
    assert MAX_LOG_BYTES + MAX_BYTES < MAX_ARTIFACT_BYTES
