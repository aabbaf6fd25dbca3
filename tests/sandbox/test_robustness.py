"""What people and models type at a shell: the exact outcome, and that the next command works."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from sandbox.errors import SandboxError, SandboxRequestError
from tests.helpers.blocking import SyncSandboxClient, exchange, sandbox_of
from tests.sandbox.conftest import sandbox_on

LONG = 120.0
"""Seconds; nothing that is to end by itself needs so long on the slowest machine."""
SHORT = 0.5
"""Seconds for what does not end by itself."""
BEGUN = 2.0
"""Seconds for what does not end by itself, but has to have begun as a program of its own before its end."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A command and what must come of it."""

    name: str
    command: str
    output: object = ""
    """The exact text, or a function that judges it."""
    code: int = 0
    restarted: bool = False
    endless: bool = False
    """The command is stopped by its time limit."""
    limit_s: float = SHORT
    """Its time limit, if it is endless."""
    cut: bool = False
    then: tuple[tuple[str, str], ...] = ()
    """Commands that follow and their exact output, before the one that all cases end with."""
    lasting: bool = False
    """It does to the shell what only a reset undoes, as it would in any terminal."""


def has(*parts):
    """The output contains all of these, in this order."""

    def judge(output):
        at = 0
        for part in parts:
            at = output.index(part, at) + len(part)
        return True

    return judge


def ends(part):
    """The output ends so."""
    return lambda output: output.endswith(part)


BODY = "".join(f"line {i} $NOT `expanded` 'q\" \\\n" for i in range(3000))
STUBBORN = "bash -c 'trap \"\" INT TERM HUP; echo stubborn; sleep 1000; sleep 1000'"

