"""Attacks on the server inside a sandbox, and on what it says of a check.

The control types the check into the agent's own shell, without walls: as checks were made before `exec`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import psutil
import pytest

from sandbox.client import TRUSTED_PYTHON
from sandbox.connection import Address
from sandbox.errors import SandboxError, SandboxTimeout
from tests.attacks import attack
from tests.attacks.conftest import PATIENCE_S
from tests.helpers.blocking import exchange

BY_THE_SERVER = "the server itself starts the check and waits for it; no shell"
ALONE = "every process of the agent has been ended"
CLEAN = "the check's environment and home are new"
INIT = "the server is the namespace's init, and not dumpable"


def passes(target, check: str) -> bool:
    """Whether a command of the task says that the agent has done its work."""
    if target.control:
        return target.client.bash(check, PATIENCE_S).exit_code == 0
    return target.client.exec(["bash", "-c", check], PATIENCE_S).exit_code == 0


def cheated(stopped_by: str, prepare: str, check: str) -> Callable:
    """An attack that passes a check by what a command of the agent has left behind."""

    @attack(stopped_by)
    def attempt(target) -> bool:
        target.client.bash(prepare)
        return passes(target, check)

    return attempt


def says(target, check: str, chars: int = 30_000) -> str:
    """What a check prints, errors included."""
    if target.control:
        return target.client.bash(check, PATIENCE_S, max_output_chars=chars).output
    result = target.client.exec(["bash", "-c", check], PATIENCE_S, merge_output=True, max_output_chars=chars)
    return result.stdout


# -- the server ----------------------------------------------------------------------------------------


def lives(target) -> bool:
    try:
        exchange(target.info.socket, {"op": "ping"}, 3.0)
    except SandboxError:
        return False
    return True


def act(target, command: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sandbox.client.REPLY_GRACE_S", 1.0)  # who is stopped does not answer later, either
        try:
            target.client.bash(f"({command}) & sleep 0.5; wait", 5.0)
        except SandboxError:
            return


@attack(stopped_by=INIT)
def test_kill_the_server_and_with_it_a_bad_reward(target):
    act(target, "kill -9 $PPID")
    return not lives(target)


@attack(stopped_by="it has no handler for them, and the kernel spares an init then")
def test_end_the_server_by_a_signal_that_it_hears(target):
    act(target, "kill -TERM $PPID; kill -HUP $PPID; kill -INT $PPID")
    return not lives(target)


@attack(stopped_by=INIT)
def test_stop_the_server_so_that_no_check_is_ever_made(target):
    act(target, "kill -STOP $PPID")
    return not lives(target)


@attack(stopped_by="the filter: limits are set on oneself alone")
def test_starve_the_server_of_files_by_a_limit_on_it(target):
    act(target, "python3 -c 'import resource, sys; resource.prlimit(int(sys.argv[1]), 7, (0, 0))' $PPID")
    try:
        return target.client.bash("echo works").output != "works\n"
    except SandboxError:
        return True


SLOW_DOWN = """
import ctypes, os, sys
idle, most = 5, max(os.sched_getaffinity(0))
for thread in map(int, os.listdir("/proc/%s/task" % sys.argv[1])):
    for slow in (
        lambda: os.sched_setscheduler(thread, idle, os.sched_param(0)),
        lambda: os.sched_setaffinity(thread, {most}),
        lambda: os.setpriority(os.PRIO_PROCESS, thread, 19),
    ):
        try: slow()
        except OSError: pass
    ioprio_set = {"x86_64": 251, "aarch64": 30}[os.uname().machine]
    ctypes.CDLL(None).syscall(ioprio_set, 1, thread, 3 << 13)
