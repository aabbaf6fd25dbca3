"""`rollout harness check`: programs do a task on a stack of their own, their model a script."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollout.client import Client
from rollout.schema import Agent, Limits, Rollout, RolloutRequest
from services.launch import StackError, parts, paths
from services.launch.local import Options, Stack

ENGINE, TIMEOUT_S = "tests.helpers.agent_engine", 400.0
PLAN = """PLAN: ["expr 40000 + 2042 > a; cat a", "seq 1 20000", "18 * yes {n}. line of many quiet words that \
say nothing new | head -n 400", "cat a", "! it is 2"]"""


def check(names: Sequence[str], say: Callable[[str], None]) -> Iterator[tuple[str, ...]]:
    """What is to be told of each: calls, branches, retries, share delivered, drift, compactions, verdict.

    Raises:
        StackError: There is no checkout here, or the stack did not start.
        RolloutError: A rollout was refused, or took longer than `TIMEOUT_S`.
    """
    if not (paths.REPO / f"{ENGINE.replace('.', '/')}.py").is_file():
        raise StackError(f"the scripted engine is part of a checkout of the project; {paths.REPO} is none")
    with tempfile.TemporaryDirectory(prefix="rollout-check-") as directory:
        port, stack = parts.pick_port([], set()), Stack(Path(directory, "run"), say)
        with subprocess.Popen([sys.executable, "-m", ENGINE, str(port), directory], cwd=paths.REPO) as engine:
            url = f"http://127.0.0.1:{port}"
            more = {"private_ports": True, "flower": False, "require_sandbox": True}
            try:
                while engine.poll() is None and parts.answers(f"{url}/health"):
                    time.sleep(0.1)
                record = stack.up(Options(stack.dir, backend_url=url, **more))
                with Client(record.url, api_key=stack.api_key) as client:
                    for name in names:
                        told = {"task": {"question": PLAN, "answer": "2"}, "agent": Agent(harness=name)}
                        limits = Limits(max_turns=60, max_attempts=1)
                        request = RolloutRequest(handler="calculator", limits=limits, **told)
                        yield from map(_row, client.run([request], TIMEOUT_S))
            finally:
                stack.down()
                engine.terminate()


def _row(rollout: Rollout) -> tuple[str, ...]:
    if rollout.error or not rollout.trajectory or not (got := rollout.trajectory.receipt):
        return (*"––––––", rollout.error.message if rollout.error else rollout.state.value)
    compactions = sum(chain.role == "compaction" for chain in rollout.trajectory.chains)
    verdict = "ok" if rollout.reward == 1.0 else f"did not end its task: {rollout.finish_reason}"
    if rollout.finish_reason == "context_length" and not compactions:
        verdict = "ok, ends where the context is full"
    heard = [m for chain in rollout.trajectory.chains for s in chain.segments for m in s.messages]
    if not any("42042" in message.text for message in heard if message.role == "tool"):
        verdict = "its tools did nothing"
    verdict = "a prompt was another one than is recorded" if got.drift else verdict
    share = f"{got.share_delivered:.0%}"
    return (*map(str, (got.calls, got.branches, got.retries, share, got.drift, compactions)), verdict)
