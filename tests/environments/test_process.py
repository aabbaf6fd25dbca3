"""Foreign environments in their processes: whatever one does, a sample is dropped at the worst."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.schema import Limits, RolloutRequest, State
from rollout.trajectory import Message
from sandbox import processes
from tests.helpers.stack import ROOT, wait_until
from workers.agent.parsing import ParsedTurn
from workers.agent.replay import Action
from workers.handlers.environments import EnvironmentHandler, EnvironmentTask, process
from workers.handlers.environments.process import Foreign, ProcessEnvironment
from workers.inprocess import Actions, InProcess, demo_tokenizer
from workers.testing import play

ADAPTER = """
import os, socket, sys, time

class Episode:
    def __init__(self, ask):
        self.ask = ask

    def reset(self, task, seed):
        return {"messages": ["Act."], "tools": []}

    def step(self, text, calls):
        BODY
"""
GOOD = 'return {"messages": ["over"], "reward": 1.0, "done": True}'


@pytest.fixture
def hostile(tmp_path, toy_home, configured):
    """Plays one turn in an environment whose `step` has this body."""

    def play_in(body: str, said: str = "go", *, reusable=True, adapter=ADAPTER, n=1, step_s=60.0, **env: str):
        configured(home=str(toy_home), environment_memory_mb="512", **env)
        path = tmp_path / "adapter.py"
        path.write_text(adapter.replace("BODY", body.strip().replace("\n", "\n        ")))
        kind = Foreign("toy", path, reusable)

        class Toy(EnvironmentHandler[EnvironmentTask]):
            name = "toy"
            Task = EnvironmentTask

            async def make(self, ctx):
                return ProcessEnvironment(kind, ctx)

        limits = Limits(max_attempts=1, tool_timeout_s=step_s, max_turns=3)
        rollouts = play(Toy(), {}, [Action(content=said)] * 3, limits=limits, n=n)
        return rollouts[0] if n == 1 else rollouts

    return play_in


def pids() -> list[int]:
    return [pid for pid in processes.descendants(os.getpid()) if b"runner.py" in _words(pid)]


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def nothing_is_left(idle=True) -> bool:
    if idle:
        process.close_idle()
    deadline = time.monotonic() + 20
    while pids() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not pids()


def test_an_episode_is_played_and_its_process_serves_the_next(hostile):
    rollouts = hostile('return {"messages": [str(os.getppid())], "reward": 1.0, "done": True}', n=3)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 3
    assert len(pids()) == 2, "one process, and the first of its namespace"
    assert nothing_is_left()


def test_a_worker_that_ends_leaves_no_directory_of_a_process_that_waited(toy_home, tmp_path):
    """Each has a home of its own, in which packages write caches."""
    program = """
import asyncio, os, sys
from pathlib import Path
from workers.handlers.environments.process import Foreign, Runner
runner = Runner(Foreign("toy", Path(sys.argv[1]), True))
asyncio.run(runner.ready())
print(*os.listdir(os.environ["TMPDIR"]))
"""
    (tmp_path / "adapter.py").write_text(ADAPTER.replace("BODY", GOOD))
    homes = tmp_path / "homes"
    homes.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "adapter.py"],
        env=os.environ | {"TMPDIR": str(homes), "ROLLOUT_HOME": str(toy_home)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rollout-environment-toy-")
    assert [*homes.iterdir()] == []


def test_a_process_without_an_episode_is_ended_after_a_while(hostile, monkeypatch):
    monkeypatch.setattr(process, "IDLE_S", 0.0)
    assert hostile("time.sleep(0.1)\n" + GOOD, n=2)[1].reward == 1.0
    assert len(pids()) <= 2


WORKER = """
import asyncio, sys, time
from pathlib import Path
from types import SimpleNamespace
from rollout.schema import Limits
from workers.handlers.environments import EnvironmentTask
from workers.handlers.environments.process import Foreign, ProcessEnvironment

