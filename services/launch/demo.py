"""`rollout demo`: real rollouts of the demo model on a stack of their own, shown; a page of one is left."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from rollout.cli import render as _render
from rollout.client import Client
from rollout.schema import RolloutRequest, State
from services.launch import StackError, paths
from services.launch.local import Options, Stack
from services.launch.supervisor import marked

TASKS_FILE = paths.REPO / "examples" / "demo_model" / "task.py"
TASK_SEED = 7
TIMEOUT_S = 600.0
"""For all rollouts together; a machine that needs longer has something wrong with it."""
PAGE = "demo.html"
"""The file below ROLLOUT_HOME that stays of a demo: the page of the rollout that it showed."""


def demo(n: int, sandbox_runtime: str | None, console: Console, say: Callable[[str], None]) -> bool:
    """Start a stack, run `n` rollouts, show them, save the page of one, end the stack.

    Returns:
        Whether every rollout ended as it should and nothing is left running.

    Raises:
        StackError: The stack did not start, or not end.
        RolloutError: The gateway refused, or the rollouts took longer than `TIMEOUT_S`.
    """
    requests = [RolloutRequest(handler="calculator", task=task) for task in load_tasks(TASKS_FILE, n)]
    # Below /tmp: private to this run, so that it runs beside a stack in use.
    directory = Path(tempfile.mkdtemp(prefix="rollout-demo-"))
    stack = Stack(directory, say)
    fine = keep_logs = False
    try:
        record = stack.up(
            Options(directory, private_ports=True, require_sandbox=True, sandbox_runtime=sandbox_runtime)
        )
        try:
            say(f"{n} rollouts of the handler calculator, each with a sandbox of its own")
            fine = _run(record.url, stack.api_key, requests, console)
            say("ending the stack, which was the demo's own")
        finally:
            try:
                ended = stack.down()
            except KeyboardInterrupt:  # just before it takes no signal any more
                ended = stack.down()
                raise
        strays = list(marked(record.mark))
        say(f"ended {len(ended.parts) if ended else 0} processes; {len(strays) or 'nothing'} left running")
        fine = fine and not strays
        keep_logs = not fine
        if fine:
            say(f"\nThe rollout above, token by token, for any browser: {_from_here(paths.home() / PAGE)}")
            say(_next_steps())
    except Exception:
        keep_logs = True
        raise
    finally:  # after Ctrl-C too
        if keep_logs:
            say(f"logs are kept in {directory / 'logs'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return fine


def _next_steps() -> str:
    """What one does after a demo, to be pasted where it was started."""
    rollout = _from_here(Path(sys.executable).with_name("rollout"))
    return (
        "\nNext:\n"
        f"  {rollout} up       start the service, and leave it running\n"
        f"  {rollout} status   see what runs, where, and what to do with it\n"
        f"  {rollout} down     end it\n"
        "README.md goes on from there: tasks from the shell, and from a trainer"
    )


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _run(url: str, key: str, requests: list[RolloutRequest], console: Console) -> bool:
    with Client(url, api_key=key) as client:
        begun = time.monotonic()
        results = client.run(requests, TIMEOUT_S, progress=True)
        seconds = time.monotonic() - begun
        # One worth reading: with reward 1 and a tool call if there is such a one.
        best = max(
            results, key=lambda item: (item.reward or 0.0, item.trajectory.turns if item.trajectory else 0)
        )
        paths.home().mkdir(parents=True, exist_ok=True)
        whole = paths.home() / f"{PAGE}.{os.getpid()}"
        whole.write_bytes(client.page(best.id))
        whole.replace(paths.home() / PAGE)  # at once: demos run side by side
    console.print(_render.rollout_view(best))
    console.print(_render.summary_table(results, seconds))
    bad = [item for item in results if item.state is not State.COMPLETED or item.drop]
    for item in bad[:5]:
        reason = item.error.message if item.error else item.drop_reason
        console.print(f"[red]{item.id} {item.state.value}: {reason}[/]", soft_wrap=True)
    return not bad


def load_tasks(path: Path, n: int) -> list[dict]:
    """`n` tasks of the module at `path`, which is loaded by its file: examples are no package.

    Raises:
        StackError: The file is not there.
    """
    if not path.is_file():
        raise StackError(f"{path} is missing: `rollout demo` needs a checkout of the project")
    return runpy.run_path(str(path))["make_tasks"](n, TASK_SEED)
