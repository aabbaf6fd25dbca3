"""The agent's tools: what the model is told of them, and what they answer, with a real sandbox."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient
from tests.helpers.sandboxes import require_apptainer
from workers.agent.tools import (
    ExecuteBash,
    ExecuteIPythonCell,
    Finish,
    Observation,
    StrReplaceEditor,
    Think,
    Tool,
    ToolContext,
    by_name,
)

ALL = (ExecuteBash(), ExecuteIPythonCell(), StrReplaceEditor(), Think(), Finish())
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def socket():
    """Of a sandbox for all tests here."""
    require_apptainer()
    state = Path(tempfile.mkdtemp(prefix="sbxt-", dir="/tmp"))  # short, because socket paths are limited
    yield asyncio.run(HostClient(state).start(SandboxSpec())).socket
    SyncHostClient(state).stop()
    shutil.rmtree(state, ignore_errors=True)


def call(socket: str, *calls: tuple[str, dict], timeout_s: float = PATIENCE_S) -> list[str]:
    async def run():
        async with SandboxClient(socket) as sandbox:
            context = ToolContext(sandbox=sandbox, timeout_s=timeout_s)
            return [(await by_name(ALL)[name](arguments, context)).text for name, arguments in calls]

    return asyncio.run(run())


def answer(tool: Tool, arguments: dict) -> Observation:
    return asyncio.run(tool(arguments, ToolContext(sandbox=None, timeout_s=1.0)))


def test_names_and_parameters_are_those_of_published_agents():
    specs = {tool.name: tool.spec()["function"]["parameters"] for tool in ALL}
    assert list(specs) == ["execute_bash", "execute_ipython_cell", "str_replace_editor", "think", "finish"]
    assert specs["execute_ipython_cell"]["required"] == ["code"]
    assert specs["str_replace_editor"]["required"] == ["command", "path"]
    assert list(specs["str_replace_editor"]["properties"]) == [
        "command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range",
    ]  # fmt: skip
    commands = specs["str_replace_editor"]["properties"]["command"]["enum"]
    assert commands == ["view", "create", "str_replace", "insert", "undo_edit"]
    assert specs["think"]["required"] == ["thought"]
    assert list(specs["finish"]["properties"]) == ["message"]


def test_aliases_are_understood_and_never_beat_a_main_name():
    class Bash(Tool):
        name = "bash"
        description = "Another one."

        async def call(self, args, ctx):
            return Observation("other")

    tools = by_name(ALL)
    assert tools["bash"] is tools["execute_bash"]
    assert tools["submit"] is tools["finish"]
    shell = Bash()
    assert by_name([*ALL, shell])["bash"] is shell
    with pytest.raises(ValueError, match="two tools are named 'think'"):
        by_name([*ALL, Think()])


def test_think_goes_on_and_finish_ends():
    assert not answer(Think(), {"thought": "hm"}).finished
    assert answer(Finish(), {"message": "done"}) == Observation("done", finished=True)
    assert answer(Finish(), {}).finished


def test_arguments_that_do_not_fit_are_answered():
    assert "code: Field required" in answer(ExecuteIPythonCell(), {}).text
    assert "'view'" in answer(StrReplaceEditor(), {"command": "delete", "path": "/x"}).text
    assert (
        "view_range" in answer(StrReplaceEditor(), {"command": "view", "path": "/x", "view_range": [1]}).text
    )
    assert "thoughts" in answer(Think(), {"thoughts": "x", "thought": "y"}).text


@pytest.mark.parametrize("tool", [ExecuteIPythonCell(), StrReplaceEditor()], ids=lambda tool: tool.name)
def test_without_a_sandbox_the_handlers_mistake_is_named(tool):
    arguments = {"code": "1"} if tool.name == "execute_ipython_cell" else {"command": "view", "path": "/"}
    with pytest.raises(RuntimeError, match="uses_sandbox = True"):
        answer(tool, arguments)


@pytest.mark.apptainer
def test_cells_share_names_and_say_when_they_are_gone(socket):
    cell = "execute_ipython_cell"
    assert call(socket, (cell, {"code": "x = 6"}), (cell, {"code": "print(x)\nx * 7"})) == [
        "[no output]",
        "6\n42",
    ]
    (died,) = call(socket, (cell, {"code": "import os\nprint('bye')\nos._exit(1)"}))
    assert died == "bye\n[the kernel died and was restarted: all names and imports are gone]"
    assert "NameError" in call(socket, (cell, {"code": "x"}))[0]


@pytest.mark.apptainer
def test_a_cell_that_runs_too_long_says_so(socket):
    call(socket, ("execute_ipython_cell", {"code": "1"}))
    code = "print('on')\nimport time\ntime.sleep(600)"
    (text,) = call(socket, ("execute_ipython_cell", {"code": code}), timeout_s=3)
    assert text.startswith("on\n")
    assert text.endswith("[timed out after 3 s and was interrupted]")


@pytest.mark.apptainer
def test_the_editor_works_on_what_the_other_tools_see(socket):
    edit = "str_replace_editor"
    texts = call(
        socket,
        (edit, {"command": "create", "path": "/workspace/m.py", "file_text": "VALUE = 1\n"}),
        (edit, {"command": "str_replace", "path": "/workspace/m.py", "old_str": "1", "new_str": "2"}),
        ("execute_ipython_cell", {"code": "import m\nm.VALUE"}),
        ("bash", {"command": "cat m.py"}),
        (edit, {"command": "insert", "path": "/workspace/m.py", "insert_line": 1, "new_str": "MORE = 3"}),
        (edit, {"command": "view", "path": "/workspace/m.py", "view_range": [2, -1]}),
        (edit, {"command": "undo_edit", "path": "/workspace/m.py"}),
        (edit, {"command": "view", "path": "m.py"}),
    )
    assert texts[0] == "Created /workspace/m.py with 1 line."
    assert texts[2:4] == ["2", "VALUE = 2"]
    assert texts[5] == "     2\tMORE = 3"
    assert texts[7].startswith("Error: the path 'm.py' is not absolute; maybe you mean /workspace/m.py")
