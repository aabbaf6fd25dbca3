"""`exec`: a program that the server itself starts and waits for, alone in the sandbox."""

from __future__ import annotations

import random
import signal

import pytest

from sandbox.client import TRUSTED_PYTHON
from sandbox.errors import SandboxRequestError
from tests.helpers.blocking import SyncSandboxClient, exchange
from tests.helpers.stack import wait_until
from tests.sandbox.conftest import THREADS, sandbox_on

sandbox = sandbox_on("apptainer", "local-unsafe")
everywhere = pytest.mark.parametrize("sandbox", ["apptainer", "bubblewrap", "local-unsafe"], indirect=True)
"""For what the walls have a part in; to all else bubblewrap is as Apptainer."""


@pytest.fixture
def client(sandbox):
    """A connection to it, of each test's own; the shell starts in the workspace."""
    with SyncSandboxClient(sandbox.socket) as client:
        client.reset()
        yield client


def test_a_program_gives_its_exit_code_and_both_outputs(client):
    result = client.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert result.signal is None
    assert not (result.timed_out or result.truncated or result.interrupted)
    assert 0 < result.wall_s < 30


def test_outputs_can_be_merged_in_the_order_they_were_written(client):
    result = client.exec(["sh", "-c", "echo 1; echo 2 >&2; echo 3"], merge_output=True)
    assert (result.stdout, result.stderr) == ("1\n2\n3\n", "")


def test_arguments_are_no_shell_words(client):
    assert client.exec(["echo", "$HOME", "`id`", "a  b", "*"]).stdout == "$HOME `id` a  b *\n"


def test_a_signal_is_told_from_an_exit_code(client):
    result = client.exec(["sh", "-c", "kill -SEGV $$"])
    assert (result.exit_code, result.signal) == (None, signal.SIGSEGV)


def test_what_cannot_be_started_is_a_result(client):
    result = client.exec(["no-such-program"])
    assert result.exit_code is None
    assert "no-such-program" in result.not_started
    assert "No such file" in client.exec(["true"], cwd="gone").not_started


def test_an_overrun_is_ended_at_the_limit(client):
    result = client.exec(["sh", "-c", "trap '' TERM INT; echo before; sleep 60; exit 0"], timeout=3)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "before\n")
    assert 3 <= result.wall_s < 10


def test_processor_time_is_counted(client):
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    assert client.exec([TRUSTED_PYTHON, "-c", burn]).cpu_s >= 0.3


def test_standard_input_goes_in_whole_and_is_empty_else(client):
    text = "x" * 3_000_000
    assert client.exec(["wc", "-c"], stdin=text).stdout.split() == ["3000000"]
    assert client.exec(["cat"]).stdout == ""
    assert client.exec(["true"], stdin=text).exit_code == 0


def test_a_long_output_keeps_head_and_tail(client):
    result = client.exec(["sh", "-c", "echo head; seq 200000; echo tail"], max_output_chars=1000)
    assert result.truncated
    assert result.stdout.startswith("head\n")
    assert result.stdout.endswith("tail\n")
    assert len(result.stdout) < 1200


@everywhere
def test_nothing_of_the_shell_reaches_it(client):
    client.bash(
        "export WORD=1 PATH=/nowhere; cd /tmp; ulimit -n 20; umask 777; trap '' TERM; alias env=false"
    )
    output = client.exec(["env"]).stdout
    assert "WORD" not in output
    assert "/nowhere" not in output
    result = client.exec(
        ["sh", "-c", "pwd; umask; ulimit -n; grep SigIgn /proc/self/status; ls /proc/self/fd"]
    )
    pwd, mask, files, ignored, *descriptors = result.stdout.split("\n")
    assert pwd.endswith("/workspace")
    assert mask == "0022"
    assert int(files) > 20
    # Signals 32 and 33 are the C library's own, which nobody can reset; `make` leaves them ignored.
    assert int(ignored.split()[1], 16) & ~(3 << 31) == 0
    assert descriptors[:4] == ["0", "1", "2", "3"]  # the last is the directory that `ls` reads
    assert descriptors[4:] == [""]


def test_its_environment_is_the_sandbox_s_and_what_is_given(client):
    client.setup({"FROM_SETUP": "1"})
    lines = client.exec(["env"], env={"MINE": "2"}).stdout.splitlines()
    assert {"FROM_SETUP=1", "MINE=2"} <= set(lines)


@everywhere
def test_its_home_is_new_and_empty_and_gone_afterwards(client):
    first = client.exec(["sh", "-c", "ls -A ~; touch ~/file; echo $HOME"]).stdout.strip()
    second = client.exec(["sh", "-c", "ls -A ~; echo $HOME"]).stdout.strip()
    assert first != second
    assert client.exec(["ls", first]).exit_code != 0
    assert client.exec(["sh", "-c", "echo $HOME"], env={"HOME": "/mine"}).stdout == "/mine\n"