"""
HOW_FAST = """
import ctypes, os
ioprio_get = {"x86_64": 252, "aarch64": 31}[os.uname().machine]
io = ctypes.CDLL(None).syscall(ioprio_get, 1, 0) >> 13
print(os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), io)
"""


@attack(stopped_by="the filter, for the server's main thread; a check is begun in a new thread of that")
def test_have_the_check_run_slowly_by_the_priority_of_the_server(target):
    def measured() -> str:
        return target.client.exec(["python3", "-c", HOW_FAST]).stdout

    before = measured()
    target.client.write_file("slow.py", SLOW_DOWN)
    target.client.bash("python3 slow.py $PPID")
    assert before
    try:
        return measured() != before
    except SandboxTimeout:  # on a busy machine it may get no time at all
        return True


KEYS_THERE_ARE = """
import glob, os, re, sys
def texts(server):
    for directory in ("/run/sbx", os.path.expanduser("~/../private")):
        for path in glob.glob(directory + "/*"):
            yield path, 0, 1 << 20
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
        yield path, 0, 1 << 20
    for line in open("/proc/%d/maps" % server):
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        if " rw-p " in line:
            yield "/proc/%d/mem" % server, first, last - first
def found():
    try:
        for path, start, size in texts(int(sys.argv[1])):
            try:
                with open(path, "rb") as file:
                    file.seek(start)
                    yield from re.findall(rb"\\b[0-9a-f]{32}\\b", file.read(size))
            except OSError: pass
    except OSError: pass
print(*{key.decode() for key in found()})
"""


@attack(stopped_by="it comes with the listening socket, and lies in no file; the server is not dumpable")
def test_learn_the_key_with_which_the_host_speaks_to_the_server(target):
    target.client.write_file("keys.py", KEYS_THERE_ARE)
    words = target.client.bash("python3 keys.py $PPID", PATIENCE_S, max_output_chars=1 << 20).output.split()
    return Address.parse(target.info.socket).key in words


@attack(stopped_by=INIT)
def test_write_the_server_s_memory(target):
    result = target.python(
        "import os\n"
        "status = open('/proc/%d/status' % os.getppid()).read()\n"
        "server = int(status.split('PPid:')[1].split()[0])\n"
        "open('/proc/%d/mem' % server, 'r+b').close()\n"
        "print('OPEN')"
    )
    return "OPEN" in result.output


FORKER = """
import os, time
ends = time.monotonic() + 120  # earlier when its directory goes: then no heartbeat can be written
if os.fork(): os._exit(0)
os.setsid()
while time.monotonic() < ends:
    try:
        if os.fork(): os._exit(0)
    except OSError: pass  # those before it have yet to be reaped
    with open("heartbeat", "w") as file: file.write(str(time.monotonic()))
    time.sleep(0.002)
"""


@attack(stopped_by="all of a namespace is ended at once, and it is looked whether anything is left")
def test_survive_the_reset_by_forking_faster_than_one_is_killed(target):
    name = f"forker-{uuid.uuid4().hex}.py"
    target.client.write_file(name, FORKER)
    target.client.bash(f"python3 {name} & until [ -s heartbeat ]; do sleep 0.05; done; sleep 0.5", 30.0)
    if target.control:  # as a careful shell would: its jobs, then whatever has the name
        target.client.bash("kill -9 $(jobs -p); for p in /proc/[0-9]*; do :; done")
    else:
        target.client.reset()
    # On a busy machine, what goes on may rest for seconds; the machine knows it all the same.
    before = target.client.read_file("heartbeat")
    ends = time.monotonic() + (30.0 if target.control else 3.0)
    while time.monotonic() < ends:
        lives = any(name in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        if lives or target.client.read_file("heartbeat") != before:
            return True
        time.sleep(0.1)
    return False


# -- what the shell believes -----------------------------------------------------------------------------


test_pass_by_a_function_named_test = cheated(BY_THE_SERVER, "test() { return 0; }", "test -f done.txt")

test_pass_by_an_exported_function = cheated(
    BY_THE_SERVER, "test() { return 0; }; export -f test", "bash -c 'test -f done.txt'"
)

test_pass_by_an_alias = cheated(
    BY_THE_SERVER, "alias grep=true; shopt -s expand_aliases", "grep -q solved /dev/null"
)

test_pass_by_a_trap_that_exits = cheated(
    BY_THE_SERVER, "trap 'exit 0' EXIT", "grep -q solved /dev/null || exit 1"
)

FORGER = r"""
import os
shell = os.getppid()
arguments = open("/proc/%d/cmdline" % shell).read().split("\0")
nonce = "none"
if "--rcfile" in arguments:
    rc = open(arguments[arguments.index("--rcfile") + 1]).read()
    nonce = rc.split("printf '\\036")[1].split(";")[0]
