"""The documentation's handler runs as it is written."""

from __future__ import annotations

import re

from rollout.schema import RolloutRequest, State
from tests.helpers.stack import ROOT, stop_all, wait_until

BLOCK = re.compile(r"<!-- tested: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


def test_the_handler_of_the_guide_runs_as_written(stack, client, tmp_path):
    """On a worker of its own, told of it by ROLLOUT_HANDLERS only."""
    ((name, code),) = BLOCK.findall((ROOT / "docs" / "handlers.md").read_text())
    assert len(code.strip().splitlines()) <= 35
    (tmp_path / name).write_text(code)
    env = {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "ROLLOUT_HANDLERS": "my_handlers:ShellTask",
        "ROLLOUT_NODE": "docsnode",
    }
    # RUN and EVAL of a rollout with a sandbox are its node's; INIT would be anybody's.
    stop_all(process for process in stack.processes if process.name == "init")
    worker = stack.start_worker("init,run,eval", "docs", env=env)
    try:
        wait_until(lambda: "shell_task" in {info.name for info in client.handlers()}, 120, "the handler")
        task = {"instruction": "1 plus 1", "setup": "touch done.txt", "check": "test -f done.txt"}
        request = {"handler": "shell_task", "limits": {"max_turns": 2}, "sampling": {"max_tokens": 64}}
        done = client.run(
            [
                RolloutRequest(task=task, **request),
                RolloutRequest(task={**task, "setup": "true"}, **request),
            ]
        )
    finally:
        worker.stop()
        stack.start_worker("init")
    assert [(item.state, item.reward) for item in done] == [
        (State.COMPLETED, 1.0),
        (State.COMPLETED, 0.0),
    ]
    assert {item.sandbox.node for item in done} == {"docsnode"}
