"""What an agent sees of IPython, in a real container."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, sandbox_of
from tests.sandbox.conftest import THREADS, run, sandbox_on

pytestmark = pytest.mark.apptainer

PATIENCE_S = 120.0
"""Far more than anything here takes, for a machine that does ten other things."""


@pytest.fixture(scope="module")
def host(shared_state):
    return SyncHostClient(shared_state)


info = sandbox_on("apptainer", env={"GREETING": "good day"})


@pytest.fixture(scope="module")
def sandbox(info):
    with SyncSandboxClient(info.socket) as client:
        yield client


def cell(sandbox, code, timeout=PATIENCE_S, **options):
    return sandbox.ipython(code, timeout, **options)


def wait_for(sandbox, command):
    """Until a command in the shell succeeds."""
    result = sandbox.bash(f"until {command}; do sleep 0.05; done", timeout=PATIENCE_S)
    assert result.exit_code == 0, f"`{command}` did not come true in {PATIENCE_S} s"


def test_names_persist_and_the_last_value_is_shown(sandbox):
    first = cell(sandbox, "x = 41\nx + 1")
    assert (first.output, first.error, first.restarted, first.truncated) == ("42\n", None, False, False)
    second = cell(sandbox, "x")
    assert second.output == "41\n"
    assert second.execution_count == first.execution_count + 1


def test_it_starts_in_the_workspace_with_the_shells_environment(host):
    with sandbox_of(host, env={"GREETING": "good day"}, files={"here.txt": "x"}) as (info, sandbox):
        sandbox.ipython_warm()
        result = cell(sandbox, "import os, sys\nprint(os.environ['GREETING'], os.getcwd(), os.listdir())")
        assert result.output == f"good day {info.workspace} ['here.txt']\n"
        assert "/sbx" not in cell(sandbox, "print(sys.path)").output
        assert cell(sandbox, "import errors").error == "ModuleNotFoundError"
        assert sandbox.bash("ls -A ~").output == ""


def test_variables_set_later_reach_a_kernel_that_runs_already(sandbox):
    first = cell(sandbox, "import os\nos.environ['GREETING'], os.environ.get('LATER')")
    assert first.output == "('good day', None)\n"
    sandbox.setup({"LATER": "it's\n2"})
    result = cell(sandbox, "os.environ['GREETING'], os.environ['LATER']")
    assert result.output == repr(("good day", "it's\n2")) + "\n"
    assert result.execution_count == first.execution_count + 1
    sandbox.bash("pkill -9 -f kernel.py")
    assert cell(sandbox, "import os\nos.environ['LATER'][-1]").output == "'2'\n"


def test_a_reset_of_the_shell_ends_the_kernel_and_the_next_cell_says_so(sandbox):
    cell(sandbox, "lost = 1")
    sandbox.reset()
    result = cell(sandbox, "'lost' in dir()")
    assert (result.output, result.restarted) == ("False\n", True)


@pytest.mark.parametrize("starting", [False, True])
def test_a_program_that_runs_alone_ends_the_kernel_also_one_that_is_starting(sandbox, starting):
    cell(sandbox, "lost = 1")
    if starting:
        sandbox.ipython_restart()
    look = "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$p; echo; done 2>/dev/null"
    assert "kernel.py" not in sandbox.exec(["sh", "-c", f"sleep 0.5; {look}"]).stdout.replace(look, "")
    result = cell(sandbox, "'lost' in dir()")
    assert (result.output, result.restarted) == ("False\n", not starting)


def test_streams_results_displays_and_child_processes_keep_their_order(sandbox):
    code = """
