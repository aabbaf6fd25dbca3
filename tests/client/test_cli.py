"""The `rollout` command against a fake gateway, and what a light install may import."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import EntryPoint

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from docs.make_tables import commands
from rollout import cli
from rollout.progress import Meter
from rollout.schema import Backend, BackendStats, ErrorInfo, SandboxRecord, State
from rollout.schema.agents import Receipt
from rollout.suites.bundles import pack
from rollout.trajectory import FinishReason, Message, ToolCall, Trajectory
from tests.client.fake_gateway import FakeGateway
from tests.helpers.idle import in_time
from tests.helpers.rollouts import chain, sampled
from tests.helpers.stack import free_port, wait_until
from tests.unit.test_harbor_directory import PLAIN, make

TASKS = '{"question": "1 plus 2", "answer": "3"}\n\n{"question": "4 plus 5", "answer": "9"}\n'


@pytest.fixture
def invoke(gateway, monkeypatch):
    monkeypatch.setenv("ROLLOUT_URL", gateway.url)

    def run(*args: str, stdin: str = ""):
        for console in (cli.out, cli.err):  # a console looks up sys.stdout by itself, its width it does not
            console.width = 200
        return CliRunner().invoke(cli.main, args, input=stdin)

    return run


def trajectory() -> Trajectory:
    call = ToolCall(id="c", name="execute_bash", arguments={"command": "echo $((37*85))"})
    message = Message(role="assistant", tool_calls=[call])
    fields = {"policy_version": "step-7", "finish_reason": "stop", "call_id": "1", "messages": [message]}
    conversation = chain([1, 2, 3], sampled([4, 5], [-0.5, -1.5], **fields), [6])
    conversation.segments[0].messages = [Message(role="user", content="37 times 85")]
    conversation.segments[2].messages = [Message(role="tool", content="[bold]3145[/]")]
    return Trajectory(chains=[conversation], finish_reason=FinishReason.STOP, warnings=["no memory limit"])


def test_submit_reads_tasks_and_writes_one_rollout_a_line(gateway, invoke, tmp_path):
    (tmp_path / "in.jsonl").write_text(TASKS)
    target = tmp_path / "out.jsonl"
    options = ["-o", str(target), "--handler", "calculator", "--n", "2", "--tag", "t"]
    result = invoke("submit", str(tmp_path / "in.jsonl"), *options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(lines) == 4
    assert {line["request"]["task"]["answer"] for line in lines} == {"3", "9"}
    assert all(line["request"]["tags"] == ["t"] for line in lines)
    assert result.stderr.index("waits for 4 rollouts") < result.stderr.index(
        "4/4"
    )  # no word for minutes, else
    assert "4 completed, mean reward 1.000" in result.stderr


def test_submit_sends_the_bundles_that_are_missing_before_the_first_rollout(gateway, invoke, tmp_path):
    for name in ("a", "b"):
        make(tmp_path / "set" / name, f'colour = 1\n[task]\nname = "acme/{name}"\n{PLAIN}')
    first, second = (pack(tmp_path / "set" / name) for name in ("a", "b"))
    gateway.bundles[first.digest] = b""
    result = invoke("submit", str(tmp_path / "set"), "--n", "2")
    assert result.exit_code == 0, result.output
    assert gateway.bundles == {first.digest: b"", second.digest: second.content}
    made = [method for method, path in gateway.calls if "bundles" in path or path == "/v1/rollouts"]
    assert sorted(made) == ["HEAD", "HEAD", "POST", "PUT"] and made[-1] == "POST"
    (submission,) = gateway.submissions
    assert [(request.handler, request.n, request.task) for request in submission.requests] == [
        ("harbor", 2, {"bundle": bundle.digest, "name": f"acme/{name}"})
        for bundle, name in ((first, "a"), (second, "b"))
    ]
    assert f"{tmp_path}/set/a/task.toml: colour is not known" in result.stderr


def test_rows_that_name_bundles_are_written_with_their_bundles_sent(gateway, invoke, tmp_path):
    make(tmp_path / "set" / "a")
    bundle = pack(tmp_path / "set" / "a")
    options = ("--handler", "calculator", "-o", str(tmp_path / "rows.jsonl"))
    result = invoke("tasks", "convert", str(tmp_path / "set"), "--no-check", *options)
    assert result.exit_code == 0 and gateway.bundles == {}
    result = invoke("tasks", "convert", str(tmp_path / "set"), *options)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {"bundle": bundle.digest, "name": "a"}
    assert gateway.bundles == {bundle.digest: bundle.content}


def test_a_fault_of_one_task_directory_is_told_before_anything_is_sent(gateway, invoke, tmp_path):
    make(tmp_path / "set" / "a")
    make(tmp_path / "set" / "b", "[agent]\ntimeout_sec = -1\n")
    result = invoke("submit", str(tmp_path / "set"))
    assert result.exit_code == 1 and gateway.bundles == {} and gateway.submissions == []
    assert f"Error: {tmp_path}/set/b/task.toml: agent.timeout_sec: Input should be greater" in result.output


def test_submit_reads_whole_requests_from_stdin_and_writes_to_stdout(invoke):
    result = invoke("submit", "-", stdin='{"handler": "calculator", "id": "a", "tags": ["x"]}\n')
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["id"] == "a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "stdin, line 2: Expecting property name"),
        ("[]", "stdin, line 2: expected a JSON object, got list"),
        (
            '{"handler": "x", "limits": {"max_turn": 3}}',
            "line 2: limits.max_turn: Extra inputs are not permitted",
        ),
    ],
)
def test_submit_names_the_line_at_fault_and_sends_nothing(gateway, invoke, line, message):
    result = invoke("submit", "-", stdin='{"handler": "x"}\n' + line + "\n")
    assert result.exit_code == 1
    assert message in result.stderr
    assert gateway.calls == []


def test_an_api_error_is_one_message_and_no_traceback(gateway, invoke):
    gateway.faults = [(400, {}, b'{"title":"bad","status":400,"errors":[{"field":"state","message":"no"}]}')]
    result = invoke("list")
    assert result.exit_code == 1
    assert "Error: GET /v1/rollouts: 400 bad\n  state: no" in result.stderr


def test_ctrl_c_cancels_what_was_submitted(gateway):
    gateway.finish_at_once = False
    command = [sys.executable, "-m", "rollout.cli", "submit", "-", "--url", gateway.url]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen(command, text=True, **pipes)
    child.stdin.write('{"handler": "calculator", "n": 3}\n')
    child.stdin.close()
    wait_until(lambda: gateway.calls.count(("GET", "/v1/results")) >= 3, 120, "it to wait")
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130
    assert "cancelled 3; 0 had ended" in child.stderr.read()
    assert {r.state for r in gateway.rollouts.values()} == {State.CANCELLED}


def test_show_is_readable(gateway, invoke):
    invoke("submit", "-", stdin='{"handler": "calculator", "id": "a"}\n')
    rollout = gateway.rollouts["a"]
    rollout.trajectory = trajectory()
    rollout.sandbox = SandboxRecord(
        id="s", runtime="apptainer", image="base", node="n1", isolation_missing=["cpu"], start_ms=118
    )
    rollout.stage_seconds = {"init": 0.2, "run": 1.25, "eval": 0.01}
    rollout.error = ErrorInfo(blame="handler", stage="eval", type="KeyError", message="'answer'")
    assert "captured" not in invoke("show", "a").stdout
    rollout.trajectory.receipt = Receipt(
        harness="codex", engines=["vllm b0"], calls=9, retries=1, branches=2, share_delivered=0.914
    )
    shown = invoke("show", "a").stdout
    for text in (
        "37 times 85",
        "→ execute_bash echo $((37*85))",
        "[bold]3145[/]",
        "turn 1, 2 tokens sampled, mean log-prob -1.00, version step-7, stop",
        "apptainer on n1, image base, started in 118 ms",
        "3 prompt, 3 response, 2 sampled in 1 turns",
        "captured  codex: 9 calls, 2 branches, 1 retries, 0 refused; drift 0, 91% of the tokens delivered",
        "run 1.250 s",
        "no memory limit",
        "handler error in eval: KeyError: 'answer'",
    ):
        assert text in shown, (text, shown)


def test_status_list_watch_and_cancel(gateway, invoke):
    invoke("submit", "-", stdin='{"handler": "calculator", "id": "a"}\n')
    status = invoke("status")
    assert "2 completed" in status.stdout
    assert "a worker of the stage run" in status.stderr
    assert "calculator" in invoke("list", "--state", "completed").stdout
    assert invoke("watch", "--seconds", "0.1").exit_code == 0
    for options, text in ((), "b  completed  1.000  calculator\n"), (("--json",), '"id": "b"'):
        watcher = [sys.executable, "-m", "rollout.cli", "watch", "--seconds", "60", "--url", gateway.url]
        gateway.calls.clear()
        with subprocess.Popen([*watcher, *options], text=True, stdout=subprocess.PIPE) as child:
            wait_until(lambda: gateway.calls.count(("GET", "/v1/results")) >= 2, 120, "it to look")
            gateway.rollouts.pop("b", None)
            invoke("submit", "-", stdin='{"handler": "calculator", "id": "b"}\n')
            assert text in child.stdout.readline()
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == 0
    assert "cancelled 0; 1 had ended" in invoke("cancel", "a").stdout
    older = invoke("cancel", "a", "nobody", "noone")
    assert older.exit_code == 1 and "there is no rollout for 2 of these ids; --group" in older.stderr
    assert "exactly one of them" in invoke("cancel").stderr


def test_backends_are_listed_with_load_health_and_weights(gateway, invoke):
    assert "add one with `rollout backends add SERVER`" in invoke("backends").stderr
    stats = BackendStats(at=0, running=2, waiting=1, kv_usage=0.25, prompt_tokens=100, cached_tokens=80)
    fields = {"id": "b1", "url": "http://h:1", "model": "m", "tokenizer": "t", "max_model_len": 512}
    load = {"policy_version": "step-7", "capacity_tokens": 9000, "load": 450, "live_rollouts": 3}
    gateway.backends["b1"] = Backend(**fields, **load, stats=stats)
    row = next(line for line in invoke("backends").stdout.splitlines() if line.startswith("b1"))
    words = " ".join(row.split())
    assert words == "b1 ready http://h:1 m vllm (generate) step-7 3 450 of 9000 2 1 25% 80%"
    gateway.backends["b1"].healthy, gateway.backends["b1"].error = False, "no answer within 5 s"
    assert "unhealthy: no answer within 5 s" in invoke("backends", "list").stdout


def test_backends_are_added_drained_and_removed(gateway, invoke):
    added = invoke("backends", "add", "http://h:1", "--id", "one", "--max-rollouts", "2")
    assert added.exit_code == 0, added.output
    assert gateway.backends["one"].max_rollouts == 2
    wrong = invoke("backends", "add", "nonsense")
    assert wrong.exit_code == 1 and "\nError: url: String should match" in wrong.stderr, wrong.stderr
    assert "one takes no new rollouts; 0 go on there" in invoke("backends", "drain", "one").stdout
    assert gateway.backends["one"].draining
    invoke("backends", "undrain", "one")
    assert not gateway.backends["one"].draining
    gateway.backends["one"].live_rollouts = 1
    refused = invoke("backends", "remove", "one", "--if-idle")
    assert (refused.exit_code, list(gateway.backends)) == (1, ["one"])
    assert "Backend in use" in refused.stderr
    assert invoke("backends", "remove", "one").exit_code == 0
    assert "there is no backend 'one'" in invoke("backends", "drain", "one").stderr


def test_help_lists_operator_commands_without_importing_them(monkeypatch):
    module = import_module("rollout.cli.main")
    points = [
        EntryPoint("up", "rollout_absent.module:up", module.COMMAND_GROUP),
        EntryPoint("extra", "rollout_absent.other:extra", module.COMMAND_GROUP),
    ]
    monkeypatch.setattr(import_module("rollout.cli.points"), "entry_points", lambda group: points)
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    assert "Start the whole service on this machine." in result.stdout
    assert "From rollout_absent.other." in result.stdout
    result = CliRunner().invoke(cli.main, ["up"])
    assert result.exit_code == 1
    assert result.stderr.strip() == (
        "Error: `rollout up` needs the Python package 'rollout_absent': "
        "pip install 'rollout-service[gateway,worker]'"
    )


def test_the_help_of_each_command_has_an_example_that_it_understands():
    for path, command in commands(cli.main):
        if path.split()[-1] in ("status", "list", "show", "inspect", "top", "watch"):
            assert "--json" in [option for param in command.params for option in param.opts], path
        (example,) = re.findall(r"Example:  (rollout .*)", command.epilog or f"no example: {path}")
        words = shlex.split(example)[1:]
        arguments = words[len(path.split()) - 1 :]
        assert example.startswith(path)
        if isinstance(command, click.Group) and not arguments[0].startswith("-"):
            command = command.get_command(click.Context(command), arguments.pop(0))
        # What the files are named that it reads is not looked at.
        command.make_context(example, arguments, resilient_parsing=True)
        shown = CliRunner().invoke(cli.main, [*path.split()[1:], "--help"], terminal_width=80)
        assert example in shown.stdout, shown.output
    for name in cli.main.list_commands(click.Context(cli.main)):
        shown = CliRunner().invoke(cli.main, [name, "--help"], terminal_width=80)
        assert f"Example:  rollout {name}" in shown.stdout, shown.output


@pytest.mark.parametrize("group", ["backends", "batches", "handlers", "policy"])
def test_a_group_takes_the_options_of_what_it_does_without_a_command(group, monkeypatch):
    monkeypatch.setattr("rollout.http.DEFAULT_URL", f"http://127.0.0.1:{free_port()}")
    with FakeGateway() as gateway:
        done = CliRunner().invoke(cli.main, [group, "--json", "--url", gateway.url])
    assert [path for _, path in gateway.calls] == [f"/v1/{group}"], done.output
    shown = CliRunner().invoke(cli.main, [group, "--help"])
    assert f"Usage: main {group} [OPTIONS] [COMMAND]" in shown.stdout, "of the group, not of its list"


def test_who_does_not_know_how_many_rollouts_come_says_nothing_of_their_number():
    for total, told in ((None, ""), (2, "waits for 2 rollouts\n")):
        lines = io.StringIO()
        Meter(total, Console(file=lines))
        assert lines.getvalue() == told


@pytest.mark.parametrize("arguments", [("show", "a"), ("backends",), ("policy",)])
def test_without_a_service_it_says_so_within_three_seconds(arguments, monkeypatch, tmp_path):
    """Timed in this process: to start Python takes what it takes."""
    nobody = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("rollout.http.DEFAULT_URL", nobody)
    monkeypatch.setattr("rollout.account.CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLOUT_URL", raising=False)
    with in_time(3.0, 20.0):  # to wait as one who submits takes 27 s
        done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 1
    assert f"{nobody}: no service of this account was found" in done.stderr
    assert "Is the gateway up? `rollout up` starts one" in done.stderr


USED = "import rollout, rollout.client, rollout.cli; rollout.cli.main(['--help'], standalone_mode=False)"
SERVICE = {"flask", "celery", "kombu", "redis", "torch", "transformers", "services", "workers", "sandbox"}
ADAPTERS = "from rollout.adapters import areal, nemo_gym, prime_rl, skyrl, slime, trl, verl"
TRAINERS = {"verl", "skyrl", "slime", "trl", "areal", "verifiers", "torch", "numpy"}


@pytest.mark.parametrize(
    ("code", "absent"), [(USED, SERVICE | {"pyarrow", "datasets", "yaml"}), (ADAPTERS, TRAINERS)]
)
def test_what_a_trainer_imports_loads_nothing_heavy(code, absent):
    code += f"; import sys; print('loaded:', {absent} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded: set()" in done.stdout