@everywhere
def test_nothing_runs_beside_it_and_nothing_is_left(client):
    names = [f"sleep {random.randrange(10**6, 10**8)}" for _ in range(4)]  # others may run this test, too
    agent_s, agent_s_child, own, own_child = names
    client.bash(f"setsid {agent_s} >/dev/null 2>&1 & disown; ({agent_s_child} &)")
    # Of a whole machine's there would be more than an answer holds.
    listing = "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$p; echo; done 2>/dev/null | grep -a '^sleep'"
    start = f"setsid {own} & first=$!; second=$({own_child} >/dev/null & echo $!)"
    wait = "for pid in $first $second; do until grep -q ^sleep /proc/$pid/cmdline; do sleep 0.1; done; done"
    output = client.exec(["sh", "-c", f"{start}; {wait}; {listing}"]).stdout
    lines = [line.strip() for line in output.splitlines()]
    assert own in lines and own_child in lines
    assert agent_s not in lines and agent_s_child not in lines
    commands = [line.strip() for line in client.bash(listing).output.splitlines()]
    assert not set(names) & set(commands)


def test_the_shell_is_back_after_it(client):
    client.bash("cd /tmp; word=1")
    client.exec(["true"])
    result = client.bash("echo [$word]")
    assert (result.output, result.shell_restarted) == ("[]\n", True)
    assert client.bash("true").shell_restarted is False


def wait_for(sandbox, name):
    """Wait until what runs there has made a file of that name."""
    with SyncSandboxClient(sandbox.socket) as client:
        wait_until(lambda: client.stat(name).kind, 60, f"{name!r} to be made")


@everywhere
def test_a_running_command_is_ended_for_it(client, sandbox):
    command = THREADS.submit(client.bash, "touch begun; sleep 600", 600)
    wait_for(sandbox, "begun")
    with SyncSandboxClient(sandbox.socket) as second:
        assert second.exec(["echo", "mine"]).stdout == "mine\n"
    assert command.result(60).interrupted


@everywhere
def test_a_reset_ends_it(client, sandbox):
    command = THREADS.submit(client.exec, ["sh", "-c", "touch started; exec sleep 600"], 600)
    wait_for(sandbox, "started")
    with SyncSandboxClient(sandbox.socket) as second:
        second.reset()
    ended = command.result(60)
    assert (ended.exit_code, ended.interrupted) == (None, True)
    assert client.bash("echo back").output == "back\n"


def test_two_at_once_take_their_turns(client, sandbox):
    def run(number):
        with SyncSandboxClient(sandbox.socket) as client:
            return client.exec(["sh", "-c", "sleep 0.3; echo whole"])

    done = list(THREADS.map(run, range(3)))
    assert [result.stdout for result in done] == ["whole\n"] * 3
    assert not any(result.interrupted for result in done)


@everywhere
def test_limits_hold_for_it(client):
    result = client.exec([TRUSTED_PYTHON, "-c", "x = bytearray(300 << 20)"], limits={"memory_mb": 200})
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr
    result = client.exec([TRUSTED_PYTHON, "-c", "while True: pass"], timeout=240, limits={"cpu_s": 1})
    assert result.signal in (signal.SIGXCPU, signal.SIGKILL)


@everywhere
def test_the_trusted_python_finds_no_module_of_the_agent_s(client):
    client.bash(
        "echo 'print(\"taken\")' >json.py; mkdir -p ~/.local/lib/python3.11/site-packages; "
        "cp json.py ~/.local/lib/python3.11/site-packages/usercustomize.py"
    )
    result = client.exec([TRUSTED_PYTHON, "-c", "import json; print(json.dumps(1))"])
    assert (result.stdout, result.exit_code) == ("1\n", 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"argv": ["true"], "timeout": 0}, "timeout"),
        ({"argv": ["true"], "limits": {"wishes": 3}}, "wishes"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(client, arguments, complaint):
    with pytest.raises(SandboxRequestError, match=complaint):
        client.exec(**arguments)


def breach_during(sandbox, client, **request):
    """The result of a program during which the host says that a limit was exceeded."""

    def tell():
        wait_for(sandbox, "counted")
        exchange(sandbox.socket, {"op": "breach", "kind": "memory", **request}, 30.0)

    watchdog = THREADS.submit(tell)
    try:
        return client.exec(["sh", "-c", "touch counted; exec sleep 600"], 600)
    finally:
        watchdog.result(60)


@everywhere
def test_over_a_limit_of_the_sandbox_it_is_ended_and_told_so(client, sandbox):
    result = breach_during(sandbox, client, message="9 of 8 MiB")
    assert (result.exit_code, result.limit_exceeded) == (None, "9 of 8 MiB")
    assert client.exec(["true"]).limit_exceeded is None


def test_what_the_agent_exceeded_before_is_told_to_the_agent(client, sandbox):
    exchange(sandbox.socket, {"op": "breach", "kind": "disk", "message": "too much"}, 10.0)
    assert client.exec(["true"]).limit_exceeded is None
    assert client.bash("true").limit_exceeded == "too much"


@pytest.mark.parametrize("sandbox", ["apptainer"], indirect=True)
def test_the_trusted_python_is_loaded_with_nothing_of_the_agents(client):
    client.bash("echo /tmp/evil.so >/etc/ld.so.preload; chmod 555 /etc")
    assert "evil.so" in client.exec(["/bin/true"], merge_output=True).stdout
    result = client.exec([TRUSTED_PYTHON, "-c", "print(1)"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "1\n", "")
