"""What an agent sees of the shell, the same on every runtime."""

from __future__ import annotations

import re
import threading
import time

import pytest

from sandbox.errors import SandboxRequestError
from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, exchange
from tests.sandbox.conftest import why_not


@pytest.fixture(scope="module", params=["apptainer", "bubblewrap", "local-unsafe"])
def shell(request, shared_state):
    if request.param != "local-unsafe" and (reason := why_not(request.param)):
        pytest.skip(reason)
    host = SyncHostClient(shared_state)
    info = host.start(
        SandboxSpec(runtime=request.param, env={"GREETING": "good day"}, files={"a/b.txt": "hi\n"})
    )
    assert info.runtime == request.param
    with SyncSandboxClient(info.socket) as client:
        yield client
    assert host.release(info.id)


@pytest.fixture(autouse=True)
def at_home(shell):
    yield
    shell.bash("cd ~")


def test_directory_variables_and_functions_persist(shell):
    shell.bash("mkdir -p ~/deep; cd ~/deep; COUNT=41; export SEEN=yes; add() { echo $((COUNT + $1)); }")
    result = shell.bash('pwd; add 1; bash -c "echo $SEEN"')
    assert result.output.splitlines()[1:] == ["42", "yes"]
    assert result.cwd.endswith("/deep")
    assert result.output.startswith(result.cwd)
    assert result.previous_cwd == result.cwd != shell.bash("cd ~").cwd
    assert shell.bash(":").previous_cwd == shell.bash(":").cwd


def test_exit_code_is_that_of_the_last_command_and_can_be_asked_for(shell):
    assert shell.bash("true; false").exit_code == 1
    assert shell.bash("echo $?").output == "1\n"
    assert shell.bash("(exit 7)").exit_code == 7


def test_configured_environment_and_files_are_there(shell):
    result = shell.bash("cd - >/dev/null 2>&1; echo $GREETING; echo $PAGER; echo ${LD_PRELOAD-none}")
    assert result.output == "good day\ncat\nnone\n"
    assert shell.read_file("a/b.txt") == b"hi\n"


def test_several_lines_heredoc_and_a_very_long_line(shell):
    assert shell.bash("for i in 1 2\ndo\n  echo $i\ndone\n\necho end").output == "1\n2\nend\n"
    body = "".join(f"line {i} $NOT `expanded`\n" for i in range(3000))
    assert shell.bash(f"cat <<'EOF' | md5sum\n{body}EOF").exit_code == 0
    assert shell.bash(f"cat <<'EOF' | wc -l\n{body}EOF").output == "3000\n"
    assert shell.bash("echo " + "x" * 20_000 + " | wc -c").output == "20001\n"


@pytest.mark.parametrize("command", ["echo 'open", "if true; then", "echo $(", "cat <<EOF\nno end"])
def test_unfinished_commands_end_with_an_error_and_leave_the_shell_in_order(shell, command):
    shell.bash(command, timeout=5)
    result = shell.bash("echo fine")
    assert (result.output, result.exit_code) == ("fine\n", 0)


def test_exit_restarts_the_shell_and_keeps_code_and_directory(shell):
    result = shell.bash("cd /usr; echo bye; sleep 60 & exit 3")
    assert (result.exit_code, result.shell_restarted) == (3, True)
    assert result.output.startswith("bye\n")
    result = shell.bash("pwd")
    assert result.exit_code == 0
    assert not result.shell_restarted


def test_strictness_of_one_command_does_not_end_the_next(shell):
    assert shell.bash("set -eu; false").shell_restarted
    shell.bash("set -eu")
    assert shell.bash("false; echo $undefined; echo still here").output.endswith("still here\n")


def test_timeout_gives_the_output_so_far_and_the_shell_lives_on(shell):
    shell.bash("KEPT=1")
    began = time.monotonic()
    result = shell.bash("echo before; sleep 60; echo after", timeout=0.3)
    assert time.monotonic() - began < 20
    assert result.timed_out
    assert "before" in result.output
    assert "after" not in result.output
    assert not result.shell_restarted
    assert shell.bash("echo $KEPT").output == "1\n"


def test_a_command_that_ignores_signals_is_killed(shell):
    result = shell.bash("bash -c 'trap \"\" INT TERM HUP; echo stubborn; sleep 60; sleep 60'", timeout=0.3)
    assert result.timed_out
    assert "stubborn" in result.output
    assert result.duration_s < 20
    assert shell.bash("echo ok").output == "ok\n"


@pytest.mark.parametrize("command", ["while :; do :; done", "cat", "read x", "stty raw; sleep 60"])
def test_endless_builtins_and_readers_are_interrupted(shell, command):
    assert shell.bash(command, timeout=0.3).timed_out
    assert shell.bash("echo ok").output == "ok\n"


def test_an_interrupted_command_that_broke_the_prompt_costs_no_shell(shell):
    assert shell.bash("x=kept; PROMPT_COMMAND=; while :; do sleep 1; done", timeout=0.3).timed_out
    after = shell.bash("echo $x")
    assert (after.output, after.shell_restarted) == ("kept\n", False)