import subprocess, sys
from IPython.display import display
print("one")
subprocess.run(["echo", "two"])
print("three", file=sys.stderr)
display("four")
!echo five
print("six", end="")
7"""
    assert cell(sandbox, code).output == "one\ntwo\nthree\n'four'\nfive\nsix\n7\n"


def test_no_output_is_lost_in_many_cells(sandbox):
    for i in range(100):
        assert cell(sandbox, f"print({i})\n{i} * 2").output == f"{i}\n{i * 2}\n"


def test_an_error_is_named_and_its_traceback_shown_without_colours(sandbox):
    result = cell(sandbox, "print('before')\n1 / 0")
    assert result.error == "ZeroDivisionError"
    assert result.output.startswith("before\n")
    assert "----> 2 1 / 0" in result.output
    assert "\x1b" not in result.output
    assert cell(sandbox, "1 +").error == "SyntaxError"
    assert cell(sandbox, "import sys\nsys.exit(3)").error == "SystemExit"
    assert cell(sandbox, "exit()").restarted is False
    assert cell(sandbox, "'alive'").restarted is False


def test_magics_shell_escapes_await_and_help_work(sandbox):
    assert cell(sandbox, "%cd /usr").output == "/usr\n"
    assert cell(sandbox, "!pwd; exit 3").output == "/usr\n"
    assert cell(sandbox, "_exit_code").output == "3\n"
    assert cell(sandbox, "lines = !echo a; echo b\nlines").output == "['a', 'b']\n"
    assert cell(sandbox, "%%bash\necho $((6 * 7))").output == "42\n"
    assert cell(sandbox, "%pip --version").output.startswith("pip ")
    assert cell(sandbox, "import asyncio\nawait asyncio.sleep(0.01)\n5").output == "5\n"
    assert "Return the number of items" in cell(sandbox, "len?").output
    cell(sandbox, "%cd ~")


def test_asking_for_input_is_an_error_that_says_so(sandbox):
    result = cell(sandbox, "name = input('who? ')")
    assert result.error == "StdinNotImplementedError"
    assert "does not support input" in result.output


def test_progress_bars_and_clear_output_leave_their_last_state(sandbox):
    bar = "for i in range(100): print(f'\\r{i} of 99', end='', flush=True)\nprint()"
    assert cell(sandbox, bar).output == "99 of 99\n"
    assert cell(sandbox, "print('\\x1b[31mred\\x1b[0m')").output == "red\n"
    clear = "from IPython.display import clear_output\nfor i in range(20):\n  clear_output({})\n  print(i)"
    assert cell(sandbox, clear.format("")).output == "19\n"
    assert cell(sandbox, clear.format("wait=True")).output == "19\n"


def test_an_updated_display_is_shown_once_in_its_place(sandbox):
    code = "h = display(0, display_id=True)\nprint('after')\nfor i in range(200): h.update(i)"
    assert cell(sandbox, "from IPython.display import display\n" + code).output == "199\nafter\n"


def test_rich_displays_become_text_and_images_become_files(sandbox):
    code = """
