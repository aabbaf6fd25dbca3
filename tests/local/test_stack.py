"""`rollout up`, `down` and `demo` with real processes.

Stacks are slow to start, so two are shared: `first` with all parts, and `second`, in the directory of the
first after that has ended.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rollout import account
from rollout.client import Client
from rollout.schema import RolloutRequest, State
from services.launch import StackError, parts
from services.launch.local import Options, Stack
from services.launch.parts import pick_port
from services.launch.record import Record
from services.launch.supervisor import Part, marked
from tests.helpers.idle import in_time
from tests.helpers.stack import wait_until

pytestmark = pytest.mark.timeout(240)
ROLLOUT = [sys.executable, "-m", "rollout.cli"]


def rollout(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("ROLLOUT_REDIS_URL", "ROLLOUT_URL")}
    return subprocess.run(
        [*ROLLOUT, *args], capture_output=True, text=True, timeout=200, env={**clean, **(env or {})}
    )


def record(directory: Path) -> Record:
    found = Record.load(directory / "stack.json")
    assert found is not None
    return found


@pytest.fixture
def state(tmp_path):
    """A state directory whose stack, whatever becomes of the test, is ended."""
    directory = tmp_path / "run"
    yield directory
    rollout("down", "--state-dir", str(directory))


@dataclass
class Started:
    """A stack that `rollout up` has started."""

    state: Path
    said: str
    url: str
    usual: int
    """Port that the gateway was to have, and did not get."""
    compat: int

    @property
    def record(self) -> Record:
        return record(self.state)

    def part(self, name: str) -> Part:
        return next(part for part in self.record.parts if part.name == name)

    def kill(self, *names: str) -> None:
        """Kill these parts, and wait until each is there again."""
        victims = [self.part(name) for name in names]
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        for victim in victims:
            wait_until(lambda victim=victim: self.comes_back(victim), 60, f"{victim.name} to come back")

    def comes_back(self, before: Part) -> Part | None:
        now = self.part(before.name)
        return now if now.pid != before.pid and now.alive else None

    def down(self) -> str:
        down = rollout("down", "--state-dir", str(self.state))
        assert down.returncode == 0, down.stderr
        return down.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """All parts, where somebody has the gateway's usual port, and a port that needs no key."""
    state = tmp_path_factory.mktemp("stack") / "run"
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        usual, compat = holder.getsockname()[1], pick_port([], set())
        up = rollout(
            *("up", "--state-dir", str(state), "--slots-init", "2", "--slots-run", "4"),
            *("--compat-port", str(compat), "--compat-tenant", "trainer"),
            env={"ROLLOUT_GATEWAY_PORT": str(usual)},
        )
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        yield Started(state, up.stdout, record(state).url, usual, compat)
    finally:
        rollout("down", "--state-dir", str(state))


def test_up_serves_rollouts_and_nobody_gets_in_without_a_key(first):
    started, state = first.record, first.state
    for name in ("redis", "gateway", "fleets", "backend", "registered", "flower"):
        assert re.search(rf"^{name} +[\d.]+ s  ", first.said, re.MULTILINE), first.said
    assert "init 2, run 4, eval 16 slots" in first.said
    assert f"export ROLLOUT_URL={started.url} ROLLOUT_API_KEY=$(cat {state}/api.key)" in first.said
    assert f"port {first.usual} is taken: gateway gets" in first.said
    assert len(started.live) == len(started.parts) == 7
    # Without a key nobody is answered; client and command line of this account find it by themselves.
    assert httpx.get(f"{started.url}/v1/status").status_code == 401
    assert rollout("status").returncode == 0
    with Client() as client:
        assert client.base_url == started.url
    with Client(started.url) as client:
        assert client.ready()["ready"]
        assert [b.url for b in client.backends()] == [started.backend_url]
        done = client.run([RolloutRequest(handler="noop", n=8)], timeout=60)
        assert {r.state for r in done} == {State.COMPLETED}
        assert client.status()["flower"]["url"] == started.flower_url
    user = tuple(Path(started.flower_auth_file).read_text().strip().split(":"))
    assert httpx.get(f"{started.flower_url}/tasks", timeout=20).status_code == 401
    assert httpx.get(f"{started.flower_url}/tasks", auth=user, timeout=20).status_code == 200