async def main():
    ctx = SimpleNamespace(limits=Limits())
    episode = ProcessEnvironment(Foreign("toy", Path(sys.argv[1])), ctx)
    await episode.reset(EnvironmentTask(), 1)
    print("begun", flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


def test_a_worker_that_is_killed_takes_its_environments_and_all_that_they_started_with_it(tmp_path, toy_home):
    path = tmp_path / "adapter.py"
    fork = "if not os.fork():\n            os.setsid()\n            time.sleep(1000)\n        return"
    path.write_text(ADAPTER.replace("return", fork, 1))
    env = os.environ | {"ROLLOUT_HOME": str(toy_home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as worker:
        assert worker.stdout.readline() == b"begun\n"
        started = processes.descendants(worker.pid)
        assert len(started) == 3, "ours, the first of the namespace, and its child"
        worker.kill()
    wait_until(lambda: not any(_words(pid) for pid in started), 20, "all have ended")


def test_a_kind_whose_processes_cannot_be_used_again_starts_one_for_each_rollout(hostile):
    assert hostile(GOOD, reusable=False).reward == 1.0
    assert nothing_is_left(idle=False)


def test_a_turn_that_the_time_limit_cuts_off_is_not_taken_for_the_score(configured, toy_home, tmp_path):
    configured(home=str(toy_home), environment_memory_mb="512")
    path = tmp_path / "adapter.py"
    slow = 'time.sleep(0.5)\n        return {"messages": [], "reward": 1.0, "done": True}'
    score = "\n    def score(self, messages):\n        return {'reward': 0.25}\n"
    path.write_text(ADAPTER.replace("BODY", slow) + score)

    async def cut_off() -> float | None:
        episode = ProcessEnvironment(Foreign("toy", path), SimpleNamespace(limits=Limits()))
        try:
            await episode.reset(EnvironmentTask(), 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await episode.step(ParsedTurn(Message(role="assistant", content="go"), []))
            return await episode.score(SimpleNamespace(messages=[]))
        finally:
            await episode.close()

    assert asyncio.run(cut_off()) == 0.25


LIES = {
    "a reward that is not finite": 'return {"messages": [], "reward": float("nan"), "done": True}',
    "no reward": 'return {"messages": [], "done": True}',
    "a reward that is a list": 'return {"messages": [], "reward": [1], "done": True}',
    "no dict": "return 7",
    "no messages": 'return {"messages": 7, "reward": 1.0, "done": True}',
    "messages without a role": 'return {"messages": [{"x": 1}], "reward": 1.0, "done": True}',
    "what JSON cannot carry": 'return {"messages": [object()]}',
    "an exception": 'raise KeyError("oops")',
    "an exception with half a surrogate": 'raise KeyError("\\ud800")',
    "an exit": "sys.exit(0)",
    "an answer of 100 MB": 'return {"messages": ["x" * 100_000_000], "reward": 1.0, "done": True}',
    "an answer of 20 MB": 'return {"messages": ["x" * 20_000_000], "reward": 1.0, "done": True}',
    "a deep answer": 'x = []\nfor _ in range(500): x = [x]\nreturn {"messages": x, "done": True}',
    "an end that is no truth": 'return {"messages": ["a"], "reward": 1.0, "done": "yes"}',
}


@pytest.mark.parametrize("body", LIES.values(), ids=LIES)
def test_what_is_no_answer_drops_the_sample_as_the_tasks_fault(hostile, body):
    rollout = hostile(body)
    assert (rollout.state, rollout.reward, rollout.error.blame) == (State.FAILED, None, "task")
    assert rollout.error.type == "EnvironmentFault"


LOST = {
    "it hangs": "time.sleep(100)",
    "it hangs in a child": "os.fork() or time.sleep(100)\nos.waitpid(-1, 0)",
    "it leaves": "os._exit(3)",
    "it crashes": "import ctypes; ctypes.string_at(0)",
    "it eats memory": 'x = "x" * 1_000_000_000\nreturn {"messages": [x], "reward": 1.0, "done": True}',
    "it closes all that is open": "os.closerange(0, 100)\ntime.sleep(100)",
}


@pytest.mark.parametrize("body", LOST.values(), ids=LOST)
def test_a_process_that_is_lost_is_killed_with_its_children_and_the_failure_may_be_tried_again(hostile, body):
    begun = time.monotonic()
    rollout = hostile(body, step_s=2.0)
    assert (rollout.state, rollout.reward, rollout.error.blame) == (State.FAILED, None, "infrastructure")
    assert time.monotonic() - begun < 60
    assert nothing_is_left()


def test_children_that_leave_the_group_end_with_the_process(hostile):
    body = "for _ in range(5):\n    if not os.fork():\n        os.setsid()\n        time.sleep(1000)\n" + GOOD
    assert hostile(body, reusable=False).reward == 1.0
    assert nothing_is_left()


def test_a_cancelled_rollout_ends_its_process(tmp_path, toy_home, configured):
    configured(home=str(toy_home))
    path = tmp_path / "adapter.py"
    mark = tmp_path / "stepped"
    path.write_text(ADAPTER.replace("BODY", f"open({str(mark)!r}, 'w')\n        time.sleep(100)"))

    class Toy(EnvironmentHandler[EnvironmentTask]):
        name = "toy"
        Task = EnvironmentTask

        async def make(self, ctx):
            return ProcessEnvironment(Foreign("toy", path), ctx)

    async def cancelled():
        runner = InProcess(Toy(), Actions([Action(content="go")], demo_tokenizer()))
        task = asyncio.create_task(runner.run(RolloutRequest(handler="toy", task={})))
        while not mark.exists():
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    assert nothing_is_left(idle=False)


def test_what_it_prints_goes_to_the_log_and_not_into_the_protocol(hostile, monkeypatch):
    lines: list[str] = []
    told = SimpleNamespace(info=lambda event, **fields: lines.append(fields["output"]), warning=print)
    monkeypatch.setattr("workers.scoring.process.log", told)
    body = 'print("a word of mine"); os.write(1, b"x" * 100_000); sys.stderr.write("and a moan")\n' + GOOD
    assert hostile(body).reward == 1.0
    wait_until(lambda: "a word of mine" in "".join(lines), 10, "what it printed, which a thread reads")


def test_a_forked_child_cannot_answer_in_the_name_of_the_episode(hostile):
    body = 'if not os.fork():\n    return {"messages": [], "reward": 666.0, "done": True}\nos.wait()\n' + GOOD
    assert hostile(body, reusable=False).reward == 1.0


def test_it_sees_no_network_no_other_process_and_no_secret(hostile, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "sesame")
    body = """
seen = sorted(name for name in os.listdir("/proc") if name.isdigit())
try:
    socket.create_connection(("127.0.0.1", 1), timeout=1)
except OSError as error:
    network = error.errno
told = [len(seen), network, "MY_PASSWORD" in os.environ, os.environ["HOME"] == os.getcwd(), os.getpid()]
return {"messages": [" ".join(map(str, told))], "reward": 1.0, "done": True}
"""
    rollout = hostile(body)
    seen, network, secret, own_home, pid = rollout.trajectory.messages[-1].text.split()
    assert (seen, secret, own_home, pid) == ("1", "False", "True", "1")
    assert int(network) in (99, 100, 101), "no address, or no network at all"


def test_it_has_a_temporary_directory_that_goes_with_it(hostile):
    body = 'open("mark", "w").write("x")\nreturn {"messages": [os.getcwd()], "reward": 1.0, "done": True}'
    rollout = hostile(body, reusable=False)
    assert not Path(rollout.trajectory.messages[-1].text).exists()


def test_the_same_seed_is_the_same_world_in_another_process(hostile):
    body = 'return {"messages": [str(list({"a", "b", "c", "d"}))], "reward": 1.0, "done": True}'
    worlds = {hostile(body, reusable=False).trajectory.messages[-1].text for _ in range(3)}
    assert len(worlds) == 1


def test_a_package_that_cannot_be_imported_and_one_that_is_not_installed_say_what_to_do(
    hostile, configured, tmp_path
):
    rollout = hostile(GOOD, adapter="import a_package_that_is_not_there\n" + ADAPTER)
    assert rollout.error.blame == "handler"
    assert "rollout environments install toy" in rollout.error.message
    assert "a_package_that_is_not_there" in rollout.error.message
    configured(home=str(tmp_path))
    with pytest.raises(Exception, match="rollout environments install toy"):
        Foreign("toy", tmp_path).python  # noqa: B018


def test_who_is_asked_without_a_simulator_is_the_deployments_fault(hostile):
    rollout = hostile('return {"messages": [self.ask({"messages": []})], "reward": 1.0, "done": True}')
    assert rollout.error.blame == "handler" and "ROLLOUT_SIMULATOR_URL" in rollout.error.message
