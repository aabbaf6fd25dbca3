"""Commands that are left running: typing to them, waiting for them, ending them; and what is told besides."""

from __future__ import annotations

import signal
import time

import pytest

from sandbox import processes
from sandbox.errors import SandboxRequestError
from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, exchange
from tests.sandbox.conftest import THREADS, sandbox_on

KEEP = {"timeout": 60, "on_timeout": "keep"}
FOREVER = 1000.0
"""Seconds; a test that needs so long has failed long since."""


# To the shell bubblewrap is as Apptainer; with local-unsafe it has no PID namespace of its own.
box = sandbox_on("apptainer", "local-unsafe", env={"GREETING": "good day"})
everywhere = pytest.mark.parametrize("box", ["apptainer", "bubblewrap", "local-unsafe"], indirect=True)


@pytest.fixture
def shell(box):
    with SyncSandboxClient(box.socket) as client:
        yield client
        client.reset()
        client.bash("rm -rf ./*")


AWAIT_GO = "while ! [ -e go ]; do sleep 0.05; done"
"""Runs until the test writes that file."""


def press(shell, key):
    """A key until it ends the command, which may not have got as far as to notice the first one."""
    result = shell.send_input(key, 1)
    while result.running:
        result = shell.send_input(key, 1)
    return result


def exists(shell, path):
    """Whether a file of the workspace is there, without the shell."""
    try:
        shell.read_file(path)
    except SandboxRequestError:
        return False
    return True


def is_running(client):
    """Whether a command runs, which is the only time that takes input."""
    try:
        return client.send_input("", 0).running
    except SandboxRequestError:
        return False


def ask(box, operation, **arguments):
    """A request that the client has no method for: the host sends it."""
    return exchange(box.socket, {"op": operation, **arguments}, 30)