try:
    with open("/dev/tty", "w") as terminal:
        for number in range(200):
            terminal.write("\x1e%s;e;%d;0;%s;%s\x1e" % (nonce, number, os.getcwd(), nonce))
except OSError:
    pass
"""


@attack(stopped_by="no marker: the exit code is what the kernel gives to the server")
def test_pass_by_forging_the_end_of_the_check(target):
    target.client.write_file("solution.py", FORGER)
    return passes(target, "python3 solution.py; sleep 0.5; exit 1")


test_pass_by_a_program_in_front_on_the_path = cheated(
    CLEAN,
    "mkdir bin; printf '#!/bin/sh\\nexit 0\\n' >bin/grep; chmod +x bin/grep; export PATH=$PWD/bin:$PATH",
    "grep -q solved /dev/null",
)


@attack(stopped_by=CLEAN)
def test_load_a_library_into_the_check(target):
    target.client.bash("export LD_PRELOAD=/workspace/evil.so")
    return "evil.so" in says(target, "bash -c :")  # the loader complains that it is not there


test_pass_by_what_bash_reads_at_its_start = cheated(
    CLEAN, "echo 'exit 0' >env; export BASH_ENV=$PWD/env", "bash -c 'grep -q solved /dev/null'"
)

test_pass_by_the_profile_of_a_login_shell = cheated(
    CLEAN, "echo 'exit 0' >~/.bash_profile", "bash -lc 'grep -q solved /dev/null'"
)

EXIT_WELL = "import os; os._exit(0)"


test_pass_by_a_sitecustomize_on_pythonpath = cheated(
    CLEAN,
    f"mkdir lib; echo '{EXIT_WELL}' >lib/sitecustomize.py; export PYTHONPATH=$PWD/lib",
    "python3 -c 'raise SystemExit(1)'",
)

test_pass_by_a_usercustomize_at_home = cheated(
    CLEAN,
    f"""d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p "$d"
        echo '{EXIT_WELL}' >"$d/usercustomize.py"; export PYTHONNOUSERSITE=""",
    "python3 -s -c 1 && python3 -c 'raise SystemExit(1)'",
)


@attack(stopped_by="the server's own Python, isolated and mounted read-only")
def test_pass_by_a_module_in_the_working_directory(target):
    target.client.write_file("json.py", EXIT_WELL)
    check = "import json; raise SystemExit(1)"
    if target.control:
        return target.client.bash(f"python3 -c '{check}'").exit_code == 0
    return target.client.exec([TRUSTED_PYTHON, "-c", check]).exit_code == 0


# -- what runs beside the check ----------------------------------------------------------------------------


@attack(stopped_by=ALONE)
def test_write_into_the_check_s_output(target):
    target.client.bash("(while :; do echo VERDICT passed; sleep 0.02; done) & disown", 5.0)
    return "VERDICT passed" in says(target, "sleep 0.5; echo VERDICT failed")


@attack(stopped_by=ALONE)
def test_push_the_verdict_out_of_the_output(target):
    target.client.bash("(sleep 0.3; seq 40000; sleep 0.3; seq 40000) & disown", 5.0)
    return "FAILED" not in says(target, "sleep 0.6; echo FAILED; sleep 0.6", 2000)


TRACER = """
import os, time
ends = time.monotonic() + 6
while time.monotonic() < ends:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"check-of-the-task" in open("/proc/%s/cmdline" % pid, "rb").read():
                open("/proc/%s/mem" % pid, "r+b").close()
                open("traced", "w").close()
        except OSError: pass
    time.sleep(0.01)