def test_what_is_secret_is_in_files_of_its_owner_alone(first):
    started, state = first.record, first.state
    assert (state.stat().st_mode & 0o777) == 0o700
    for file in (state / "api.key", state / "stack.json", Path(started.flower_auth_file)):
        assert file.stat().st_mode & 0o777 == 0o600, file
    password = Path(started.flower_auth_file).read_text().strip().partition(":")[2]
    for part in started.parts:
        process = Path(f"/proc/{part.pid}")
        assert (state / "api.key").read_bytes()[:17] not in (process / "environ").read_bytes()
        assert password.encode() not in (process / "cmdline").read_bytes()


def test_a_port_without_keys_is_for_the_tenant_it_was_opened_for(first):
    assert f"NO KEY IS NEEDED AT 127.0.0.1:{first.compat}" in first.said
    assert (
        f"NO KEY IS NEEDED AT 127.0.0.1:{first.compat}" in (first.state / "logs" / "gateway.log").read_text()
    )
    shown = rollout("status", env={"COLUMNS": "160"}).stdout
    assert f"127.0.0.1:{first.compat}: whoever reaches it is" in shown
    with Client() as client:
        before = [item.id for item in client.list().rollouts]
        compat, job = (
            f"http://127.0.0.1:{first.compat}",
            {"instance": {"data_source": "noop", "task": {"reward": 1.0}}},
        )
        made = httpx.post(f"{compat}/process", json=job, timeout=60)
        assert made.status_code == 200 and made.json()["reward"] == 1.0
        assert httpx.get(f"{compat}/v1/status").status_code == 404
        listed = [item.id for item in client.list().rollouts]
        assert listed == before, "it is the tenant's and not the operator's"


def test_a_second_up_is_refused(first):
    again = rollout("up", "--state-dir", str(first.state))
    assert again.returncode == 1
    assert f"a stack runs already: gateway at {first.record.url}" in again.stderr
    assert len(first.record.live) == 7


@pytest.mark.timeout(900)
def test_each_part_that_is_killed_comes_back_and_rollouts_go_on(first):
    """The shell that ran `up` is gone: `subprocess.run` has waited for it."""
    before = first.record
    groups = (
        ("gateway", "init fleet", "flower"),
        ("run fleet", "backend"),
        ("redis",),
        ("eval fleet",),
    )
    names = sorted(name for group in groups for name in group)
    assert sorted(part.name for part in before.parts) == names
    with Client(before.url, retry_for=60) as client:
        kept = client.run([RolloutRequest(handler="noop")], timeout=60)[0].id
        for group in groups:
            first.kill(*group)
            task = {"question": "37 times 85", "answer": "3145"}
            requests = [RolloutRequest(handler="calculator", task=task), RolloutRequest(handler="noop", n=3)]
            done = client.run(requests, timeout=120)
            assert {item.state for item in done} == {State.COMPLETED}, group
        assert client.get(kept).state is State.COMPLETED, "Redis has loaded its file"
        told = client.status()["parts"]
    assert {name: part["restarts"] for name, part in told.items()} == dict.fromkeys(names, 1)
    shown = rollout("status", env={"ROLLOUT_URL": before.url, "COLUMNS": "200"})
    assert all(f"part {name}" in shown.stdout for name in names), shown.stdout
    assert "was started anew 1 times" in shown.stdout
    log = (first.state / "logs" / "supervisor.log").read_text()
    assert all(f"part={name!r}" in log or f"part={name}" in log for name in names)
    ticks = Path(f"/proc/{before.supervisor.pid}/stat").read_text().split()[13:15]
    assert sum(map(int, ticks)) < 2000, "ticks of a hundredth of a second: it must not be a busy loop"