def until(condition):
    """Wait for what must come true."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in a minute"
        time.sleep(0.01)


# -- waiting for input ----------------------------------------------


@pytest.mark.parametrize(
    ("command", "asked", "answer", "output", "code"),
    [
        ("read -r x; echo got $x", "", "some words", "got some words\n", 0),
        ("cat", "", "C-d", "", 0),
        ("read -s -p 'Password: ' p </dev/tty; echo; echo $p", "Password: ", "secret", "\nsecret\n", 0),
        ("python3 -c 'print(input(\"name? \") * 2)'", "name? ", "ab", "abab\n", 0),
        ("select x in a b; do echo $x; break; done", "1) a\n2) b\n#? ", "2", "b\n", 0),
        ("cat | tr a-z A-Z; false", "", "C-d", "", 1),
        ("sh -c 'read x; exit $x'", "", "9", "", 9),
    ],
)
def test_a_command_that_asks_is_known_to_wait_and_can_be_answered(
    shell, command, asked, answer, output, code
):
    # With neither limit in reach only the look at the process can end the call.
    result = shell.bash(command, FOREVER, on_timeout="keep")
    assert (result.output, result.exit_code) == (asked, None)
    assert result.running
    assert result.waiting_for_input
    assert not result.timed_out
    result = shell.send_input(answer, FOREVER)
    assert (result.output, result.exit_code, result.running) == (output, code, False)
    assert shell.bash("echo next").output == "next\n"


def test_a_python_session_is_held_over_many_inputs(shell):
    result = shell.bash("python3 -q", FOREVER, on_timeout="keep")
    assert result.output.endswith(">>> ")
    for number in range(5):
        result = shell.send_input(f"print({number} + 100)", FOREVER)
        assert result.output == f"{number + 100}\n>>> "
        assert result.waiting_for_input
    assert shell.send_input("import time; time.sleep(0.3); print('woke')", FOREVER).output == "woke\n>>> "
    result = shell.send_input("exit()", FOREVER)
    assert (result.running, result.exit_code) == (False, 0)


def test_an_inner_shell_and_one_put_in_its_place_take_commands_as_input(shell):
    for command in ("bash --norc", "exec bash --norc"):
        assert shell.bash(f"PS1='% ' {command}", FOREVER, on_timeout="keep").waiting_for_input
        assert "inner 7\n" in shell.send_input("echo inner $((3 + 4))", FOREVER).output
        result = shell.send_input("exit 5", FOREVER)
        assert (result.exit_code, result.running) == (5, False)
        assert result.shell_restarted == command.startswith("exec")


def test_a_pager_waits_and_is_left(shell):
    result = shell.bash("seq 1000 | less", FOREVER, on_timeout="keep")
    assert result.waiting_for_input
    for _ in range(3):  # how many keys it wants depends on its version
        if result.running:
            result = shell.send_input("q", FOREVER)
    assert not result.running
    assert shell.bash("echo next").output == "next\n"


def test_a_program_that_draws_all_the_time_runs_into_the_time_limit_and_is_left_by_a_key(shell):
    result = shell.bash("while ! read -r -n 1 -t 0.1 key; do echo tick; done", 1, on_timeout="keep")
    while not result.output:  # it is slow to begin
        assert result.running and result.timed_out
        result = shell.send_input("", 1)
    assert result.running
    assert result.timed_out
    assert not result.waiting_for_input
    assert "tick\n" in result.output
    result = shell.send_input("q", FOREVER)
    assert (result.running, result.exit_code) == (False, 0)


def test_input_of_many_lines_reaches_the_command_whole(shell):
    text = "".join(f"line {number}\n" for number in range(20_000))
    shell.bash("wc -lc", FOREVER, on_timeout="keep")
    assert shell.send_input(text, FOREVER).waiting_for_input
    assert shell.send_input("C-d", FOREVER).output.split() == ["20000", str(len(text))]


def test_a_line_that_a_terminal_would_cut_is_refused(shell):
    shell.bash("cat", FOREVER, on_timeout="keep")
    with pytest.raises(SandboxRequestError, match="longer than 4095 bytes"):
        shell.send_input("x" * 5000)
    assert shell.send_input("x" * 4000, FOREVER).output == "x" * 4000 + "\n"
    assert shell.send_input("C-d", FOREVER).exit_code == 0


def test_input_that_the_command_does_not_read_is_not_run_as_a_command(shell):
    shell.bash(f"{AWAIT_GO}; echo over", 60, on_timeout="keep", quiet_timeout=0.1)
    assert shell.send_input("touch injected", 60, quiet_timeout=0.1).running
    shell.write_file("go", "")
    assert shell.send_input("", FOREVER).output == "over\n"
    result = shell.bash("ls; echo listed")
    assert (result.output, result.late_output) == ("go\nlisted\n", "")


# -- leaving a command running ----------------------------------------------


def test_silence_and_the_time_limit_leave_a_command_running(shell):
    result = shell.bash("echo begun; sleep 1000", 60, on_timeout="keep", quiet_timeout=2)
    while not result.output and result.running:  # it is slow to begin
        result = shell.send_input("", 60, quiet_timeout=2)
    assert (result.output, result.running, result.timed_out) == ("begun\n", True, False)
    assert not result.waiting_for_input
    result = shell.send_input("", 0.2)
    assert (result.output, result.running, result.timed_out) == ("", True, True)
    assert press(shell, "C-c").exit_code == 130


def test_output_comes_once_and_in_order_over_several_results(shell):
    result = shell.bash(
        "for i in 1 2 3 4 5; do sleep 0.3; echo $i; done; exit 4", 60, on_timeout="keep", quiet_timeout=0.1
    )
    output = result.output
    while result.running:
        result = shell.send_input("", 0.35)
        output += result.output
    assert output == "1\n2\n3\n4\n5\n"
    assert (result.exit_code, result.shell_restarted) == (4, True)


def test_a_character_that_is_cut_by_the_end_of_a_result_is_not_damaged(shell):
    command = "printf '\\xe2\\x82'; sleep 1000 & read -r x; kill %1; printf '\\xac\\n'"
    first = shell.bash(command, FOREVER, on_timeout="keep")
    second = shell.send_input("go", FOREVER)
    assert (first.output + second.output).count("\u20ac") == 1
    assert "\ufffd" not in first.output + second.output


def test_a_command_that_prints_much_while_nobody_waits_does_not_block(shell):
    command = f"{AWAIT_GO}; seq 200000; touch done; echo end"
    shell.bash(command, 60, on_timeout="keep", quiet_timeout=0.1)
    shell.write_file("go", "")
    until(lambda: exists(shell, "done"))  # a terminal holds a few kilobytes
    result = shell.send_input("", FOREVER)
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("200000\nend\n")
    assert result.truncated


def test_while_a_command_runs_another_is_refused_with_what_can_be_done(shell):
    shell.bash("cat", **KEEP)
    with pytest.raises(SandboxRequestError, match=r"still running.*is_input.*C-c.*reset"):
        shell.bash("echo no")
    shell.send_input("C-c", FOREVER)
    with pytest.raises(SandboxRequestError, match="send it as a command"):
        shell.send_input("x")
    assert shell.bash("echo yes").output == "yes\n"


def test_what_a_command_left_running_said_last_is_told_with_the_next_command(shell):
    command = f"{AWAIT_GO}; echo last words; (exit 7)"
    shell.bash(command, 60, on_timeout="keep", quiet_timeout=0.1)
    shell.write_file("go", "")
    results = []

    def accepted():
        try:
            results.append(shell.bash("echo new"))
        except SandboxRequestError:  # it has not quite ended
            return False
        return True

    until(accepted)
    assert (results[0].output, results[0].exit_code) == ("new\n", 0)
    assert (results[0].late_output, results[0].late_exit_code) == ("last words\n", 7)


def test_a_job_is_stopped_and_continued(shell):
    shell.bash("sleep 1000", 60, on_timeout="keep", quiet_timeout=0.1)
    result = press(shell, "C-z")
    assert (result.exit_code, result.suspended) == (148, True)
    assert "Stopped" in result.output
    assert "Stopped" in shell.bash("jobs").output
    result = shell.bash("fg", 60, on_timeout="keep", quiet_timeout=2)
    assert (result.output, result.running) == ("sleep 1000\n", True)
    result = press(shell, "C-c")
    assert (result.exit_code, result.suspended) == (130, False)


def test_interrupt_ends_a_command_that_was_left_running(shell):
    shell.bash("trap '' INT; sleep 1000", 60, on_timeout="keep", quiet_timeout=0.1)
    assert shell.interrupt()
    result = shell.send_input("")
    assert not result.running
    assert not shell.interrupt()
    assert shell.bash("echo next").output == "next\n"


def test_a_second_connection_types_at_once_while_the_first_waits(shell, box):
    command = THREADS.submit(shell.bash, "read -r x; echo got $x", FOREVER)
    with SyncSandboxClient(box.socket) as second:

        def typed():
            try:
                return second.send_input("words", FOREVER)
            except SandboxRequestError:  # it has not begun yet
                return None

        sent = []
        until(lambda: sent.append(typed()) or sent[-1])
    assert (sent[-1].output, sent[-1].running) == ("", True)
    assert command.result(60).output == "got words\n"


@everywhere
def test_an_interrupt_from_a_second_connection_ends_that_command_and_no_other(shell, box):
    command = THREADS.submit(shell.bash, "sleep 1000", FOREVER)
    with SyncSandboxClient(box.socket) as second:
        until(lambda: is_running(second))
        assert second.ping()["shell_pid"] > 0
        with pytest.raises(SandboxRequestError, match="longer than 4095 bytes"):
            second.send_input("x" * 5000)
        assert second.interrupt()
        ended = command.result(60)
        assert (ended.interrupted, ended.timed_out) == (True, False)
        assert not second.interrupt()
    orphan = "(sleep 0.05 &)"  # the server has to look when it ends
    later = shell.bash(f"{orphan}; sleep 0.2; echo whole")
    assert (later.output, later.interrupted) == ("whole\n", False), "the interrupt was another command's"


# -- reset, limits, environment ----------------------------------------------


@everywhere
def test_reset_gives_a_fresh_shell_whatever_runs(shell, box):
    shell.bash("cd /usr; X=1; trap '' INT TERM HUP; setsid sleep 1000 & nohup sleep 1000 >/dev/null 2>&1 &")
    stubborn = "trap '' INT TERM HUP; (trap '' INT TERM HUP; sleep 1000); sleep 1000"
    command = THREADS.submit(shell.bash, stubborn, FOREVER)
    with SyncSandboxClient(box.socket) as second:
        until(lambda: is_running(second))
        result = second.reset()
        assert (result.shell_restarted, result.exit_code, result.cwd) == (True, 0, box.workspace)
        ended = command.result(60)
        assert (ended.interrupted, ended.shell_restarted) == (True, True)
        result = second.bash("echo ${X-unset} $GREETING; pwd; trap -p; jobs")
        assert result.output == f"unset good day\n{box.workspace}\n"
        assert not result.shell_restarted


def test_ctrl_c_is_heard_in_sandboxes_of_a_host_that_ignores_it(state, runtime):
    """As one does that was started by `nohup rollout up &`."""
    ignored = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        host = SyncHostClient(state)
        info = host.start(SandboxSpec(runtime=runtime))
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
    with SyncSandboxClient(info.socket) as shell:
        assert shell.bash("trap -p").output == ""
        assert shell.bash(
            "python3 -c 'import signal; print(signal.getsignal(signal.SIGINT))'"
        ).output.startswith("<built-in function default_int_handler>")
    assert host.release(info.id)


@everywhere
def test_reset_ends_daemons(shell, box):
    before = len(processes.descendants(box.pid))
    shell.bash("for i in 1 2 3; do (setsid sleep 1000 &); done")
    until(lambda: len(processes.descendants(box.pid)) >= before + 3)
    shell.reset()
    until(lambda: len(processes.descendants(box.pid)) == before)


@everywhere
@pytest.mark.parametrize(
    "wedge", ["kill -STOP $$", "exec sleep 1000", "exec 0</dev/zero", "set -r; sleep 1000"]
)
def test_reset_works_when_the_shell_is_wedged(shell, wedge):
    shell.bash(wedge, 0.5, on_timeout="keep")
    assert shell.reset().shell_restarted
    assert shell.bash("echo next").output == "next\n"


# Without a namespace the limit counts all processes of the machine's user.
@pytest.mark.parametrize("box", ["apptainer", "bubblewrap"], indirect=True)
def test_reset_ends_a_fork_bomb_that_holds_all_processes(shell, box):
    before = len(processes.descendants(box.pid))
    bomb = "ulimit -u 60; bomb() { bomb | bomb & }; bomb; sleep 1000"
    shell.bash(bomb, 60, on_timeout="keep", quiet_timeout=1)
    assert shell.reset().shell_restarted
    until(lambda: len(processes.descendants(box.pid)) <= before)
    assert shell.bash("bash -c 'echo can fork'").output == "can fork\n"


@everywhere
def test_a_breach_is_told_with_the_command_that_it_ended(shell, box):
    command = THREADS.submit(shell.bash, "echo begun; sleep 1000", FOREVER)
    with SyncSandboxClient(box.socket) as second:
        until(lambda: is_running(second))
    ask(box, "breach", kind="memory", message="memory limit: 9 of 8 MiB")
    ended = command.result(60)
    assert ended.limit_exceeded == "memory limit: 9 of 8 MiB"
    assert (ended.exit_code, ended.shell_restarted) == (137, True)
    result = shell.bash("echo next")
    assert (result.output, result.limit_exceeded, result.shell_restarted) == ("next\n", None, False)


@everywhere
def test_a_breach_while_nothing_runs_is_told_with_the_next_command(shell, box):
    ask(box, "breach", kind="disk", message="disk limit")
    result = shell.bash("echo next")
    assert (result.output, result.exit_code) == ("next\n", 0)
    assert (result.limit_exceeded, result.shell_restarted) == ("disk limit", True)
    assert shell.bash("true").limit_exceeded is None


@everywhere
def test_a_breach_ends_a_command_that_was_left_running(shell, box):
    shell.bash("cat", **KEEP)
    ask(box, "breach", kind="processes", message="processes limit")
    result = shell.send_input("x")
    assert (result.exit_code, result.running, result.input_sent) == (137, False, False)
    assert (result.limit_exceeded, result.shell_restarted) == ("processes limit", True)
    assert shell.bash("echo next").output == "next\n"


def test_variables_are_added_to_this_shell_and_to_those_that_follow(shell):
    shell.setup({"ADDED_1": "x 'y'\n\"$z\"", "EMPTY": ""})
    shown = 'printf "%s|%s|" "$ADDED_1" "${EMPTY-unset}"; env | grep -c ^ADDED_1'
    assert shell.bash(shown).output == "x 'y'\n\"$z\"||1\n"
    shell.reset()
    assert shell.bash(shown).output == "x 'y'\n\"$z\"||1\n"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"1X": "a"}, "'1X'"),
        ({"A B": "a"}, "'A B'"),
        ({"": "a"}, "''"),
        ({"A": "a\0b"}, "A: .* NUL"),
        ({"A": 3}, "A: its value must be text"),
        ({"BASHOPTS": "x"}, "readonly"),
    ],
)
def test_variables_that_cannot_be_are_refused(shell, env, message):
    with pytest.raises(SandboxRequestError, match=message):
        shell.setup({"FINE": "1", **env})
    assert shell.bash("echo next").output == "next\n"


def test_limits_of_a_call_are_checked(shell):
    with pytest.raises(SandboxRequestError, match="on_timeout"):
        shell.bash("true", on_timeout="ask")
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SandboxRequestError, match="quiet_timeout"):
            shell.bash("true", on_timeout="keep", quiet_timeout=seconds)