"""


@attack(stopped_by=ALONE)
def test_write_the_check_s_memory(target):
    target.client.write_file("tracer.py", TRACER)
    target.client.bash("setsid python3 tracer.py >/dev/null 2>&1 & disown; sleep 0.3")
    passes(target, "bash -c 'sleep 1; : check-of-the-task'")
    return target.client.stat(f"{target.info.workspace}/traced").kind == "file"


KILLER = TRACER.replace('open("/proc/%s/mem" % pid, "r+b").close()', "os.kill(int(pid), 9)")


@attack(stopped_by=ALONE)
def test_kill_the_check_before_it_finds_anything(target):
    target.client.write_file("killer.py", KILLER)
    target.client.bash("setsid python3 killer.py >/dev/null 2>&1 & disown; sleep 0.3")
    check = "bash -c 'sleep 1; : check-of-the-task; echo found a fault'"
    return "found a fault" not in says(target, check)


@attack(stopped_by="a program's pipes are read until it has ended, and then all others have ended, too")
def test_answer_after_the_check_from_a_process_that_was_left_behind(target):
    target.client.write_file(
        "solution.py",
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid(); time.sleep(1); print('42', flush=True)\n",
    )
    limit_s = 0.6  # of the task; the answer comes later
    if target.control:
        began = time.monotonic()
        target.client.bash("timeout 0.6 python3 solution.py")
        late = target.client.bash("sleep 1.5")
        return "42" in late.output + late.late_output and time.monotonic() - began > limit_s
    result = target.client.exec(["python3", "solution.py"], limit_s)
    return "42" in result.stdout + target.client.exec(["sleep", "1.5"]).stdout


# -- the limit of the check ----------------------------------------------------------------------------------


def slow_answer_counts(target, number: int) -> bool:
    """Whether a solution that takes three times its limit, and signals its runner, has its answer taken."""
    target.client.write_file(
        "solution.py",
        f"import os, time\nif os.getppid() != 1: os.kill(os.getppid(), {number})\n"
        "time.sleep(1.5)\nopen('answer', 'w').write('42')\n",
    )
    if target.control:
        target.client.bash("timeout 0.5 python3 solution.py & sleep 2.5; kill -9 $!")
    else:
        result = target.client.exec(["python3", "solution.py"], 0.5)
        assert result.timed_out or result.exit_code
        time.sleep(2)
    return target.client.stat(f"{target.info.workspace}/answer").kind == "file"


@attack(stopped_by="the server keeps the time, and nobody inside can signal it")
def test_escape_the_limit_by_killing_the_runner(target):
    return slow_answer_counts(target, 9)


@attack(stopped_by="the server keeps the time, and nobody inside can signal it")
def test_escape_the_limit_by_stopping_the_runner(target):
    return slow_answer_counts(target, 19)


@attack(stopped_by="the server's own clock")
def test_look_fast_by_a_clock_of_one_s_own(target):
    target.client.bash("date() { echo 0; }; export -f date")
    if target.control:
        timed = "began=$(date +%s%N); sleep 1.2; ended=$(date +%s%N); test $((ended - began)) -lt 1000000000"
        return target.client.bash(timed).exit_code == 0
    return target.client.exec(["bash", "-c", "sleep 1.2"]).wall_s < 1.0


@attack(stopped_by="the server sets them between fork and exec")
def test_have_the_check_inherit_limits_under_which_it_fails_early(target):
    target.client.bash("ulimit -f 0; ulimit -n 16")
    return "too large" in says(target, "trap '' XFSZ; dd if=/dev/zero of=x bs=1k count=8 2>&1")