def test_a_supervisor_that_was_killed_is_started_again_by_the_next_up(first):
    killed = first.record.supervisor
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: not killed.alive, 10, "the supervisor to be gone")
    again = rollout("up", "--state-dir", str(first.state))
    assert again.returncode == 1 and "looks after the stack again" in again.stdout
    first.kill("gateway")


def test_down_ends_exactly_what_up_has_started(first):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)", "celery", "gunicorn"])
    try:
        started = first.record
        shown = first.down()
        for part in started.parts:
            assert f"ended {part.name} (pid {part.pid})" in shown
        assert started.live == [] and not started.supervisor.alive
        assert list(marked(started.mark)) == []
        assert bystander.poll() is None
        assert not (first.state / "stack.json").exists(), "it holds the password of Redis"
        assert "nothing runs" in rollout("down", "--state-dir", str(first.state)).stdout
        assert account.services() == [], "what ended is not found any more"
    finally:
        bystander.kill()
        bystander.wait()


def again(first: Started, *options: str) -> Started:
    """Start the stack of that directory anew, without a model."""
    env = {
        "ROLLOUT_HANDLERS": "tests.helpers.handlers:all_handlers",
        "ROLLOUT_GATEWAY_PORT": str(first.usual),
    }
    small = ("up", "--state-dir", str(first.state), "--no-backend", "--no-flower", "--slots-init", "4")
    up = rollout(*small, *options, env=env)
    assert up.returncode == 0, up.stdout + up.stderr
    return Started(first.state, up.stdout, record(first.state).url, first.usual, 0)


@pytest.fixture(scope="module")
def second(first):
    """The next life of the first one; RUN has room for one rollout."""
    first.down()
    return again(first, "--slots-run", "1")


def test_a_port_that_was_not_the_usual_one_is_kept(first, second):
    assert second.url == first.url and "which it had before" in second.said


@pytest.mark.timeout(600)
def test_down_and_up_cost_a_rollout_with_a_sandbox_no_attempt(second):
    with Client(second.url, retry_for=60) as client:
        # RUN has room for one: the others wait with their sandboxes.
        ids = [one.id for one in client.submit([RolloutRequest(handler="in_tool", n=3)])]

        def waiting():
            return [one for one in map(client.get, ids) if one.state is State.READY]

        ready = wait_until(
            lambda: len(waiting()) == 2 and waiting(), 120, "two rollouts to wait with a sandbox"
        )
        assert "handed back 2 rollouts" in second.down()
        third = again(second, "--slots-run", "3")
        assert third.url == second.url
        running = lambda: all(client.get(one).state is State.RUNNING for one in ids)  # noqa: E731
        wait_until(running, 60, "all to run, each in a new sandbox")
        assert {client.get(one).attempt for one in ids} == {1}
        assert all(client.get(one.id).error is None for one in ready)
        for one in ids:
            client.cancel(one)