CASES = [
    # -- text of commands
    Case("two lines", "echo one\necho two", "one\ntwo\n"),
    Case("heredoc of 3,000 lines", f"cat <<'EOF' | tail -n 1 | cut -c 1-9\n{BODY}EOF", "line 2999\n"),
    Case("line of 20 kB", "echo " + "x" * 20_000, "x" * 20_000 + "\n"),
    Case("line of 1 MB", ": " + "x" * 1_000_000 + "; echo done", "done\n"),
    Case("unbalanced quote", "echo 'open", has("unexpected EOF"), 2),
    Case("unbalanced double quote and parenthesis", 'echo "$(', has("unexpected EOF"), 2),
    Case("unfinished if", "if true; then", has("syntax error"), 2),
    Case("unfinished heredoc", "cat <<EOF\nno end", has("delimited by end-of-file", "no end\n")),
    Case("line continued past the end", "echo a \\", "a\n"),
    Case("comment only", "# nothing"),
    Case("empty", ""),
    Case("only blanks", " \n\t\n  "),
    Case("exclamation marks", "echo 'hi!' \"wow!x\" !$", "hi! wow!x !$\n"),
    Case("line ends of Windows", "echo a\r\necho b\r", "a\r\nb\r\n"),
    Case("a heredoc keeps line ends of Windows", "cat <<X | od -An -c | tr -d ' \\n'\na\r\nX", "a\\r\\n"),
    Case("unicode", "echo 'ünï €𝄞'; x=ü; echo ${#x}", "ünï €𝄞\n1\n"),
    Case("no line end", "printf word", "word"),
    Case("return outside of a function", "echo a; return 5; echo b", "a\n", 5),
    Case("background first", "sleep 0 & wait; echo a", ends("a\n")),
    # -- output
    Case(
        "50 MB",
        "echo first; yes middle | head -c 50000000; echo last",
        lambda output: output.startswith("first\n") and output.endswith("last\n") and len(output) < 31_000,
        cut=True,
    ),
    Case("2,000 lines", "seq 2000", "".join(f"{number}\n" for number in range(1, 2001))),
    Case("300 kB binary", "head -c 300000 /dev/urandom", has("of 300000 bytes left out"), cut=True),
    Case("3 MB without a line end", "head -c 3000000 /dev/zero | tr '\\0' x", ends("x"), cut=True),
    Case("escape sequences", "printf '\\033[31mred\\033[0m\\a\\b'", "\x1b[31mred\x1b[0m\x07\x08"),
    Case("NUL and bytes that are no UTF-8", "printf 'a\\0\\377b'", "a\0\N{REPLACEMENT CHARACTER}b"),
    Case("text like the markers", "printf '\\036abc;e;1;0;/;abc\\036\\036'", "\x1eabc;e;1;0;/;abc\x1e\x1e"),
    Case(
        "the true markers, of another command",
        "n=$(declare -f __sbx_say | grep -o '036[0-9a-f]*;' | head -n 1); n=${n:3:16};"
        ' printf "\\036$n;e;1;9;/;$n\\036"; echo "${#n} x"',
        "16 x\n",
    ),
    Case("a half marker at the end", "printf '\\036'", "\x1e"),
    # -- ends of the shell
    Case("exit", "echo a; exit 3; echo b", "a\n", 3, restarted=True),
    Case("exit in a subshell", "(exit 3)", "", 3),
    Case("set -e and a failure", "set -e; echo a; false; echo b", "a\n", 1, restarted=True),
    Case("set -e without a failure", "set -e", then=(("false; echo on", "on\n"),)),
    Case("exit with a background job", "sleep 1000 & exit 4", has(""), 4, restarted=True),
    Case("exec of a program", "exec echo gone", "gone\n", 0, restarted=True),
    Case("exec of what is not there", "exec /no/such", has("No such file"), 127, restarted=True),
    Case("exec of a program that leaves the terminal", "exec setsid sleep 1000 <&- >&- 2>&-", restarted=True),
    Case("kill -9 of the shell", "kill -9 $$", "", 137, restarted=True),
    Case("EXIT trap", "trap 'echo bye' EXIT; exit 4", "bye\n", 4, restarted=True),
    Case("file size limit of 0", "ulimit -f 0; echo x >~/file", "", 153, restarted=True),
    # -- commands that do not end
    Case("sleep", "echo a; sleep 1000; echo b", has("a\n"), 130, endless=True),
    Case("cat", "cat", has(""), 130, endless=True),
    Case("endless loop of builtins", "while :; do :; done", has(""), 130, endless=True),
    Case("endless output", "yes", has("y\ny\n", "left out"), 130, endless=True, limit_s=BEGUN, cut=True),
    Case("pipeline", "sleep 1000 | cat", has(""), 130, endless=True),
    Case("ignores INT and TERM", STUBBORN, has("stubborn\n"), 137, endless=True, limit_s=BEGUN),
    Case(
        "ignores them, with more to do after",
        f"{STUBBORN}; sleep 1000; echo no",
        has("stubborn\n"),
        130,
        endless=True,
        limit_s=BEGUN,
    ),
    Case(
        "the shell ignores INT",
        "trap '' INT; sleep 1000",
        has(""),
        143,
        endless=True,
        then=(("trap - INT", ""),),
    ),
    Case(
        "a trap for INT",
        "trap 'echo caught' INT; sleep 1000; echo on",
        ends("on\n"),
        endless=True,
        then=(("trap - INT", ""),),
    ),
    Case("pager", "seq 1000 | less", has(""), None, endless=True),
    Case("password prompt", "read -s -p 'Password: ' p </dev/tty", has("Password: "), 130, endless=True),
    Case("raw terminal", "stty raw -isig -echo; sleep 1000", has(""), 130, endless=True),
    Case("stops the shell", "kill -STOP $$", has(""), 130, endless=True),
    Case("suspends the shell", "suspend -f", has(""), 130, endless=True),
    Case("without job control", "set +m; sleep 1000", has(""), 130, endless=True, then=(("set -m", ""),)),
    Case(
        "PROMPT_COMMAND lost on the way", "readonly PROMPT_COMMAND=:; sleep 1000", has(""), 130, endless=True
    ),
    Case(
        "PROMPT_COMMAND emptied on the way",
        "x=kept; PROMPT_COMMAND=; while :; do sleep 1; done",
        has(""),
        None,
        endless=True,
        then=(("echo $x", "kept\n"),),
    ),
    Case(
        "exec of another shell",
        "exec bash --norc",
        has(""),
        137,
        endless=True,
        limit_s=BEGUN,
        restarted=True,
    ),
    # -- background
    Case("job that holds the terminal", "sleep 1000 & disown; echo a", ends("a\n")),
    Case(
        "daemons",
        "(setsid sleep 1000 & nohup sleep 1000 >/dev/null 2>&1 & sleep 1000 &); echo a",
        ends("a\n"),
    ),
    Case(
        "job that reads the terminal",
        "cat & wait; jobs",
        has("Stopped"),
        then=(("disown %%", None),),
    ),
    # -- what changes the shell
    Case("raw terminal left behind", "stty raw -echo", then=(("printf 'a\\nb\\n'", "a\nb\n"),)),
    Case("set -u", "set -u", then=(("echo [$undefined]", "[]\n"),)),
    Case(
        "set -u and an unset variable",
        "set -u; echo $undefined",
        has("unbound variable"),
        1,
        then=(("echo a", "a\n"),),
    ),
    Case(
        "set -x",
        "set -x",
        then=(
            ("echo a 2>/dev/null", "+ builtin . CMD\n++ echo a\na\n"),
            ("set +x", "+ builtin . CMD\n++ set +x\n"),
        ),
    ),
    Case("set -v", "set -v", then=(("echo a", "a\n"),)),
    Case("set -n", "set -n", then=(("echo a", "a\n"),)),
    Case("set -f and noclobber", "set -fC; echo *", "*\n", then=(("set +fC", ""),)),
    Case("posix mode", "set -o posix; echo ${a:?unset}", has("a: unset"), 1, then=(("set +o posix", ""),)),
    Case("DEBUG trap", "trap 'echo dbg' DEBUG; :", ends("dbg\n"), then=(("echo a", "a\n"),)),
    Case(
        "ERR trap",
        "trap 'echo err' ERR; false",
        "err\n",
        1,
        then=(("true", ""), ("trap - ERR", ""), ("false; echo a", "a\n")),
    ),
    Case("RETURN trap", "trap 'echo ret' RETURN", "ret\n", then=(("echo a", "a\n"),)),
    Case("PROMPT_COMMAND and PS1", "PROMPT_COMMAND='echo p'; PS1='> '", then=(("echo a", "a\n"),)),
    Case("PROMPT_COMMAND as an array", "PROMPT_COMMAND=('echo p' 'echo q')", then=(("echo a", "a\n"),)),
    Case("PROMPT_COMMAND read-only", "readonly PROMPT_COMMAND='echo p'", then=(("echo a", "a\n"),)),
    Case("PS1 read-only", "readonly PS1='> '", then=(("echo a", "a\n"),)),
    Case("unset of our functions", "unset -f __sbx_mark", has("cannot unset"), 1),
    Case("aliases of builtins", "alias builtin=false printf=false .=false local=false return=false"),
    Case(
        "functions named as builtins",
        "printf() { :; }; set() { :; }; read() { :; }; unset() { :; }; return() { :; }",
    ),
    Case("IFS", "IFS=0123456789", then=(("echo $?", "\n"), ("unset IFS", ""))),
    Case(
        "cd into a directory and its removal",
        "mkdir ~/d; cd ~/d; rmdir ~/d; echo here",
        "here\n",
        then=(("cd", ""),),
    ),
    Case("PWD set by hand", "PWD=/nowhere; echo a", "a\n", then=(("cd", ""),)),
    Case(
        "output of the shell to a file",
        "exec >~/f",
        then=(("echo a", ""), ("exec >/dev/tty", ""), ("cat ~/f", "a\n")),
    ),
    Case("output of the shell closed", "exec 1>&- 2>&-", then=(("exec >/dev/tty 2>&1", ""),)),
    Case("all of the shell closed", "exec 0<&- 1>&- 2>&-", lasting=True),
    Case("input of the shell from a file", "exec </dev/null", lasting=True),
    Case("no more descriptors", "ulimit -n 3", has("Too many open files"), 1, lasting=True),
    Case("restricted shell", "set -r", has("restricted"), 1, lasting=True),
    Case("our files replaced by a pipe", "rm $BASH_SOURCE; mkfifo $BASH_SOURCE"),
]
# To the shell bubblewrap is as Apptainer; with local-unsafe it has no PID namespace of its own.
box = sandbox_on("apptainer", "local-unsafe", env={"GREETING": "good day"}, files={"a/b.txt": "hi\n"})


