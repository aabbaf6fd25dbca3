"""What the model reads of `execute_bash`, in a real sandbox."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from sandbox.client import BashResult, SandboxClient
from tests.sandbox.conftest import sandbox_on
from workers.agent.tools import ExecuteBash, ToolContext
from workers.agent.tools.bash import describe


class Impatient(ExecuteBash):
    """The tool, with a silence that tests can wait for."""

    quiet_timeout_s = 2.0


info = sandbox_on("apptainer")


@pytest.fixture
def ask(info):
    """Calls of the tool, one after the other, as a model makes them; answers the observations."""

    def carry_out(*calls, timeout_s=120.0, tool=None):
        tool = tool or ExecuteBash()

        async def run():
            async with SandboxClient(info.socket) as sandbox:
                await sandbox.reset()
                context = ToolContext(sandbox=sandbox, timeout_s=timeout_s)
                calls_made = [call if isinstance(call, dict) else {"command": call} for call in calls]
                return [(await tool(arguments, context)).text for arguments in calls_made]

        return asyncio.run(run())

    return carry_out


def typed(text, **more):
    return {"command": text, "is_input": "true", **more}


def test_of_a_plain_command_the_model_reads_the_bare_output(ask):
    assert ask("echo $((37*85))", "printf 'a\\n\\nb\\n\\n'", "true") == ["3145", "a\n\nb", "[no output]"]


def test_a_failure_and_a_change_of_directory_are_noted(ask):
    assert ask("echo a; (exit 3)", "cd /usr", "pwd", "cd -; false") == [
        "a\n[exit code 3]",
        "[now in /usr]",
        "/usr",
        "/workspace\n[exit code 1]\n[now in /workspace]",
    ]


def test_a_question_is_answered_with_is_input(ask):
    texts = ask(
        "read -p 'name? ' -r x; echo hello $x",
        "echo other",
        typed("you"),
        typed("more"),
        {"command": "cat", "is_input": False},
        typed("C-d"),
    )
    assert texts[0] == "name? \n[waiting for input: send it with is_input, or C-c to interrupt]"
    assert texts[1].startswith("Error: execute_bash: the previous command is still running")
    assert texts[2] == "hello you"
    assert texts[3].startswith("Error: execute_bash: no command is running")
    assert texts[4] == "[waiting for input: send it with is_input, or C-c to interrupt]"
    assert texts[5] == "[no output]"


def test_a_silent_command_is_left_running_and_can_be_interrupted(ask):
    texts = ask("echo begun; sleep 1000", typed(""), typed("C-c"), "echo next", tool=Impatient())
    hint = "wait with is_input and an empty command, send it input, or C-c to interrupt]"
    assert texts[0] == f"begun\n[still running, without output for 2 s: {hint}"
    assert texts[1] == f"[still running, without output for 2 s: {hint}"
    assert texts[2] == "[exit code 130]"
    assert texts[3] == "next"


@pytest.mark.parametrize(("asked", "granted"), [(0.4, 100.0), (5000, 0.4)])
def test_a_timeout_of_the_model_holds_within_what_the_rollout_grants(ask, asked, granted):
    texts = ask({"command": "sleep 1000", "timeout": asked}, timeout_s=granted)
    assert texts[0].startswith("[still running after 0.4 s: ")


def test_a_timeout_of_the_model_makes_the_tool_wait_through_silence(ask):
    texts = ask({"command": "sleep 3; echo end", "timeout": 100}, tool=Impatient())
    assert texts == ["end"]


def test_reset_gives_a_fresh_shell_and_may_run_a_command(ask):
    texts = ask(
        "X=1; cd /usr; cat",
        {"command": "", "reset": True},
        "X=2",
        {"command": "echo ${X-unset}", "reset": "true"},
    )
    notice = "[the shell ended and was restarted: its state is gone]"
    assert texts[1] == f"{notice}\n[now in /workspace]"
    assert texts[3] == f"{notice}\nunset"


def test_the_end_of_the_shell_is_noted(ask):
    assert ask("X=1; exit 4", "echo ${X-unset}") == [
        "[exit code 4]\n[the shell ended and was restarted: its state is gone]",
        "unset",
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "out"),
        (
            {"late_output": "late\n", "late_exit_code": 7},
            "[printed in the background meanwhile]\nlate\n[this command]\n"
            "[the command before had ended with exit code 7]\nout",
        ),
        (
            {"limit_exceeded": "memory limit", "shell_restarted": True, "exit_code": 137},
            "out\n[memory limit]\n[exit code 137]\n[the shell ended and was restarted: its state is gone]",
        ),
        (
            {"suspended": True, "exit_code": 148},
            "out\n[stopped: `fg` continues it, `bg` does so in the background]",
        ),
        ({"input_sent": False}, "out\n[the command had ended before the input could be sent]"),
        ({"cwd": "/a\udcff", "previous_cwd": "/"}, "out\n[now in /a\ufffd]"),
    ],
)
def test_what_happened_besides_is_told_in_brackets(fields, text):
    result = BashResult("out\n", 0, "/", False, False, False, 0.1)
    assert describe(dataclasses.replace(result, **fields), 30, 10) == text


def test_what_the_shell_cannot_take_is_answered(ask):
    texts = ask(
        "echo \0", "echo \ud800", {"command": "x", "timeout": 0}, {"command": "x", "is_input": "maybe"}, {}
    )
    assert [text.split(":")[0] for text in texts] == ["Error"] * 5
    assert "NUL" in texts[0]
    assert "timeout" in texts[2]
    assert "is_input" in texts[3]
    assert "command" in texts[4]
