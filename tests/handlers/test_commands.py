"""`rollout handlers new` writes what works, and `rollout run --local` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from rollout.cli import main
from tests.helpers.blocking import SyncHostClient
from tests.helpers.stack import wait_until
from workers.handlers import skeleton


def rollout(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def written(tmp_path) -> Path:
    result = rollout("handlers", "new", "tidy_up", "--directory", tmp_path)
    assert result.exit_code == 0, result.output
    return tmp_path


def test_the_skeletons_own_test_passes(written):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(written)]
    done = subprocess.run(command, cwd=written, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_the_skeleton_keeps_to_the_rules_of_style(written):
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "100", "."]
    done = subprocess.run(command, cwd=written, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout


def test_a_handler_in_a_file_runs_here_with_a_list_of_actions(written):
    ended = written / "ended.jsonl"
    result = rollout(
        *(
            "run",
            f"{written}/tidy_up_handler.py:TidyUp",
            "--task",
            written / "tidy_up_tasks.jsonl",
            "--local",
        ),
        *("--actions", written / "tidy_up_actions.jsonl", "--n", "2", "-o", ended),
    )
    assert result.exit_code == 0, result.output
    assert "execute_bash touch done.txt" in result.output and "reward/mean" in result.output
    records = [json.loads(line) for line in ended.read_text().splitlines()]
    assert [(record["state"], record["reward"]) for record in records] == [("completed", 1.0)] * 2


def sleeps(marker: str) -> bool:
    return any(process.info["cmdline"] == ["sleep", marker] for process in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_releases_the_sandbox_of_a_local_run(written, number):
    marker, actions = f"3605.{os.getpid()}", written / "sleeps.jsonl"
    call = {"name": "execute_bash", "arguments": {"command": f"sleep {marker}"}}
    actions.write_text(json.dumps({"tool_calls": [call]}) + "\n")
    command = [sys.executable, "-m", "rollout.cli", "run", f"{written}/tidy_up_handler.py:TidyUp", "--local"]
    command += ["--task", str(written / "tidy_up_tasks.jsonl"), "--actions", str(actions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_until(lambda: sleeps(marker), 120, "the command in the sandbox")
        process.send_signal(number)
        assert process.wait(60) != 0
    assert not sleeps(marker) and SyncHostClient().list() == []


def test_a_failed_rollout_is_the_commands_exit_code(written):
    (written / "bad.jsonl").write_text('{"instruction": "x", "check": "true", "setup": 5}\n')
    result = rollout(
        *("run", f"{written}/tidy_up_handler.py:TidyUp", "--task", written / "bad.jsonl", "--local"),
        *("--actions", written / "tidy_up_actions.jsonl"),
    )
    assert result.exit_code == 1 and "task.setup" in result.output


@pytest.mark.parametrize("name", ["Tidy", "1x", "a-b", "", "class", "x" * 41])
def test_a_name_that_no_module_can_have_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="lower-case"):
        skeleton.write(name, tmp_path)


def test_nothing_is_overwritten(written):
    handler = written / "tidy_up_handler.py"
    handler.write_text("mine")
    (written / "tidy_up_tasks.jsonl").unlink()
    result = rollout("handlers", "new", "tidy_up", "--directory", written)
    assert result.exit_code == 1 and "is there already" in result.output
    assert handler.read_text() == "mine" and not (written / "tidy_up_tasks.jsonl").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["calculator", "--local"], "needs a model: --backend"),
        (["no_such", "--local"], "has no handler 'no_such'"),
        (["no.such:Thing", "--local"], "No module named 'no'"),
        (["gone.py:Thing", "--local"], "there is no file gone.py"),
        (["workers.handlers.noop:Nap", "--local"], "has no attribute 'Nap'"),
        (["calculator", "--actions", __file__], "go with --local"),
        (["calculator", "--local", "--backend", "http://127.0.0.1:9"], "does not answer as an LLM server"),
    ],
)
def test_what_cannot_run_is_said_in_a_line(tmp_path, args, words):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1 plus 1", "answer": "2"}\n')
    result = rollout("run", *args, "--task", tasks)
    assert result.exit_code in (1, 2) and words in result.output