def test_long_output_keeps_head_and_tail(shell):
    result = shell.bash("echo first; yes middle | head -c 20000000; echo last", timeout=20)
    assert result.truncated
    assert len(result.output) < 31_000
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")
    assert "bytes left out" in result.output
    assert shell.bash("seq 2000").output == "".join(f"{i}\n" for i in range(1, 2001))


def test_binary_output_does_not_disturb_the_shell(shell):
    result = shell.bash("head -c 300000 /dev/urandom")
    assert (result.exit_code, result.truncated) == (0, True)
    result = shell.bash("printf '\\000\\377\\033[0m\\036;'")
    assert result.output == "\0\N{REPLACEMENT CHARACTER}\x1b[0m\x1e;"


def test_markers_in_the_output_are_output(shell):
    declared = shell.bash('declare -f __sbx_mark; cat "$(dirname "$BASH_SOURCE")"/rc').output
    assert "__sbx_number" in declared
    forged = shell.bash("printf '\\036deadbeef;1;0;/\\036'; echo x")
    assert forged.output == "\x1edeadbeef;1;0;/\x1ex\n"
    assert shell.bash("echo in step").output == "in step\n"
    nonce = re.search(r"036([0-9a-f]{16});", shell.bash("declare -f __sbx_say").output)[1]
    stale = shell.bash(f"printf '\\036{nonce};e;1;7;/;{nonce}\\036'; echo second; (exit 3)")
    assert (stale.output, stale.exit_code) == ("second\n", 3), "an earlier command's end is not this one's"


def test_background_job_returns_at_once_and_speaks_later(shell):
    result = shell.bash("{ while ! [ -e ~/speak ]; do sleep 0.05; done; echo late; touch ~/spoke; } &")
    assert (result.exit_code, result.output) == (0, "")
    assert (
        "late" in shell.bash("touch ~/speak; while ! [ -e ~/spoke ]; do sleep 0.05; done; rm ~/sp*k*").output
    )


def test_a_shell_that_a_background_job_has_stopped_goes_on_with_the_next_command(shell):
    wait = "while [ ! -e armed ]; do sleep 0.02; done"
    home = shell.bash(f"cd ~; ({wait}; kill -STOP $$; touch stopped) &").cwd
    shell.write_file(f"{home}/armed", "")
    deadline = time.monotonic() + 10
    while shell.stat(f"{home}/stopped").kind is None:
        assert time.monotonic() < deadline, "the shell was not stopped"
        time.sleep(0.02)
    result = shell.bash("rm armed stopped; echo on", timeout=5)
    assert (result.output.splitlines()[-1], result.timed_out) == ("on", False)


def test_redirecting_the_shell_itself_or_its_prompt_does_not_lose_it(shell):
    shell.bash("exec >/dev/null 2>&1")
    shell.bash("exec >/dev/tty 2>&1")
    shell.bash("PROMPT_COMMAND=; PS1='prompt> '")
    assert shell.bash("echo ok", timeout=5).output == "ok\n"


def test_a_second_connection_interrupts_and_types(shell):
    results = []
    worker = threading.Thread(
        target=lambda: results.append(shell.bash("read name; echo hello $name; sleep 60"))
    )
    worker.start()
    _until_running(shell)
    assert shell.ping()["shell_pid"] > 0
    with pytest.raises(SandboxRequestError, match="longer than 4095 bytes"):
        shell.send_input("x" * 5000)
    shell.send_input("you\n")
    time.sleep(0.1)
    assert shell.interrupt()
    worker.join(5)
    assert "hello you" in results[0].output
    assert results[0].interrupted
    assert not results[0].timed_out
    assert not shell.interrupt()
    with pytest.raises(SandboxRequestError, match="no command is running"):
        shell.send_input("x")
    orphan = "(sleep 0.05 &)"  # the server has to look when it ends
    later = shell.bash(f"{orphan}; sleep 0.2; echo whole")
    assert (later.output, later.interrupted) == ("whole\n", False), "the interrupt was another command's"


def _until_running(shell):
    """Typing succeeds only while a command runs."""
    for _ in range(200):
        try:
            return shell.send_input("")
        except SandboxRequestError:
            time.sleep(0.01)
    raise AssertionError("the command did not start")


def test_files_are_read_and_written_exactly(shell):
    content = bytes(range(256)) * 100
    shell.write_file("new/dir/data.bin", content, mode=0o755)
    assert shell.read_file("new/dir/data.bin") == content
    shell.write_file("new/dir/data.bin", content[:300])
    assert shell.read_file("new/dir/data.bin") == content[:300], "nothing is left of what was longer"
    with pytest.raises(SandboxRequestError, match="No such file"):
        shell.read_file("absent")
    with pytest.raises(SandboxRequestError, match="not a regular file"):
        shell.read_file("/dev/zero")
    with pytest.raises(SandboxRequestError, match="at most 10"):
        shell.read_file("new/dir/data.bin", max_bytes=10)


def test_a_nul_character_and_an_unknown_operation_are_refused(shell):
    with pytest.raises(SandboxRequestError, match="NUL"):
        shell.bash("echo \0")
    with pytest.raises(SandboxRequestError, match="unknown operation"):
        exchange(shell._address, {"op": "nonsense"}, 5)