@pytest.fixture
def shell(box):
    with SyncSandboxClient(box.socket) as client:
        yield client
        client.reset()  # whatever a case left to the shell is no matter of the next one


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_outcome_is_exact_and_the_next_command_works(shell, case):
    command_file = shell.bash("echo $BASH_SOURCE").output.strip()
    result = shell.bash(case.command, case.limit_s if case.endless else LONG)
    if callable(case.output):
        assert case.output(result.output)
    else:
        assert result.output == case.output
    if case.code is not None:
        assert result.exit_code == case.code
    assert result.timed_out == case.endless
    assert result.truncated == case.cut
    if not case.lasting:
        assert result.shell_restarted == case.restarted
    else:
        shell.bash("echo whatever", LONG)
        shell.reset()
    for command, output in case.then:
        result = shell.bash(command, LONG)
        assert not result.timed_out
        assert not result.shell_restarted
        if output is not None:
            assert result.output == output.replace("CMD", command_file)
    result = shell.bash("\\builtin echo next; (\\builtin exit 6)", LONG)
    assert (result.output, result.exit_code, result.timed_out) == ("next\n", 6, False)
    assert not result.shell_restarted


@pytest.mark.parametrize("box", ["apptainer", "bubblewrap", "local-unsafe"], indirect=True)
def test_directory_variables_and_functions_persist(shell):
    assert shell.bash("echo $GREETING; echo $PAGER; echo ${LD_PRELOAD-none}; cat a/b.txt").output == (
        "good day\ncat\nnone\nhi\n"
    )
    shell.bash("mkdir -p ~/deep; cd ~/deep; COUNT=41; export SEEN=yes; add() { echo $((COUNT + $1)); }")
    result = shell.bash('pwd; add 1; bash -c "echo $SEEN"; (exit 7)')
    assert result.output == f"{result.cwd}\n42\nyes\n" and result.exit_code == 7
    assert shell.bash("echo $?").output == "7\n"
    assert result.cwd.endswith("/deep")
    assert result.previous_cwd == result.cwd != shell.bash("cd ~").cwd
    assert shell.bash(":").previous_cwd == shell.bash(":").cwd


