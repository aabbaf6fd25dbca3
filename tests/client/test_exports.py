"""`rollout.exports` and `rollout export`: what the formats' own readers read, and what is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rollout import cli
from rollout.errors import RolloutError
from rollout.exports import FORMATS, atif, write
from rollout.exports.steps import file_name, steps_of
from rollout.schema import Chain, ErrorInfo, RolloutRequest, Segment, State
from rollout.schema.agents import CallRecord
from rollout.schema.rollouts import TimelineEvent
from rollout.trajectory import FinishReason, Message, ToolCall, Trajectory
from tests.helpers.readers import read
from tests.helpers.rollouts import chain, ended, sampled
from tests.helpers.trees import family

BASH = ToolCall(id="c1", name="execute_bash", arguments={"command": "echo $((37*85))"})
PROMPT = [Message(role="system", content="You calculate."), Message(role="user", content="37 times 85")]
STATES = ("queued", "initializing", "ready", "running", "evaluating", "completed")
TASK = {"question": "37 times 85", "answer": "3145"}


def conversation() -> Chain:
    """A call across two versions, with a tool; what the tool answered; a last call."""
    asks = Message(role="assistant", content="I look.", reasoning="hm", tool_calls=[BASH])
    made = chain(
        [1, 2, 3],
        sampled([4, 5], [-0.5, -0.25], policy_version="step-7", call_id="a"),
        sampled([6], [-0.125], policy_version="step-8", call_id="a", finish_reason="stop", messages=[asks]),
        Segment(
            role="tool",
            token_ids=[7, 8],
            messages=[Message(role="tool", tool_call_id="c1", content="\x1b[31m3145\x1b]52;c;eA==\x07\n")],
        ),
        sampled(
            [9],
            policy_version="step-8",
            call_id="b",
            finish_reason="length",
            messages=[Message(role="assistant", content="3145")],
        ),
    )
    made.segments[0].messages = PROMPT
    return made


def forked() -> Chain:
    """A chain that left the other one after its first call, which is given here."""
    ends = sampled(
        [21], policy_version="step-8", call_id="f", messages=[Message(role="assistant", content="?")]
    )
    first = Segment(
        role="assistant",
        token_ids=[4, 5, 6],
        call_id="a",
        messages=[Message(role="assistant", content="I look.")],
    )
    again = Segment(role="user", token_ids=[20], messages=[Message(role="user", content="Again")])
    made = chain([1, 2, 3], first, again, ends)
    made.segments[0].messages, made.role, made.parent = PROMPT, "discarded", 1
    return made


def record(index: int = 0, **fields):
    """A rollout of the group `g:1` with two chains and artifacts, of which one would like to be elsewhere."""
    trajectory = Trajectory(
        chains=[forked(), conversation()],
        finish_reason=FinishReason.STOP,
        model="org/model",
        artifacts={"patch": "diff", "test_log": "1 passed", "../../out": "x"},
        unread=[Message(role="tool", content="too late")],
    )
    known = {
        "id": f"g:1.{index}",
        "group_id": "g:1",
        "index": index,
        "handler": "calculator",
        "request": RolloutRequest(handler="calculator", task=TASK),
        "reward": float(index % 2),
        "reward_components": {"exact": 1.0},
        "finish_reason": FinishReason.STOP,
        "trajectory": trajectory,
        "created_at": 1000.0,
        "finished_at": 1005.0,
        "timeline": [
            TimelineEvent(state=state, at=1000.0 + at, attempt=1, fence=at) for at, state in enumerate(STATES)
        ],
    }
    return ended(**known | fields)


def silent():
    """A rollout that got no sandbox."""
    error = ErrorInfo(blame="sandbox", stage="init", type="SandboxStartError", message="no room")
    fields = {
        "trajectory": None,
        "reward": None,
        "reward_components": {},
        "finish_reason": None,
        "drop": True,
    }
    return record(id="s", group_id="h", error=error, state=State.FAILED, **fields)


def timed(index: int = 0):
    """The same rollout with the times of its calls."""
    known = {"seconds": 0.25, "backend": "b1", "cached_tokens": 2}
    made = record(index)
    made.trajectory.calls = [
        CallRecord(kind="model", id="a", at=1003.0, **known),
        CallRecord(kind="tool", id="c1", at=1003.5, **known),
        CallRecord(kind="model", id="b", at=1003.75, **known),
    ]
    return made


def test_steps_have_what_was_sampled_and_the_answers_of_tools():
    system, user, first, last = steps_of(conversation(), [Message(role="tool", content="late")])
    assert (system.message.role, user.message.text) == ("system", "37 times 85")
    assert first.sampled.token_ids == [4, 5, 6] and first.sampled.logprobs == [-0.5, -0.25, -0.125]
    assert first.sampled.policy_versions == ["step-7", "step-7", "step-8"]
    assert (first.prompt, first.stop, last.prompt, last.stop) == (3, "stop", 8, "length")
    assert [result.text for result in last.results] == ["late"]
    assert [step.copied for step in steps_of(forked())] == [True, True, True, False, False]


def test_atif_holds_ids_logprobs_versions_mask_and_the_other_chains(tmp_path):
    assert write([record()], tmp_path / "r.json", "atif") == 1
    document = read("atif", tmp_path / "r.json")
    assert document["schema_version"] == "ATIF-v1.8" and document["agent"]["model_name"] == "org/model"
    sources = [step["source"] for step in document["steps"]]
    assert sources == ["system", "user", "agent", "agent", "system"]
    first, last = document["steps"][2:4]
    assert first["reasoning_content"] == "hm"
    assert first["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "execute_bash", "arguments": BASH.arguments}
    ]
    (result,) = first["observation"]["results"]
    assert result["source_call_id"] == "c1" and result["content"].startswith("\x1b[31m3145")
    metrics = first["metrics"]
    assert metrics["prompt_token_ids"] == [1, 2, 3] and metrics["completion_token_ids"] == [4, 5, 6]
    assert metrics["logprobs"] == [-0.5, -0.25, -0.125] and metrics["extra"]["loss_mask"] == [1, 1, 1]
    assert metrics["extra"]["policy_versions"] == ["step-7", "step-7", "step-8"]
    assert last["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert document["final_metrics"] == {
        "total_prompt_tokens": 11,
        "total_completion_tokens": 4,
        "total_steps": 5,
    }
    assert document["extra"]["reward"] == 0.0 and document["extra"]["task"] == TASK
    (other,) = document["subagent_trajectories"]
    assert other["extra"] == {"chain_role": "discarded", "parent_trajectory_id": document["trajectory_id"]}
    assert [step.get("is_copied_context", False) for step in other["steps"]] == [True] * 3 + [False] * 2
    assert other["steps"][-1]["metrics"]["extra"]["loss_mask"] == [0]
    refs = document["steps"][4]["observation"]["results"][0]["subagent_trajectory_ref"]
    assert refs[0]["trajectory_id"] == other["trajectory_id"]


def test_atif_of_a_long_rollout_has_only_what_each_call_added(monkeypatch):
    monkeypatch.setattr(atif, "MOST_PROMPT_IDS", 10)
    document = atif.trajectory(record())
    metrics = [step["metrics"] for step in document["steps"] if "metrics" in step]
    assert all("prompt_token_ids" not in part for part in metrics) and "added_prompt_ids" in document["notes"]
    assert [part["extra"]["added_prompt_ids"] for part in metrics] == [[1, 2, 3], [7, 8]]


def test_atif_of_several_rollouts_is_a_directory_and_of_one_without_a_call_says_why(tmp_path):
    assert write([record(0), record(0), record(1), silent()], tmp_path / "all", "atif") == 3
    files = sorted((tmp_path / "all").iterdir())
    documents = [read("atif", file) for file in files]
    assert [document["session_id"] for document in documents] == ["g:1.0", "g:1.1", "s"]
    assert documents[2]["steps"][0]["message"] == "No model call: no room"


def test_inspect_reads_a_group_as_epochs_of_a_sample(tmp_path):
    assert write([record(0), record(1), silent()], tmp_path / "g.eval", "inspect") == 3
    log = read("inspect", tmp_path / "g.eval")
    known = log["eval"]
    assert (log["status"], known["task"], known["config"]["epochs"]) == ("success", "calculator", 2)
    name = file_name("g:1")
    samples = {(item["id"], item["epoch"]): item for item in log["samples"]}
    assert samples.keys() == {(name, 1), (name, 2), ("h", 1)}
    one = samples[name, 2]
    assert {name: score["value"] for name, score in one["scores"].items()} == {"reward": 1.0, "exact": 1.0}
    assert [message["role"] for message in one["messages"]] == [
        *("system", "user", "assistant", "tool", "assistant", "tool")
    ]
    assert one["messages"][2]["tool_calls"][0]["arguments"] == BASH.arguments
    assert one["messages"][3]["function"] == "execute_bash"
    assert (
        one["output"]["choices"][0]["stop_reason"] == "max_tokens" and one["output"]["completion"] == "3145"
    )
    assert (one["target"], len(one["input"])) == ("3145", 2)
    assert one["model_usage"]["org/model"]["output_tokens"] == 4
    assert samples["h", 1]["error"]["message"] == "sandbox: SandboxStartError: no room"
    rewards = next(score for score in log["results"]["scores"] if score["name"] == "reward")
    assert (rewards["metrics"]["mean"]["value"], rewards["unscored_samples"]) == (0.5, 1)
    assert log["summaries"][0]["input"] == "37 times 85"


def test_inspect_keeps_requests_apart_that_share_a_group_and_names_the_limit(tmp_path):
    limited = {"id": "other", "finish_reason": FinishReason.TURN_LIMIT}
    write([record(0), record(0, **limited)], tmp_path / "g.eval", "inspect")
    samples = read("inspect", tmp_path / "g.eval")["samples"]
    assert [item["epoch"] for item in samples] == [1, 2]
    assert samples[1]["limit"]["type"] == "turn" and samples[1]["limit"]["limit"] == 30


def test_harbor_reads_the_job_its_trials_and_their_files(tmp_path):
    job = tmp_path / "jobs" / "step-7"
    assert write([timed(0), timed(1), silent()], job, "harbor") == 3
    read_back = read("harbor", tmp_path / "jobs")["step-7"]
    names = [file_name("g:1.0"), file_name("g:1.1"), "s"]
    assert sorted(read_back["trials"]) == sorted(names)
    trial = read_back["trials"][names[1]]
    assert trial["result"]["verifier_result"]["rewards"] == {"reward": 1.0, "exact": 1.0}
    assert trial["result"]["agent_result"]["n_output_tokens"] == 4
    assert trial["result"]["agent_execution"]["started_at"].startswith("1970-01-01T00:16:43")
    assert trial["trajectory"]["steps"][2]["metrics"]["cached_tokens"] == 2
    assert read_back["trials"]["s"]["result"]["exception_info"]["exception_type"] == "SandboxStartError"
    (part,) = (e for e in read_back["result"]["stats"]["evals"].values() if e["n_trials"])
    assert part["metrics"] == [{"mean": 0.5}]
    assert part["reward_stats"]["reward"] == {"0.0": [names[0]], "1.0": [names[1]]}
    assert read_back["result"]["stats"]["n_errored_trials"] == 1
    place = job / names[0]
    assert (place / "verifier" / "reward.txt").read_text() == "0.0\n"
    assert (place / "verifier" / "test-stdout.txt").read_text() == "1 passed"
    assert (place / "artifacts" / "patch.diff").read_text() == "diff"
    assert not list(tmp_path.rglob("out")) and len(list((place / "artifacts").iterdir())) == 2


def test_a_recording_plays_the_timed_calls_and_obeys_nothing_of_theirs(tmp_path):
    write([timed()], tmp_path / "job", "harbor")
    header, typed, answer = map(json.loads, next(tmp_path.rglob("recording.cast")).read_text().splitlines())
    assert (header["version"], header["timestamp"]) == (2, 1003)
    assert typed == [0.0, "o", "\x1b[1mexecute_bash\x1b[0m echo $((37*85))\r\n"]
    assert answer == [0.25, "o", "\x1b[31m3145]52;c;eA==\r\n\r\n"]


def test_otel_reads_spans_of_stages_agent_and_timed_calls(tmp_path):
    assert write([timed(), silent()], tmp_path / "r.otel.json", "otel") == 2
    spans, failed = read("otel", tmp_path / "r.otel.json")
    by_name = {span["name"]: span for span in spans}
    root, agent = by_name["rollout calculator"], by_name["invoke_agent rollout-service"]
    assert len({span["trace"] for span in spans}) == 1 and len({span["id"] for span in spans}) == len(spans)
    assert root["parent"] == "" and root["times"] == [1000.0, 1005.0]
    assert root["events"]["gen_ai.evaluation.result"]["gen_ai.evaluation.score.value"] == 0.0
    assert by_name["running"]["parent"] == agent["parent"] == root["id"]
    assert agent["attributes"]["gen_ai.usage.output_tokens"] == 5
    chats = [span for span in spans if span["name"] == "chat org/model" and span["times"][0] >= 1003.0]
    first = next(s for s in chats if s["attributes"]["gen_ai.response.id"] == "a")
    assert first["parent"] == agent["id"] and first["kind"] == 3 and first["times"] == [1003.0, 1003.25]
    known = first["attributes"]
    assert known["gen_ai.usage.cache_read.input_tokens"] == 2 and known["gen_ai.usage.input_tokens"] == 3
    assert known["rollout.policy_versions"] == ["step-7", "step-8"]
    (said,) = json.loads(known["gen_ai.output.messages"])
    assert [part["type"] for part in said["parts"]] == ["reasoning", "text", "tool_call"]
    second = next(s for s in chats if s["attributes"]["gen_ai.response.id"] == "b")["attributes"]
    assert [m["role"] for m in json.loads(second["gen_ai.input.messages"])] == ["tool"]
    tool = by_name["execute_tool execute_bash"]
    assert tool["times"] == [1003.5, 1003.75] and tool["attributes"]["gen_ai.tool.call.id"] == "c1"
    assert failed[0]["status"] == "SandboxStartError: no room"


def test_otel_of_a_record_without_times_shares_those_of_run_and_says_so(tmp_path):
    write([record()], tmp_path / "r.otel.json", "otel")
    (spans,) = read("otel", tmp_path / "r.otel.json")
    calls = [span for span in spans if span["attributes"].get("rollout.times_estimated")]
    assert len(calls) == 4 and calls[0]["times"] == [1003.0, 1003.25] and calls[-1]["times"][1] == 1004.0


def test_a_fork_says_in_each_format_where_it_left_which_rollout_and_what_it_shares(tmp_path):
    source, fork, _ = family()
    fork = fork.model_copy(update={"moved": 1})
    for kind in FORMATS:
        write([source, fork], tmp_path / kind / ("x.eval" if kind == "inspect" else "x"), kind)
    origin = {"rollout": "s", "turn": 1}
    document = read("atif", tmp_path / "atif" / "x" / "f1.json")
    assert document["extra"]["origin"] == origin and document["extra"]["branch"]["tokens"] == 5
    assert document["extra"]["moved"] == 1 and document["final_metrics"]["total_completion_tokens"] == 3
    assert [step.get("is_copied_context", False) for step in document["steps"]] == [True, True, False]
    trial = read("harbor", tmp_path / "harbor")["x"]["trials"]["f1"]
    assert trial["result"]["agent_result"]["metadata"]["origin"] == origin
    samples = {item["uuid"]: item for item in read("inspect", tmp_path / "inspect" / "x.eval")["samples"]}
    assert samples["f1"]["metadata"]["origin"] == origin
    shared = [bool((m.get("metadata") or {}).get("shared")) for m in samples["f1"]["messages"]]
    assert shared == [True, True, False, False, False]
    first, second = map(json.loads, (tmp_path / "otel" / "x").read_text().splitlines())
    root, own = (made["resourceSpans"][0]["scopeSpans"][0]["spans"] for made in (first, second))
    (link,) = own[0]["links"]
    assert (link["traceId"], link["spanId"]) == (root[0]["traceId"], root[0]["spanId"])
    assert "links" not in root[0] and sum(span["name"].startswith("chat") for span in own) == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_a_record_with_nothing_but_what_it_must_have_is_exported_too(kind, tmp_path):
    bare = ended(trajectory=Trajectory(chains=[chain([1], sampled([2]))]))
    assert write([bare, ended(id="r2")], tmp_path / "jobs" / "x.eval", kind) == 2
    paths = {"atif": "x.eval/r.json", "harbor": ""}
    assert read(kind, tmp_path / "jobs" / paths.get(kind, "x.eval"))


def test_a_rollout_of_200_turns_and_128k_tokens_stays_small(tmp_path):
    parts = [(sampled(range(300), call_id=f"{turn}"), [5] * 340) for turn in range(200)]
    long = ended(trajectory=Trajectory(chains=[chain([1] * 64, *(part for pair in parts for part in pair))]))
    for kind in FORMATS:
        write([long], tmp_path / kind, kind)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert max(sizes) < 5_000_000


# ---------------------------------------------------------------------------------- what is refused


def test_nothing_is_overwritten_and_a_failed_export_leaves_what_was_there(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("mine")
    with pytest.raises(RolloutError, match="is there already: --force replaces it"):
        write([record()], path, "atif")
    going = record(1, state=State.RUNNING)
    with pytest.raises(RolloutError, match=r"g:1\.1 is running: it can be exported once it has ended"):
        write([record(), going], path, "atif", replace=True)
    with pytest.raises(RolloutError, match="there is no rollout to export"):
        write([], path, "atif", replace=True)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    write([record()], path, "atif", replace=True)
    assert json.loads(path.read_text())["session_id"] == "g:1.0"
    with pytest.raises(RolloutError, match="is a directory with something in it"):
        write([record()], tmp_path, "harbor", replace=True)
    with pytest.raises(RolloutError, match="there is no format 'csv': atif, inspect, harbor, otel"):
        write([record()], tmp_path / "x", "csv")


def test_a_name_from_a_record_is_no_path():
    assert file_name("g-1.0") == "g-1.0"
    names = [file_name(text) for text in ("../../etc", "a/b", "a:b", ".", "", "x" * 4000)]
    assert len(set(names)) == 6 and all("/" not in name and name[0] != "." for name in names)
    assert max(map(len, names)) < 200


# ---------------------------------------------------------------------------------- the command


@pytest.fixture
def invoke(gateway, monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUT_URL", gateway.url)
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(cli.main, ["export", *args])


def test_export_writes_a_rollout_of_the_service_in_the_format_that_the_name_says(gateway, invoke, tmp_path):
    gateway.rollouts["r"] = record(id="r")
    done = invoke("r", "-o", "r.json")
    assert done.exit_code == 0 and done.stdout == "r.json: 1 rollout\n"
    assert json.loads((tmp_path / "r.json").read_text())["session_id"] == "r"
    again = invoke("r", "-o", "r.json")
    assert again.exit_code == 1 and "r.json is there already: --force replaces it" in again.stderr
    assert invoke("r", "-o", "r.json", "--force").exit_code == 0
    done = invoke("r", "--format", "harbor")
    assert f"jobs/r: 1 rollout; harbor view {tmp_path}/jobs shows it" in done.stdout
    assert (tmp_path / "jobs" / "r" / "r" / "result.json").is_file()


def test_export_fetches_the_page_of_a_rollout_and_of_a_group(gateway, invoke, tmp_path):
    gateway.rollouts["g:1.0"] = record()
    gateway.pages = {"/v1/rollouts/g:1.0/page": b"<html>one", "/v1/groups/g:1/page": b"<html>all"}
    assert invoke("g:1.0", "-o", "one.html").exit_code == 0
    assert (tmp_path / "one.html").read_bytes() == b"<html>one"
    done = invoke("g:1")
    assert done.exit_code == 0, done.output
    assert (tmp_path / f"{file_name('g:1')}.html").read_bytes() == b"<html>all"
    assert not list(tmp_path.glob(".export-*"))
    absent = invoke("absent", "-o", "absent.html")
    assert absent.exit_code == 1 and "there is no rollout 'absent'" in absent.stderr


def test_export_writes_what_a_file_of_submit_holds(invoke, tmp_path):
    lines = [record(0).model_dump_json(), record(1).model_dump_json()]
    (tmp_path / "out.jsonl").write_text("\n".join(lines) + "\n")
    done = invoke("out.jsonl", "-o", "out.eval")
    assert done.exit_code == 0, done.output
    assert f"out.eval: 2 rollouts; inspect view --log-dir {tmp_path} shows it" in done.stdout
    refused = invoke("out.jsonl", "-o", "out.html")
    assert refused.exit_code == 2 and "give --format for a file" in refused.stderr
    (tmp_path / "bad.jsonl").write_bytes(lines[0].encode() + b'\n{"id": "\xff"}\n')
    refused = invoke("bad.jsonl", "-o", "bad.json")
    assert refused.exit_code == 1 and "bad.jsonl, line 2, is no rollout: : Invalid JSON" in refused.stderr
    assert not (tmp_path / "bad.json").exists()


def test_export_asks_for_a_format_where_the_name_says_none(invoke):
    done = invoke("r", "-o", "somewhere")
    assert done.exit_code == 2
    assert "give --format: only .html, .eval, .json say themselves what is wanted" in done.stderr
