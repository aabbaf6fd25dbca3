"""`rollout up`, `down` and `demo` with real processes.

Stacks are slow to start, so two are shared: `first` with all parts, and `second`, in the directory of the
first after that has ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from rollout import account
from rollout.cli import main
from rollout.client import Client
from rollout.schema import RolloutRequest, State
from services.launch import StackError, parts, paths
from services.launch.local import Options, Stack
from services.launch.parts import pick_port
from services.launch.paths import REPO
from services.launch.record import Record
from services.launch.supervisor import MARK, Part, marked
from tests.helpers.idle import in_time
from tests.helpers.stack import wait_until

pytestmark = pytest.mark.timeout(900)
ROLLOUT = [sys.executable, "-m", "rollout.cli"]
OURS = ("ROLLOUT_REDIS_URL", "ROLLOUT_URL", "ROLLOUT_CAPTURE_URL")


def rollout(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in OURS}
    # Seconds of a processor for each start of a RUN worker; most stacks here see no tokenizer.
    clean["ROLLOUT_PRELOAD_TOKENIZERS"] = "0"
    return subprocess.run(
        [*ROLLOUT, *args], capture_output=True, text=True, timeout=500, env={**clean, **(env or {})}
    )


def refused(*args: str, env: dict[str, str] | None = None) -> Result:
    """The same in this process, for what ends before it has started much."""
    clean = {"ROLLOUT_REDIS_URL": None, "ROLLOUT_URL": None}
    return CliRunner().invoke(main, args, env={**clean, **(env or {})})


def record(directory: Path) -> Record:
    record = Record.load(directory / "stack.json")
    assert record is not None
    return record


@pytest.fixture
def state(tmp_path):
    """A state directory whose stack, whatever becomes of the test, is ended."""
    directory = tmp_path / "run"
    yield directory
    Stack(directory, print).down()


@dataclass
class Started:
    """A stack that `rollout up` has started."""

    state: Path
    output: str
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
    for name in ("redis", "gateway", "capture", "fleets", "backend", "registered", "flower"):
        assert re.search(rf"^{name} +[\d.]+ s  ", first.output, re.MULTILINE), first.output
    assert "init 2, run 4, eval 16 slots" in first.output
    assert f"export ROLLOUT_URL={started.url} ROLLOUT_API_KEY=$(cat {state}/api.key)" in first.output
    assert f"port {first.usual} is taken: gateway gets" in first.output
    assert len(started.live) == len(started.parts) == 8
    # Without a key nobody is answered; client and command line of this account find it by themselves.
    assert httpx.get(f"{started.url}/v1/status").status_code == 401
    with socket.create_server(("127.0.0.1", 0)) as other:
        # Of another checkout, and later.
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        account.announce("other", account.Service(url, "", account.boot(), time.time(), home="/else/.local"))
        status = rollout("status")
        account.withdraw("other")
    assert status.returncode == 0 and f"{started.url}: the service of {paths.REPO}" in status.stderr
    with Client() as client:
        assert client.base_url == started.url
    with Client(started.url) as client:
        assert client.ready()["ready"]
        assert [b.url for b in client.backends()] == [started.backend_url]
        done = client.run([RolloutRequest(handler="noop", n=8)], timeout=240)
        assert {r.state for r in done} == {State.COMPLETED}
        assert client.status()["flower"]["url"] == started.flower_url
    user = tuple(Path(started.flower_auth_file).read_text().strip().split(":"))
    assert httpx.get(f"{started.flower_url}/tasks", timeout=240).status_code == 401
    assert httpx.get(f"{started.flower_url}/tasks", auth=user, timeout=240).status_code == 200


def test_what_is_secret_is_in_files_of_its_owner_alone(first):
    started, state = first.record, first.state
    assert (state.stat().st_mode & 0o777) == 0o700
    for file in (state / "api.key", state / "stack.json", Path(started.flower_auth_file)):
        assert file.stat().st_mode & 0o777 == 0o600, file
    listed = rollout("keys", "list", "--json", env={"ROLLOUT_URL": started.url})
    text = (state / "api.key").read_text()
    assert any(key["id"] in text for key in json.loads(listed.stdout)), "only its address leads there"
    password = Path(started.flower_auth_file).read_text().strip().partition(":")[2]
    for part in started.parts:
        process = Path(f"/proc/{part.pid}")
        assert (state / "api.key").read_bytes()[:17] not in (process / "environ").read_bytes()
        assert password.encode() not in (process / "cmdline").read_bytes()


def test_gateway_and_workers_know_where_capture_listens(first):
    (url,) = re.findall(r"^capture +[\d.]+ s  (http://127\.0\.0\.1:\d+)$", first.output, re.MULTILINE)
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer rlm-1-a-b"}).status_code == 401
    assert b"rollout_capture_in_flight 0.0" in httpx.get(f"{url}/metrics").content
    for name in ("gateway", "init fleet", "run fleet", "eval fleet"):
        variables = Path(f"/proc/{first.part(name).pid}/environ").read_bytes().split(b"\0")
        assert f"ROLLOUT_CAPTURE_URL={url}".encode() in variables, name


def test_a_port_without_keys_is_for_the_tenant_it_was_opened_for(first):
    assert f"NO KEY IS NEEDED AT 127.0.0.1:{first.compat}" in first.output
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
        made = httpx.post(f"{compat}/process", json=job, timeout=240)
        # It is worked on; without a call of a model it is no sample.
        assert made.status_code == 200 and made.json()["filter"] and made.json()["reward"] is None
        assert httpx.get(f"{compat}/v1/status").status_code == 404
        listed = [item.id for item in client.list().rollouts]
        assert listed == before, "it is the tenant's and not the operator's"


def test_a_second_up_is_refused(first):
    again = rollout("up", "--state-dir", str(first.state))
    assert again.returncode == 1
    assert f"a stack runs already: gateway at {first.record.url}" in again.stderr
    assert len(first.record.live) == 8


def test_each_part_that_is_killed_comes_back_and_rollouts_go_on(first):
    """The shell that ran `up` is gone: `subprocess.run` has waited for it."""
    before = first.record
    groups = (
        *(("gateway", "init fleet", "eval fleet", "flower"), ("run fleet", "backend", "capture")),
        ("redis",),
    )
    names = sorted(name for group in groups for name in group)
    assert sorted(part.name for part in before.parts) == names
    with Client(before.url, retry_for=240) as client:
        kept = client.run([RolloutRequest(handler="noop")], timeout=240)[0].id
        for group in groups:
            first.kill(*group)
            task = {"question": "37 times 85", "answer": "3145"}
            requests = [RolloutRequest(handler="calculator", task=task), RolloutRequest(handler="noop", n=3)]
            done = client.run(requests, timeout=240)
            assert {item.state for item in done} == {State.COMPLETED}, group
        assert client.get(kept).state is State.COMPLETED, "Redis has loaded its file"
        status = client.status()["parts"]
    assert {name: part["restarts"] for name, part in status.items()} == dict.fromkeys(names, 1)
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


def small(first: Started, *options: str) -> tuple[list[str], dict[str, str]]:
    """How the stack of that directory is started anew, without a model: arguments and environment."""
    env = {
        "ROLLOUT_HANDLERS": "tests.helpers.handlers:all_handlers",
        "ROLLOUT_GATEWAY_PORT": str(first.usual),
    }
    arguments = ["up", "--state-dir", str(first.state), "--no-backend", "--no-flower", "--slots-init", "4"]
    return [*arguments, *options], env


@pytest.fixture(scope="module")
def second(first):
    """The next life of the first one; RUN has room for one rollout."""
    first.down()
    arguments, env = small(first, "--slots-run", "1")
    up = rollout(*arguments, env=env)
    assert up.returncode == 0, up.stdout + up.stderr
    return Started(first.state, up.stdout, record(first.state).url, first.usual, 0)


def test_a_port_that_was_not_the_usual_one_is_kept(first, second):
    assert second.url == first.url and "which it had before" in second.output


def test_what_was_killed_all_at_once_is_swept_by_the_next_up(first, second):
    with Client(second.url, retry_for=240) as client:
        (held,) = client.submit([RolloutRequest(handler="in_tool")])
        wait_until(lambda: client.get(held.id).state is State.RUNNING, 120, "a rollout with a sandbox")
        lost = second.record
        # The supervisor first, as when the machine goes: it would bring the others back.
        for part in [lost.supervisor, *lost.parts]:
            os.kill(part.pid, signal.SIGKILL)
        arguments, env = small(first, "--slots-run", "1")
        up = rollout(*arguments, env=env)
        assert up.returncode == 0, up.stdout + up.stderr
        assert list(marked(lost.mark)) == []
        assert second.record.url == second.url, up.stdout
        client.cancel(held.id)
        (done,) = client.run([RolloutRequest(handler="noop")])
        assert done.state is State.COMPLETED


def test_down_and_up_cost_a_rollout_with_a_sandbox_no_attempt_and_ctrl_c_ends_a_foreground(second):
    with Client(second.url, retry_for=240) as client:
        # RUN has room for one: the others wait with their sandboxes.
        ids = [item.id for item in client.submit([RolloutRequest(handler="in_tool", n=3)])]

        def in_state(state):
            return [item for item in map(client.get, ids) if item.state is state]

        wait_until(lambda: in_state(State.RUNNING), 120, "one rollout to run")
        wait_until(lambda: len(in_state(State.READY)) == 2, 120, "two rollouts to wait with a sandbox")
        ready = in_state(State.READY)
        assert "handed back 2 rollouts" in second.down()
        arguments, env = small(second, "--slots-run", "3", "--foreground")
        child = subprocess.Popen(
            [*ROLLOUT, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
        for line in child.stdout:
            if line.startswith("export"):
                break
        started = second.record
        assert started.url == second.url
        wait_until(lambda: len(in_state(State.RUNNING)) == 3, 120, "all to run, each in a new sandbox")
        assert {client.get(rollout_id).attempt for rollout_id in ids} == {1}
        assert all(client.get(item.id).error is None for item in ready)
        for rollout_id in ids:
            client.cancel(rollout_id)
    second.kill("run fleet")
    back = second.part("run fleet")
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    stdout, _ = child.communicate(timeout=240)
    assert child.returncode == 130
    assert "ended gateway" in stdout and f"ended run fleet (pid {back.pid})" in stdout
    assert started.live == [] and not back.alive and not started.supervisor.alive


def test_what_was_killed_is_swept_by_the_next_up_and_a_redis_that_does_not_start_shows_its_log(
    state, tmp_path
):
    lost = Record(url="http://127.0.0.1:9", parts=[Part("gateway", ["sleep", "200"])])
    lost.parts[0].log = str(tmp_path / "log")
    lost.parts[0].env = {MARK: lost.mark}
    lost.parts[0].start()
    stray = subprocess.Popen(["sleep", "200"], env={MARK: lost.mark})
    lost.parts[0].process.kill()
    state.mkdir()
    lost.save(state / "stack.json")
    wait_until(lambda: len(list(marked(lost.mark))) == 1, 10, "the stray to be all that lives")
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho no luck today\nexit 3\n")
    fake.chmod(0o755)
    up = refused("up", "--state-dir", str(state), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert list(marked(lost.mark)) == [] and stray.poll() is not None
    assert up.exit_code == 1
    assert f"redis ended. The end of {state}/logs/redis.log:\nno luck today" in up.stderr
    assert not (state / "stack.json").exists()


def test_a_part_that_does_not_start_shows_its_log_and_ends_everything(state, monkeypatch):
    monkeypatch.delenv("ROLLOUT_REDIS_URL", raising=False)
    broken = Part("gateway", ["sh", "-c", "for i in $(seq 30); do echo line $i; done; sleep 1; exit 3"])
    monkeypatch.setattr(parts, "gateway", lambda: broken)
    stack = Stack(state, print)
    with pytest.raises(StackError) as caught:
        stack.up(Options(state, embedded_backend=False, private_ports=True))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"gateway ended. The end of {state}/logs/gateway.log:"
    assert lines[1:] == [f"line {i}" for i in range(11, 31)]
    assert len(stack.record.parts) == 7
    assert stack.record.live == []
    assert list(marked(stack.record.mark)) == []
    assert stack.down() is None


def test_an_unreachable_redis_of_the_caller_s_is_named(state):
    up = refused("up", "--state-dir", str(state), env={"ROLLOUT_REDIS_URL": "redis://:pw@127.0.0.1:9/0"})
    assert up.exit_code == 1
    assert "ROLLOUT_REDIS_URL=redis://***@127.0.0.1:9/0 does not answer" in up.stderr
    assert "pw" not in up.stderr


def test_a_worker_by_hand_that_was_given_no_redis_says_what_to_set():
    code = (
        "import sys; from celery.__main__ import main; from services.settings import Settings\n"
        "Settings.model_fields['redis_url'].default = 'redis://127.0.0.1:9/0'\n"
        "Settings.model_rebuild(force=True)\n"
        "sys.argv[1:] = '-A workers.app worker -Q run -c 1 --without-gossip --without-mingle'.split()\n"
        "main()"
    )
    env = {name: value for name, value in os.environ.items() if name != "ROLLOUT_REDIS_URL"}
    worker = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    shown = ""
    try:
        while "Trying again" not in shown and (line := worker.stdout.readline()):
            shown += line
    finally:
        worker.kill()
        worker.wait()
    assert "ROLLOUT_REDIS_URL is not set, and no Redis answers at the default address" in shown, shown
    assert "redis://127.0.0.1:9/0" in shown and shown.count("is not set") == 1


def test_options_that_cannot_be_are_refused(state):
    half = refused("up", "--state-dir", str(state), "--compat-port", "1234")
    assert half.exit_code == 1 and "--compat-tenant" in half.stderr
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        up = refused("up", "--state-dir", str(state), "--port", str(port))
    assert up.exit_code == 1
    assert f"--port {port} is taken" in up.stderr


def lines(child: subprocess.Popen) -> Iterator[str]:
    """What it says; nobody sits before a screen where nothing happens."""
    while True:
        with in_time(10.0, 120.0):
            line = child.stdout.readline()
        if not line:
            return
        yield line


def test_the_demo_shows_its_first_rollout_within_a_minute_and_leaves_nothing(tmp_path):
    child = subprocess.Popen(
        [*ROLLOUT, "demo", "--n", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "160"},
        cwd=REPO,
    )
    shown, told = "", lines(child)
    with in_time(60.0, 400.0):
        while "→ execute_bash echo" not in shown and (line := next(told, "")):
            shown += line
    shown += "".join(told)
    assert child.wait(60) == 0, shown
    for text in (
        "→ execute_bash echo",
        "tokens sampled",
        "stage run (s)",
        "4 completed",
        "nothing left running",
    ):
        assert text in shown, (text, shown)
    shown, next_steps = shown.split("nothing left running")
    (page,) = re.findall(r"for any browser: (\S+)$", next_steps, re.MULTILINE)
    (rollout_id,) = re.findall(r"^rollout (\S+)$", shown, re.MULTILINE)
    page = (REPO / page).read_text()
    assert page.startswith("<!doctype html>") and f"#/rollouts/{rollout_id}" in page
    assert re.search(r"^gateway +[\d.]+ s  http://127\.0\.0\.1:\d+$", shown, re.MULTILINE)
    assert "http" not in next_steps, "what has ended cannot be visited"
    for command in re.findall(r"^  (\S+) (?:up|status|down) ", next_steps, re.MULTILINE):
        assert "version" in subprocess.check_output([command, "--version"], cwd=REPO, text=True)
    assert " up " in next_steps and " status " in next_steps
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["its start", "its end"])
def test_ctrl_c_during_the_start_of_a_demo_leaves_nothing(tmp_path, moment):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([*ROLLOUT, "demo", "--n", "2"], env=env, **pipes)
    if moment == "its start":

        def begun():
            return [path for path in tmp_path.glob("*/stack.json") if len(record(path.parent).parts) >= 4]

        wait_until(begun, 120, "four parts to start")
    else:
        for line in child.stdout:
            if line.startswith("ending the stack"):
                break
    directory = next(tmp_path.glob("rollout-demo-*"))
    started = record(directory)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=240)
    if moment == "its start" or child.returncode:  # the end of all goes on in any case, and may have begun
        assert child.returncode == 130 and "interrupted" in stderr, stderr
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