def test_a_shell_that_a_background_job_has_stopped_goes_on_with_the_next_command(shell):
    shell.bash("rm -f armed said; (while ! [ -e armed ]; do sleep 0.02; done; kill -STOP $$; touch said) &")
    shell.write_file("armed", "")
    _until_said(shell)
    result = shell.bash("rm armed said; echo on", LONG)
    assert (result.output.splitlines()[-1], result.timed_out) == ("on", False)


# Without a namespace the limit does not hold for root.
@pytest.mark.parametrize("box", ["apptainer"], indirect=True)
def test_at_the_process_limit_builtins_work_and_the_rest_is_stopped(shell):
    result = shell.bash("ulimit -Su 1; echo built in; /bin/true", SHORT)
    assert result.timed_out  # bash tries again and again
    assert result.output.startswith("built in\n")
    assert "fork: retry" in result.output
    assert shell.bash("ulimit -Su hard; /bin/echo next").output == "next\n"


def test_a_nul_and_half_a_surrogate_are_refused(shell):
    for text, message in (("echo \0", "NUL"), ("echo \ud800", "surrogates not allowed")):
        with pytest.raises(SandboxRequestError, match=message):
            shell.bash(text)
    assert shell.bash("echo next").output == "next\n"
    with pytest.raises(SandboxRequestError, match="unknown operation"):
        exchange(shell.address, {"op": "nonsense"}, 5)


def test_the_directory_is_told_whatever_its_name(shell):
    for name in (b"plain", b"with;semi\ncolon", b"\x1e\x1e;", b"\xff\xfe", "\u00fc \u20ac".encode()):
        quoted = "$'" + "".join(f"\\x{byte:02x}" for byte in name) + "'"
        result = shell.bash(f"mkdir -p ~/dirs/{quoted} && cd ~/dirs/{quoted}")
        assert result.exit_code == 0
        assert os.fsencode(result.cwd).endswith(b"/dirs/" + name)
    result = shell.bash("rm -r ~/dirs; echo a")
    assert (result.output, result.exit_code) == ("a\n", 0)
    assert os.fsencode(result.cwd).endswith(b"/dirs/" + name)
    shell.bash("cd /usr/bin/..")
    assert shell.bash("exit").cwd == "/usr"


