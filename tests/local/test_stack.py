"""`rollout up`, `down` and `demo` with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from rollout import account
from rollout.client import Client
from rollout.schema import RolloutRequest, State
from services.local import plan, ports
from services.local.errors import StackError
from services.local.plan import Options, Part
from services.local.processes import Process, marked
from services.local.record import Record
from services.local.stack import Stack
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


def test_up_serves_rollouts_and_down_ends_exactly_what_it_started(state):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)", "celery", "gunicorn"])
    try:
        up = rollout("up", "--state-dir", str(state), "--slots-init", "2", "--slots-run", "4")
        assert up.returncode == 0, up.stdout + up.stderr
        for part in ("redis", "gateway", "fleets", "backend", "registered", "flower"):
            assert re.search(rf"^{part} +[\d.]+ s  ", up.stdout, re.MULTILINE), up.stdout
        assert "init 2, run 4, eval 16 slots" in up.stdout

        started = record(state)
        assert f"export ROLLOUT_URL={started.url} ROLLOUT_API_KEY=$(cat {state}/api.key)" in up.stdout
        assert len(started.live) == len(started.processes) == 7
        assert (state.stat().st_mode & 0o777) == 0o700
        # Without a key nobody is answered; client and command line of this account find it by themselves.
        assert httpx.get(f"{started.url}/v1/status").status_code == 401
        assert rollout("status").returncode == 0
        assert (state / "api.key").stat().st_mode & 0o777 == 0o600
        for process in started.processes:
            assert (state / "api.key").read_bytes()[:17] not in Path(
                f"/proc/{process.pid}/environ"
            ).read_bytes()
        with Client() as client:
            assert client.base_url == started.url
        with Client(started.url) as client:
            assert client.ready()["ready"]
            assert [b.url for b in client.backends()] == [started.backend_url]
            done = client.run([RolloutRequest(handler="noop", n=8)], timeout=60)
            assert {r.state for r in done} == {State.COMPLETED}
            assert client.status()["flower"]["url"] == started.flower_url
        password = Path(started.flower_auth_file)
        assert password.stat().st_mode & 0o777 == 0o600
        user = tuple(password.read_text().strip().split(":"))
        assert httpx.get(f"{started.flower_url}/tasks", timeout=20).status_code == 401
        assert httpx.get(f"{started.flower_url}/tasks", auth=user, timeout=20).status_code == 200
        for process in started.processes:
            assert user[1].encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()

        again = rollout("up", "--state-dir", str(state))
        assert again.returncode == 1
        assert f"a stack runs already: gateway at {started.url}" in again.stderr
        assert len(started.live) == 7

        down = rollout("down", "--state-dir", str(state))
        assert down.returncode == 0, down.stderr
        for process in started.processes:
            assert f"ended {process.name} (pid {process.pid})" in down.stdout
        assert started.live == []
        assert list(marked(started.mark)) == []
        assert bystander.poll() is None
        assert "nothing runs" in rollout("down", "--state-dir", str(state)).stdout
        assert account.services() == [], "what ended is not found any more"
    finally:
        bystander.kill()
        bystander.wait()


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
    monkeypatch.setattr(plan, "gateway", lambda: broken)
    said: list[str] = []
    stack = Stack(state, said.append)
    with pytest.raises(StackError) as caught:
        stack.up(Options(state, embedded_backend=False, private_ports=True))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"gateway ended. The end of {state}/logs/gateway.log:"
    assert lines[1:] == [f"line {i}" for i in range(11, 31)]
    assert len(stack.record.processes) == 6
    assert stack.record.live == []
    assert list(marked(stack.record.mark)) == []
    assert stack.down() is None


def test_ctrl_c_during_the_start_ends_everything(state):
    child = subprocess.Popen(
        [*ROLLOUT, "up", "--state-dir", str(state)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (state / "stack.json").exists() or len(record(state).processes) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started = record(state)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert "interrupted" in stderr
    assert started.live == []
    assert list(marked(started.mark)) == []


def test_in_the_foreground_a_part_that_dies_comes_back_and_ctrl_c_ends_all(state):
    command = [*ROLLOUT, "up", "--foreground", "--no-backend", "--no-flower", "--state-dir", str(state)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("export"):
            break
    started = record(state)
    victim = part(state, "run fleet")
    os.kill(victim.pid, signal.SIGKILL)
    back = wait_until(lambda: comes_back(state, victim), 60, "the fleet to come back")
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    stdout, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "ended gateway" in stdout and f"ended run fleet (pid {back.pid})" in stdout
    assert started.live == [] and not back.alive and not started.supervisor.alive


def part(directory: Path, name: str) -> Process:
    return next(process for process in record(directory).processes if process.name == name)


def comes_back(directory: Path, before: Process) -> Process | None:
    now = part(directory, before.name)
    return now if now.pid != before.pid and now.alive else None


@pytest.mark.timeout(900)
def test_each_part_that_is_killed_comes_back_and_rollouts_go_on(state):
    """The shell that ran `up` is gone: `subprocess.run` has waited for it."""
    up = rollout(
        "up", "--state-dir", str(state), "--slots-init", "2", "--slots-run", "4", "--slots-eval", "2"
    )
    assert up.returncode == 0, up.stdout + up.stderr
    first = record(state)
    names = [process.name for process in first.processes]
    assert sorted(names) == [
        *("backend", "eval fleet", "flower", "gateway", "init fleet", "redis", "run fleet"),
    ]
    with Client(first.url, retry_for=60) as client:
        kept = client.run([RolloutRequest(handler="noop")], timeout=60)[0].id
        for name in names:
            victim = part(state, name)
            os.kill(victim.pid, signal.SIGKILL)
            wait_until(lambda victim=victim: comes_back(state, victim), 60, f"{name} to come back")
            task = {"question": "37 times 85", "answer": "3145"}
            requests = [RolloutRequest(handler="calculator", task=task), RolloutRequest(handler="noop", n=3)]
            done = client.run(requests, timeout=120)
            assert {one.state for one in done} == {State.COMPLETED}, name
        assert client.get(kept).state is State.COMPLETED, "Redis has loaded its file"
        told = client.status()["parts"]
    assert {name: one["restarts"] for name, one in told.items()} == dict.fromkeys(names, 1)
    shown = rollout("status", env={"ROLLOUT_URL": first.url, "COLUMNS": "200"})
    assert all(f"part {name}" in shown.stdout for name in names), shown.stdout
    assert "was started anew 1 times" in shown.stdout
    said = (state / "logs" / "supervisor.log").read_text()
    assert all(f"part={name!r}" in said or f"part={name}" in said for name in names)
    before = [Path(f"/proc/{first.supervisor.pid}/stat").read_text().split()[13:15] for _ in (1,)]
    assert sum(map(int, before[0])) < 2000, "ticks of a hundredth of a second: it must not be a busy loop"

    os.kill(first.supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not first.supervisor.alive, 10, "the supervisor to be gone")
    again = rollout("up", "--state-dir", str(state))
    assert again.returncode == 1 and "looks after the stack again" in again.stdout
    victim = part(state, "gateway")
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: comes_back(state, victim), 60, "the gateway to come back")
    last = record(state)
    down = rollout("down", "--state-dir", str(state))
    assert down.returncode == 0, down.stderr
    assert last.live == [] and not last.supervisor.alive and list(marked(last.mark)) == []
    assert not (state / "parts.json").exists(), "it holds the password of Redis"


@pytest.mark.timeout(600)
def test_down_and_up_keep_the_port_and_cost_a_rollout_with_a_sandbox_no_attempt(state):
    options = ("up", "--state-dir", str(state), "--no-backend", "--no-flower", "--slots-init", "4")
    env = {"ROLLOUT_HANDLERS": "tests.helpers.handlers:all_handlers"}
    first = rollout(*options, "--slots-run", "1", env=env)
    assert first.returncode == 0, first.stderr
    url = record(state).url
    with Client(url, retry_for=60) as client:
        # RUN has room for one: the others wait with their sandboxes.
        ids = [one.id for one in client.submit([RolloutRequest(handler="in_tool", n=3)])]

        def waiting():
            return [one for one in map(client.get, ids) if one.state is State.READY]

        ready = wait_until(
            lambda: len(waiting()) == 2 and waiting(), 120, "two rollouts to wait with a sandbox"
        )
        down = rollout("down", "--state-dir", str(state))
        assert down.returncode == 0 and "handed back 2 rollouts" in down.stdout, down.stdout
        second = rollout(*options, "--slots-run", "3", env=env)
        assert second.returncode == 0, second.stderr
        assert record(state).url == url
        running = lambda: all(client.get(one).state is State.RUNNING for one in ids)  # noqa: E731
        wait_until(running, 60, "all to run, each in a new sandbox")
        assert {client.get(one).attempt for one in ids} == {1}
        assert all(client.get(one.id).error is None for one in ready)
        for one in ids:
            client.cancel(one)


def test_a_port_that_was_not_the_usual_one_is_kept(state):
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        usual = str(holder.getsockname()[1])
        options = ("up", "--state-dir", str(state), "--no-backend", "--no-flower")
        first = rollout(*options, env={"ROLLOUT_GATEWAY_PORT": usual})
        assert first.returncode == 0, first.stderr
        url = record(state).url
        rollout("down", "--state-dir", str(state))
    second = rollout(*options, env={"ROLLOUT_GATEWAY_PORT": usual})
    assert second.returncode == 0, second.stderr
    assert record(state).url == url and "which it had before" in second.stdout


def test_a_stack_whose_parts_were_killed_is_swept_by_the_next_up(state):
    first = rollout("up", "--state-dir", str(state), "--no-backend", "--no-flower")
    assert first.returncode == 0, first.stderr
    found = record(state)
    # The supervisor first, as when the machine goes: it would bring the others back.
    for process in [found.supervisor, *found.processes]:
        os.kill(process.pid, signal.SIGKILL)
    second = rollout("up", "--state-dir", str(state), "--no-backend", "--no-flower")
    assert second.returncode == 0, second.stderr


def test_an_unreachable_redis_of_the_caller_s_is_named(state):
    up = rollout("up", "--state-dir", str(state), env={"ROLLOUT_REDIS_URL": "redis://:pw@127.0.0.1:9/0"})
    assert up.returncode == 1
    assert "ROLLOUT_REDIS_URL=redis://***@127.0.0.1:9/0 does not answer" in up.stderr
    assert "pw" not in up.stderr


def test_a_taken_port_that_was_asked_for_is_an_error(state):
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        up = rollout("up", "--state-dir", str(state), "--port", str(port))
        assert up.returncode == 1
        assert f"--port {port} is taken" in up.stderr
        other = rollout(
            *("up", "--state-dir", str(state), "--no-backend", "--no-flower"),
            env={"ROLLOUT_GATEWAY_PORT": str(port)},
        )
        assert other.returncode == 0, other.stderr
        assert f"port {port} is taken: gateway gets" in other.stdout


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


def test_the_record_is_readable_json_only_for_us(state):
    state.mkdir(mode=0o700)
    one = Record(url="http://127.0.0.1:1")
    one.save(state / "stack.json")
    assert json.loads((state / "stack.json").read_text())["mark"] == one.mark
    assert Record.load(state / "stack.json") == one


def test_a_port_without_keys_is_for_the_tenant_it_was_opened_for(state):
    port = ports.pick(0, set())
    half = rollout("up", "--state-dir", str(state), "--compat-port", str(port))
    assert half.returncode == 2 and "--compat-tenant" in half.stderr
    options = ["--no-backend", "--no-flower", "--compat-port", str(port), "--compat-tenant", "trainer"]
    up = rollout("up", "--state-dir", str(state), *options)
    assert up.returncode == 0, up.stdout + up.stderr
    assert f"NO KEY IS NEEDED AT 127.0.0.1:{port}" in up.stdout
    assert f"NO KEY IS NEEDED AT 127.0.0.1:{port}" in (state / "logs" / "gateway.log").read_text()
    assert f"127.0.0.1:{port}: whoever reaches it is" in rollout("status", env={"COLUMNS": "160"}).stdout
    compat, job = f"http://127.0.0.1:{port}", {"instance": {"data_source": "noop", "task": {"reward": 1.0}}}
    made = httpx.post(f"{compat}/process", json=job, timeout=60)
    assert made.status_code == 200 and made.json()["reward"] == 1.0
    assert httpx.get(f"{compat}/v1/status").status_code == 404
    with Client() as client:
        assert client.list().rollouts == [], "it is the tenant's and not the operator's"