def test_what_was_killed_is_swept_by_the_next_up_whose_foreground_ends_all_at_ctrl_c(second):
    lost = second.record
    # The supervisor first, as when the machine goes: it would bring the others back.
    for part in [lost.supervisor, *lost.parts]:
        os.kill(part.pid, signal.SIGKILL)
    command = [*ROLLOUT, "up", "--foreground", "--no-backend", "--no-flower"]
    env = os.environ | {"ROLLOUT_GATEWAY_PORT": str(second.usual)}
    child = subprocess.Popen(
        [*command, "--state-dir", str(second.state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    for line in child.stdout:
        if line.startswith("export"):
            break
    assert list(marked(lost.mark)) == []
    started = second.record
    second.kill("run fleet")
    back = second.part("run fleet")
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    stdout, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "ended gateway" in stdout and f"ended run fleet (pid {back.pid})" in stdout
    assert started.live == [] and not back.alive and not started.supervisor.alive


def test_a_redis_that_does_not_start_shows_its_log(state, tmp_path):
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho no luck today\nexit 3\n")
    fake.chmod(0o755)
    up = rollout("up", "--state-dir", str(state), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert up.returncode == 1
    assert f"redis ended. The end of {state}/logs/redis.log:\nno luck today" in up.stderr
    assert not (state / "stack.json").exists()


def test_a_part_that_does_not_start_shows_its_log_and_ends_everything(state, monkeypatch):
    monkeypatch.delenv("ROLLOUT_REDIS_URL", raising=False)
    broken = Part("gateway", ["sh", "-c", "for i in $(seq 30); do echo line $i; done; sleep 1; exit 3"])
    monkeypatch.setattr(parts, "gateway", lambda: broken)
    said: list[str] = []
    stack = Stack(state, said.append)
    with pytest.raises(StackError) as caught:
        stack.up(Options(state, embedded_backend=False, private_ports=True))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"gateway ended. The end of {state}/logs/gateway.log:"
    assert lines[1:] == [f"line {i}" for i in range(11, 31)]
    assert len(stack.record.parts) == 6
    assert stack.record.live == []
    assert list(marked(stack.record.mark)) == []
    assert stack.down() is None


def test_ctrl_c_during_the_start_ends_everything(state):
    child = subprocess.Popen(
        [*ROLLOUT, "up", "--state-dir", str(state)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (state / "stack.json").exists() or len(record(state).parts) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started = record(state)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert "interrupted" in stderr
    assert started.live == []
    assert list(marked(started.mark)) == []


def test_an_unreachable_redis_of_the_caller_s_is_named(state):
    up = rollout("up", "--state-dir", str(state), env={"ROLLOUT_REDIS_URL": "redis://:pw@127.0.0.1:9/0"})
    assert up.returncode == 1
    assert "ROLLOUT_REDIS_URL=redis://***@127.0.0.1:9/0 does not answer" in up.stderr
    assert "pw" not in up.stderr


def test_options_that_cannot_be_are_refused(state):
    half = rollout("up", "--state-dir", str(state), "--compat-port", "1234")
    assert half.returncode == 2 and "--compat-tenant" in half.stderr
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        up = rollout("up", "--state-dir", str(state), "--port", str(port))
    assert up.returncode == 1
    assert f"--port {port} is taken" in up.stderr


def test_the_demo_shows_its_first_rollout_within_a_minute_and_leaves_nothing(tmp_path):
    child = subprocess.Popen(
        [*ROLLOUT, "demo", "--n", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "160"},
    )
    shown = ""
    with in_time(60.0, 180.0):
        while "→ execute_bash echo" not in shown and (line := child.stdout.readline()):
            shown += line
    shown += child.communicate(timeout=200)[0]
    assert child.returncode == 0, shown
    for text in (
        "→ execute_bash echo",
        "tokens sampled",
        "stage run (s)",
        "4 completed",
        "nothing left running",
    ):
        assert text in shown, (text, shown)
    assert re.search(r"gateway +http://127\.0\.0\.1:\d+\nflower +http://127\.0\.0\.1:\d+", shown)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_the_demo_leaves_nothing(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([*ROLLOUT, "demo"], stdout=subprocess.PIPE, text=True, env=env)
    for line in child.stdout:
        if line.startswith("flower"):
            break
    directory = next(tmp_path.glob("rollout-demo-*"))
    started = record(directory)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert started.live == []
    assert list(marked(started.mark)) == []
    assert not Path(started.sandbox_dir).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_read_as_it_was_written(tmp_path):
    written = Record(url="http://127.0.0.1:1", parts=[Part("redis", ["valkey-server"], pid=7, started=1.25)])
    written.save(tmp_path / "stack.json")
    assert Record.load(tmp_path / "stack.json") == written
    assert Record.load(tmp_path / "none.json") is None
    (tmp_path / "stack.json").write_text("{")
    with pytest.raises(StackError, match="cannot be read"):
        Record.load(tmp_path / "stack.json")