import base64, struct, zlib
from IPython.display import HTML, Image, Markdown, SVG, display
def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
header = struct.pack(">IIBBBBB", 640, 480, 8, 0, 0, 0, 0)
png = b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")
display(Markdown("*text*"), HTML("<b>bold</b>"))
display(Image(png), SVG("<svg xmlns='http://www.w3.org/2000/svg'/>"))
png.hex()"""
    lines = cell(sandbox, code).output.splitlines()
    assert lines[:2] == ["*text*", "<b>bold</b>"]
    assert lines[2].startswith("[image/png saved as /tmp/ipython/cell-")
    assert lines[2].endswith("-1.png, 640x480]")
    assert lines[3].startswith("[image/svg+xml saved as /tmp/ipython/cell-")
    path = lines[2].split(" saved as ")[1].split(",")[0]
    assert sandbox.read_file(path).hex() == lines[4].strip("'")


def test_long_output_keeps_head_and_tail(sandbox):
    result = cell(sandbox, "print('first')\nprint('x' * 3_000_000)\nprint('last')", max_output_chars=1000)
    assert result.truncated
    assert len(result.output) < 1200
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")


@pytest.mark.parametrize("statement", ["print('y' * 1000)", "display('y' * 1000)"])
def test_endless_output_is_interrupted_at_the_time_limit_and_eats_no_memory(sandbox, statement):
    code = f"from IPython.display import display\nprint('go')\nwhile True: {statement}"
    result = cell(sandbox, code, timeout=3, max_output_chars=2000)
    assert (result.timed_out, result.truncated) == (True, True)
    assert result.output.startswith("go\n")
    assert len(result.output) < 2400
    sizes = sandbox.bash("grep -h VmHWM /proc/1/status").output
    assert int(sizes.split()[1]) < 200_000, "kB of memory of the server"
    assert cell(sandbox, "print('next')").output == "next\n"


def test_an_overrun_is_interrupted_and_the_names_survive(sandbox):
    cell(sandbox, "kept = 'kept'")
    result = cell(sandbox, "import time\nprint('started')\ntime.sleep(600)", timeout=3)
    assert (result.timed_out, result.interrupted, result.restarted) == (True, False, False)
    assert result.error == "KeyboardInterrupt"
    assert result.output.startswith("started\n")
    assert cell(sandbox, "!sleep 600", timeout=1).timed_out
    assert cell(sandbox, "await asyncio.sleep(600)", timeout=1).timed_out
    assert cell(sandbox, "kept").output == "'kept'\n"


def test_a_cell_that_cannot_be_interrupted_costs_the_kernel(sandbox):
    code = (
        "print('partial')\nimport signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)"
    )
    result = cell(sandbox, code, timeout=3)
    assert (result.timed_out, result.restarted, result.execution_count) == (True, True, None)
    assert result.output == "partial\n"
    after = cell(sandbox, "1 + 1")
    assert (after.output, after.restarted) == ("2\n", False)


@pytest.mark.parametrize("death", ["os._exit(9)", "os.kill(os.getpid(), 11)", "os.kill(os.getpid(), 9)"])
def test_a_dead_kernel_is_reported_and_replaced(sandbox, death):
    result = cell(sandbox, f"import os\nprint('seen')\n{death}")
    assert (result.restarted, result.error, result.timed_out) == (True, None, False)
    assert result.output.startswith("seen\n")
    assert cell(sandbox, "1 + 1").output == "2\n"


@pytest.mark.parametrize("noticed", [True, False])
def test_death_between_cells_is_said_by_the_next(sandbox, noticed):
    cell(sandbox, "lost = 1")
    sandbox.bash("pkill -9 -f kernel.py")
    if noticed:
        wait_for(sandbox, "! pgrep -f kernel.py")
    result = cell(sandbox, "'lost' in dir()")
    assert (result.output, result.restarted) == ("False\n", True)
    assert not cell(sandbox, "1").restarted


def test_a_kernel_that_takes_no_cell_costs_no_more_than_its_time(sandbox):
    cell(sandbox, "import asyncio, time\nasyncio.get_running_loop().call_soon(time.sleep, 600)")
    result = cell(sandbox, "1 + 1\n" + "#" * 1_000_000, timeout=3)
    assert (result.timed_out, result.restarted, result.output) == (True, True, "")
    assert cell(sandbox, "1 + 1\n" + "#" * 1_000_000).output == "2\n"


def test_a_cell_that_leaves_no_way_to_answer_costs_the_kernel_at_once(sandbox):
    result = cell(sandbox, "import sys\nsys.stdout.close()")
    assert (result.restarted, result.timed_out) == (True, False)
    assert cell(sandbox, "1 + 1").output == "2\n"


def test_what_a_cell_leaves_to_the_loop_goes_on_between_cells(sandbox):
    later = "async def later():\n    await asyncio.sleep(0.01)\n    open('/tmp/later', 'w').close()\n"
    cell(sandbox, f"import asyncio\n{later}task = asyncio.create_task(later())")
    wait_for(sandbox, "[ -e /tmp/later ]")


def test_a_fork_that_comes_out_of_its_cell_ends_and_says_nothing(sandbox):
    first = cell(sandbox, "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\npid > 0")
    second = cell(sandbox, "'next'")
    assert (first.output, second.output) == ("True\n", "'next'\n")
    assert second.execution_count == first.execution_count + 1


def test_a_process_that_outlives_the_kernel_does_not_hide_its_end(sandbox):
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)\nos._exit(1)"
    assert cell(sandbox, code).restarted
    assert cell(sandbox, "1 + 1").output == "2\n"


def test_long_displays_stay_whole_while_a_program_prints(sandbox):
    code = """
