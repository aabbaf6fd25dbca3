"""`rollout handlers new NAME`: a handler that works, its test, a task and the actions of a scripted agent."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")

_HANDLER = Template('''"""The handler `$name`. docs/handlers.md of rollout-service says what it may do."""

from pydantic import BaseModel, Field
from rollout.trajectory import Message
from workers.agent.tools import ExecuteBash, Finish
from workers.handlers import AgentHandler, EvalContext, InitContext, Reward

PROMPT = """You work in a Linux sandbox, in the directory /workspace.
Task: {instruction}
Use the tool execute_bash, then call finish."""


class ${cls}Task(BaseModel):
    """One row of the dataset; a task that does not fit is refused at submission, with the field's name."""

    instruction: str = Field(min_length=1)
    setup: str = "true"
    """Command that prepares the sandbox."""
    check: str
    """Command that decides, after the agent is through: exit code 0 = solved. It sees the workspace alone."""


class $cls(AgentHandler[${cls}Task]):
    """Do something in a shell; a command of the task decides whether it was done."""

    name = "$name"
    Task = ${cls}Task
    tools = (ExecuteBash(), Finish())
    uses_sandbox = True

    async def init(self, ctx: InitContext[${cls}Task]) -> None:
        await super().init(ctx)  # boots the sandbox
        await ctx.sandbox.bash(ctx.task.setup, timeout=60)

    def prompt(self, task: ${cls}Task) -> list[Message]:
        return [Message(role="user", content=PROMPT.format(instruction=task.instruction))]

    async def evaluate(self, ctx: EvalContext[${cls}Task]) -> Reward:
        # Not in the agent's shell, where `test` may be its own function, nor in its sandbox, whose programs
        # it may have replaced: in a fresh one with a copy of the workspace, and with no shell of the agent's.
        async with ctx.sandboxes.fresh(ctx, image=self.image, workspace_of=ctx.sandbox) as box:
            result = await box.exec(["bash", "-c", ctx.task.check], timeout=60)
        return Reward(float(result.exit_code == 0))
''')

_TEST = Template('''"""The handler `$name` in real sandboxes, with fixed lists of turns for a model."""

import json
from pathlib import Path

from rollout import State
from workers.agent.replay import Action, Call, read_actions
from workers.testing import play

from ${module} import $cls

HERE = Path(__file__).parent
TASK = json.loads((HERE / "${name}_tasks.jsonl").read_text().splitlines()[0])


def test_an_agent_that_solves_the_task_is_rewarded():
    (done,) = play($cls(), TASK, read_actions(HERE / "${name}_actions.jsonl"))
    assert (done.state, done.reward) == (State.COMPLETED, 1.0)


def test_an_agent_that_tampers_with_its_shell_is_not():
    lie = "test() { return 0; }; alias test=true; trap 'exit 0' EXIT; cp /bin/true /usr/local/bin/test"
    (done,) = play($cls(), TASK, [Action(tool_calls=[Call(name="execute_bash", arguments={"command": lie})])])
    assert (done.state, done.reward) == (State.COMPLETED, 0.0)


def test_an_agent_that_does_nothing_is_not():
    (done,) = play($cls(), TASK, [Action(content="I would rather not.")])
    assert (done.state, done.reward) == (State.COMPLETED, 0.0)
''')

_TASKS = '{"instruction": "Create the file done.txt.", "check": "test -f done.txt"}\n'

_ACTIONS = (
    '{"tool_calls": [{"name": "execute_bash", "arguments": {"command": "touch done.txt"}}]}\n'
    '{"tool_calls": [{"name": "finish", "arguments": {"message": "It is there."}}]}\n'
)


def write(name: str, directory: Path) -> list[Path]:
    """Write the four files.

    Raises:
        ValueError: The name cannot be a module's.
        FileExistsError: One of the files is there; nothing is written.
    """
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r}: a name has 1 to 40 lower-case letters, digits and _, starts with a letter and is no "
            "word of Python"
        )
    module = f"{name}_handler"
    cls = "".join(part.capitalize() for part in name.split("_"))
    words = {"name": name, "cls": cls, "module": module}
    files = {
        directory / f"{module}.py": _HANDLER.substitute(words),
        directory / f"test_{module}.py": _TEST.substitute(words),
        directory / f"{name}_tasks.jsonl": _TASKS,
        directory / f"{name}_actions.jsonl": _ACTIONS,
    }
    if there := [path for path in files if path.exists()]:
        raise FileExistsError(f"{there[0]} is there already; choose another name or directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)