def test_a_symbolic_link_stays_in_the_directory_as_in_the_shell(shell):
    result = shell.bash("mkdir -p ~/real; ln -sfn ~/real ~/link; cd ~/link; pwd")
    assert result.cwd.endswith("/link")
    assert result.output == result.cwd + "\n"
    assert shell.bash("cd -P .").cwd.endswith("/real")


def test_a_shell_that_dies_between_commands_is_replaced_and_that_is_told(shell):
    shell.bash("X=1; cd /usr; rm -f ~/go; (while ! [ -e ~/go ]; do sleep 0.05; done; kill -9 $$) &")
    result = shell.bash("touch ~/go")
    while not result.shell_restarted:
        result = shell.bash("echo ${X-lost}; pwd")
    # It may die before, in or just after the last command.
    assert (result.output, result.exit_code) in [
        *(("lost\n/usr\n", 0), ("", 0)),
        *((("1\n/usr\n")[:length], code) for length in (0, 1, 2, 7) for code in (0, 137)),
    ]
    result = shell.bash("echo ${X-lost}; pwd")
    assert (result.output, result.shell_restarted) == ("lost\n/usr\n", False)


def test_a_command_that_a_shell_about_to_end_never_began_is_run_by_the_next_one(shell):
    assert shell.bash("trap 'sleep 1' EXIT; exec </dev/null").exit_code == 0
    result = shell.bash("echo run | tee -a once", timeout=60)
    assert (result.output, result.exit_code, result.shell_restarted) == ("run\n", 0, True)
    assert shell.bash("cat once").output == "run\n"


def test_a_shell_that_logs_itself_out_is_replaced(shell):
    pid = shell.ping()["shell_pid"]
    shell.bash("TMOUT=1; X=1")
    time.sleep(1.5)  # it may last longer; then the loop asks again
    result = shell.bash("echo ${X-lost}")
    while not result.shell_restarted:
        assert result.output == "1\n"
        time.sleep(1.5)
        result = shell.bash("echo ${X-lost}")
    assert (result.output, result.exit_code) == ("lost\n", 0)
    assert "auto-logout" in result.late_output
    assert shell.ping()["shell_pid"] != pid


def test_background_jobs_speak_between_commands_and_are_labelled(shell):
    shell.bash("rm -f go; (while ! [ -e go ]; do sleep 0.05; done; echo late; touch said) &")
    assert (
        shell.bash("touch go; while ! [ -e said ]; do sleep 0.05; done; echo now").output.count("late\n") == 1
    )
    shell.bash("rm -f go said; (while ! [ -e go ]; do sleep 0.05; done; echo later; touch said) &")
    shell.write_file("go", "")
    _until_said(shell)
    result = shell.bash("echo now")
    assert result.output == "now\n"
    assert "later\n" in result.late_output
    assert "later\n" not in shell.bash("echo again").late_output


def test_late_output_is_bounded_and_does_not_hold_the_job_up(shell):
    shell.bash("rm -f said; (yes | head -c 5000000; touch said) &")
    _until_said(shell)
    result = shell.bash("echo now")
    assert result.output == "now\n"
    assert len(result.late_output) < 5000
    assert "left out" in result.late_output


def _until_said(shell):
    """Wait for a file without asking the shell."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        try:
            shell.read_file("said")
            return
        except SandboxRequestError:
            time.sleep(0.01)
    raise AssertionError("the background job did not come to its end")


def test_a_bash_that_never_speaks_gets_a_second_try(host, tmp_path):
    stand_in = tmp_path / "bash"
    stand_in.write_text(f'#!/bin/sh\nmkdir {tmp_path}/tried && exec sleep 1000\nexec /bin/bash "$@"\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with sandbox_of(host, runtime="local-unsafe", env=environment) as (_, client):
        client.reset()
        assert client.bash("echo ready").output == "ready\n"
        assert (tmp_path / "tried").exists()
        stand_in.write_text("#!/bin/sh\nexit 3\n")
        with pytest.raises(SandboxError, match=r"did not become ready \(exited; process \d+ is .*it said"):
            client.reset()