import subprocess
noise = subprocess.Popen("for i in $(seq 3000); do echo noise; done", shell=True)
for _ in range(30): display("x" * 20000)
noise.wait()
None"""
    lines = cell(sandbox, code, max_output_chars=3_000_000).output.splitlines()
    assert lines.count("noise") == 3000
    assert lines.count(repr("x" * 20000)) == 30


def test_displays_arrive_though_a_program_has_full_output_fail(sandbox):
    cell(sandbox, "!python3 -c 'import os; os.set_blocking(1, False)'")
    result = cell(sandbox, "for _ in range(300): display('y' * 20000)", max_output_chars=8_000_000)
    assert result.output == (repr("y" * 20000) + "\n") * 300
    cell(sandbox, "import os\nos.set_blocking(1, True)")


@pytest.mark.parametrize("event", ["'[' * 3000", "'{}'", "'7'", "'no JSON'"])
def test_forged_events_cost_no_more_than_the_kernel(sandbox, event):
    nonce = "open('/proc/self/cmdline').read().split('\\0')[-2]"
    code = f"import time\nprint('\\x1e%s;x;0;%s\\x1e' % ({nonce}, {event}), flush=True)\ntime.sleep(600)"
    assert cell(sandbox, code).restarted
    assert cell(sandbox, "1 + 1").output == "2\n"


def test_restart_forgets_the_names_on_demand(sandbox):
    cell(sandbox, "forgotten = 1")
    sandbox.ipython_restart()
    result = cell(sandbox, "'forgotten' in dir()")
    assert (result.output, result.restarted) == ("False\n", False)


def test_output_of_a_thread_after_its_cell_comes_labelled_with_the_next(sandbox):
    cell(
        sandbox,
        "import os, threading, time\n"
        "def later():\n"
        "    while not os.path.exists('/tmp/go'): time.sleep(0.01)\n"
        "    print('late', flush=True); open('/tmp/done', 'w').close()\n"
        "threading.Thread(target=later).start()",
    )
    sandbox.bash("touch /tmp/go")
    wait_for(sandbox, "[ -e /tmp/done ]")
    result = cell(sandbox, "print('now')")
    assert result.late_output + result.output == "late\nnow\n"
    assert cell(sandbox, "1").late_output == ""


def test_a_background_process_may_print_without_end(sandbox):
    cell(
        sandbox,
        "import subprocess\nyes = subprocess.Popen('yes | head -c 5000000; touch /tmp/yes', shell=True)",
    )
    wait_for(sandbox, "[ -e /tmp/yes ]")
    assert cell(sandbox, "yes.wait()").output.endswith("0\n")


def test_a_running_cell_can_be_interrupted_from_another_connection(info, sandbox):
    with SyncSandboxClient(info.socket) as second:
        code = "import time\nopen('/tmp/runs', 'w').close()\ntime.sleep(600)"
        command = THREADS.submit(cell, second, code)
        wait_for(sandbox, "[ -e /tmp/runs ]")
        assert sandbox.ipython_interrupt()
        result = command.result(PATIENCE_S)
    assert (result.interrupted, result.timed_out, result.restarted) == (True, False, False)
    assert not sandbox.ipython_interrupt()


def test_cancelling_a_call_interrupts_the_cell(info, sandbox):
    async def cancel_one():
        async with SandboxClient(info.socket) as client:
            await client.ipython("1", PATIENCE_S)
            code = "import time\nopen('/tmp/cancel', 'w').close()\ntime.sleep(600)\nopen('/tmp/never', 'w')"
            call = asyncio.create_task(client.ipython(code, 600))
            async with SandboxClient(info.socket) as second:
                waited = await second.bash("until [ -e /tmp/cancel ]; do sleep 0.05; done", PATIENCE_S)
                assert waited.exit_code == 0
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await client.ipython("'free'", PATIENCE_S)

    assert run(cancel_one()).output == "'free'\n"
    assert sandbox.bash("test -e /tmp/never").exit_code == 1


BARE_PYTHON = '#!/bin/sh\nexec /usr/bin/python3 -S "$@"\n'
"""Finds no installed packages, as the Python of an image without ipykernel."""


def test_without_ipykernel_the_refusal_says_what_to_install(host):
    spec = SandboxSpec(env={"ROLLOUT_IPYTHON": "/workspace/bare"}, files={"bare": BARE_PYTHON})
    info = host.start(spec)
    with SyncSandboxClient(info.socket) as sandbox:
        sandbox.bash("chmod +x bare")
        with pytest.raises(SandboxRequestError, match=r"/workspace/bare.*install .*ROLLOUT_IPYTHON"):
            sandbox.ipython("1")
        assert sandbox.bash("echo fine").output == "fine\n"
    host.release(info.id)


def test_a_python_without_ipykernel_on_the_path_is_passed_over(host):
    path = "/workspace/bin:/usr/bin:/bin"
    with sandbox_of(host, env={"PATH": path}, files={"bin/python3": BARE_PYTHON}) as (_, sandbox):
        sandbox.bash("chmod +x bin/python3")
        assert cell(sandbox, "1 + 1").output == "2\n"
