"""Over random inputs: output comes back as it was, and scripts act as in a plain bash."""

from __future__ import annotations

import os
import re
import shlex

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.blocking import SyncSandboxClient
from tests.sandbox.conftest import sandbox_on

# Derandomised, so that a run in CI says something about the change and not about the dice. For a search set
# HYPOTHESIS_EXAMPLES to a large number: the seed of a failure is printed.
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "30"))
fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize="HYPOTHESIS_EXAMPLES" not in os.environ,
    print_blob=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


box = sandbox_on("apptainer", "local-unsafe")


@pytest.fixture(scope="module")
def shell(box):
    with SyncSandboxClient(box.socket) as client:
        yield client


@pytest.fixture(scope="module")
def nonce(shell):
    """What the shell's own markers carry; nothing keeps it from the agent."""
    return re.search(r"036([0-9a-f]{16});", shell.bash("declare -f __sbx_say").output)[1].encode()


# -- output ----------------------------------------------


@fuzzed
@given(data=st.binary(max_size=3000), cap=st.integers(2, 4000))
def test_random_bytes_come_back_as_documented_and_are_counted(shell, data, cap):
    shell.write_file("data", data)
    result = shell.bash("cat data", max_output_chars=cap)
    whole = data.decode("utf-8", "replace")
    assert (result.exit_code, result.late_output) == (0, "")
    assert result.truncated == (len(whole) > cap)
    if not result.truncated:
        assert result.output == whole
        return
    head, left_out, total, tail = re.fullmatch(
        r"(?s)(.*)\n\[\.\.\. (\d+) of (\d+) bytes left out \.\.\.\]\n(.*)", result.output
    ).groups()
    assert int(total) == len(data)
    assert len(head) <= cap // 2
    assert len(tail) <= cap // 2
    # Which bytes a text stands for is not always clear where they are not UTF-8; some reading must fit.
    begin = [size for size in range(len(data) + 1) if data[:size].decode("utf-8", "replace") == head]
    end = [
        size for size in range(len(data) + 1) if data[len(data) - size :].decode("utf-8", "replace") == tail
    ]
    assert int(left_out) in {len(data) - first - last for first in begin for last in end}


PIECES = ["\x1e", ";", "e;", "b;", "NONCE", "NONC", "\x1eNONCE;", ";NONCE\x1e", "7;", "0;", "/", "\n", "x"]


@fuzzed
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), gaps=st.booleans())
def test_markers_and_pieces_of_them_are_output(shell, nonce, pieces, gaps):
    parts = [piece.encode().replace(b"NONCE", nonce) for piece in pieces]
    for number, part in enumerate(parts):
        shell.write_file(f"part{number}", part)
    names = " ".join(f"part{number}" for number in range(len(parts)))
    # In separate writes the scanner gets to see every prefix.
    show = f"for part in {names}; do cat $part; done" if gaps else f"cat {names} </dev/null"
    result = shell.bash(f"{show}; (exit 3)", 60)
    whole = b"".join(parts)
    assert not re.search(rb"\x1e%s;[be];" % nonce, whole) or result.exit_code == 3
    assert (result.output.encode(), result.exit_code, result.late_output) == (whole, 3, "")
    assert shell.bash("echo next").output == "next\n"


# -- scripts ----------------------------------------------

WORDS = ["x", "y z", "", "0", "7", "*", "a\nb", "$A", "'", "\u00fc", "-n"]
# In these: N a variable, W a quoted word, E an exit code, and S a statement again.
_SIMPLE_LINES = """
N=W|export N=W|N+=W|N=(W W)|declare -i N=3+4|unset N|: ${N:=set}
echo "$N" $N $?|printf '%s,' "${N[@]}" ${#N}|test -n "$N"|echo $?|set -- W W; echo $# $1
f() { echo in f $1 $N; return $2; }|f W E|(exit E)|true|false|! true|no-such-command|sh -c 'exit E'
echo W >>file|cat file|cat <nofile|wc -l <file|ls|pwd|echo *|kill -9 $BASHPID & wait $!|: # nothing
mkdir -p d1/d2|cd d1|cd ..|cd no-such-directory|cd ./d1/d2
"""
SIMPLE = [*_SIMPLE_LINES.strip().replace("\n", "|").split("|"), "cat <<EOF\n$N\nEOF"]
COMPOUND = [
    "if S\nthen\nS\nelse\nS\nfi",
    "for i in 1 2\ndo\nS\ndone",
    "(\nS\n)",
    "{\nS\n} | cat",
    "{\nS\n} && {\nS\n}",
    "{\nS\n} || {\nS\n}",
    "S\nS",
    "N=$(\nS\n)",
    "{\nS\n} >out; cat out",
    "case $A in\n*x*)\nS\n;;\n*)\nS\nesac",
]


@st.composite
def statements(draw, depth=2):
    """A small script, of compound commands nested so deep."""
    template = draw(st.sampled_from(SIMPLE + COMPOUND if depth else SIMPLE))
    fill = {
        "N": lambda: draw(st.sampled_from("ABC")),
        "W": lambda: shlex.quote(draw(st.sampled_from(WORDS))),
        "E": lambda: str(draw(st.integers(0, 255))),
        "S": lambda: draw(statements(depth - 1)),
    }
    return re.sub(r"\b[NWES]\b", lambda match: fill[match[0]](), template)


COMMANDS = st.lists(statements(), min_size=1, max_size=6)
STATE = "declare -p A B C; declare -f f; pwd; cat file"
BETWEEN = 'code=$?; printf "\\036%s\\036" "$code"; (exit "$code")\n'


@fuzzed
@given(commands=COMMANDS)
def test_scripts_act_as_in_a_plain_bash(shell, commands):
    script = "".join(f"{command}\n{BETWEEN}" for command in [*commands, STATE])
    workspace = shell.reset().cwd
    shell.bash("rm -rf one two; mkdir -p one/p/q/r/s two/p/q/r/s")
    shell.write_file("script", script)
    # Messages name the file and line of a command, and what they are is not the shell's to keep.
    plain = shell.bash(f"(cd two/p/q/r/s; bash --norc --noprofile {workspace}/script 2>/dev/null)", 60).output
    expected = plain.replace("/two/", "/one/").split("\x1e")
    shell.bash("exec 2>/dev/null; cd one/p/q/r/s; unset A B C; true")
    lines = []
    for command in [*commands, STATE]:
        result = shell.bash(command, 60)
        assert (result.timed_out, result.shell_restarted, result.truncated) == (False, False, False)
        lines += [result.output, str(result.exit_code)]
    assert [*lines, ""] == expected
