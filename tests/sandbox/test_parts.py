"""The parts that need no container: output, frames, images, choice of runtime, paths."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sandbox import check, connection, errors, paths, payload
from sandbox.client import SandboxClient
from sandbox.images import ImageStore, squashfs_offset
from sandbox.records import Record, Records
from sandbox.runtimes import RUNTIMES, select_runtime
from sandbox.runtimes.apptainer import MEMORY, THEIRS
from sandbox.runtimes.base import Bind, Launch
from sandbox.server import wire
from sandbox.server.output import Capture, MarkerScanner
from sandbox.spec import Limits, SandboxInfo, SandboxSpec
from tests.helpers.sandboxes import new_state, server_modules
from tests.helpers.stack import wait_until

MANY = 1100
"""Descriptors: more than `select` knows."""
SETUP = Path(__file__).resolve().parents[2] / "deploy" / "setup"


def test_who_hardly_ran_is_told_from_who_has_the_processor_and_from_who_waits():
    waits = subprocess.Popen(["sh", "-c", "sleep 60; true"])
    works = subprocess.Popen(["sh", "-c", "(while :; do :; done); true"])
    with server_modules("proc") as (proc,):
        try:
            wait_until(lambda: proc.starved(works.pid), 10, "it to have begun")
            wait_until(lambda: not proc.starved(waits.pid), 10, "it to want nothing of the machine")
            wait_until(lambda: not proc.starved(works.pid), 60, "it to have had two seconds of a processor")
            assert proc.relations(works.pid), "and yet it works"
        finally:
            for process in (waits, works):
                for child in psutil.Process(process.pid).children():
                    child.kill()
                process.kill()
                process.wait()
        assert not proc.starved(works.pid), "it is gone"


OF_FILES = ("EACCES", "ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "ENXIO")
OF_MACHINES = ("ENOSPC", "EIO", "EROFS", "ESTALE", "EAGAIN", "ENOMEM")


@pytest.mark.parametrize("name", OF_FILES + OF_MACHINES)
def test_only_errors_that_files_bring_about_are_laid_to_who_changes_files(name):
    with server_modules("errors") as (module,):
        error = module.of_system("no shell", OSError(getattr(errno, name), "why"))
    assert error.kind == ("SandboxSpoiled" if name in OF_FILES else "SandboxError")
    assert "why" in str(error)


def test_capture_keeps_short_text_whole_and_cuts_long_text_in_the_middle():
    capture = Capture(10)
    capture.add("häßlich".encode())
    assert capture.text() == ("häßlich", False)
    capture.add(b"." * 100 + b"tail!")
    text, truncated = capture.text()
    assert truncated
    assert text.startswith("häßli\n[... ")
    assert text.endswith("...]\ntail!")


def test_capture_is_bounded_whatever_the_chunks():
    capture = Capture(100)
    for _ in range(1000):
        capture.add(b"x" * 999)
    text, truncated = capture.text()
    assert truncated
    assert len(text) < 200
    assert "of 999000 bytes" in text


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_markers_are_found_however_the_stream_is_cut(size):
    false = b"\x1e\x1eabd;\x1eabc;x;;abc\x1e\x1eabc;e;7;"
    stream = b"one\x1eabc;b;5;abc\x1etwo\x1eabc;e;5;0;/a;b\x1e;abc\x1e" + false + b"\x1eabc;e;6;130;/;abc\x1e"
    scanner, parts = MarkerScanner("abc"), []
    for start in range(0, len(stream), size):
        parts += scanner.feed(stream[start : start + size])
    output = b"".join(value for kind, value in parts if kind == "output") + scanner.flush()
    assert output == b"onetwo" + false
    markers = [("begin", (5,)), ("end", (5, 0, b"/a;b\x1e")), ("end", (6, 130, b"/"))]
    assert [entry for entry in parts if entry[0] != "output"] == markers


def test_a_false_beginning_of_a_marker_is_not_held_back_for_ever():
    scanner = MarkerScanner("abc")
    false = b"\x1eabc;" + b"x" * 20_000
    parts = scanner.feed(false) + scanner.feed(b"\x1eabc;e;1;0;/;abc\x1e")
    assert b"".join(value for kind, value in parts if kind == "output") == false
    assert parts[-1] == ("end", (1, 0, b"/"))


def test_a_character_that_is_cut_between_two_results_is_kept_whole():
    capture = Capture(100)
    capture.add("gr\u00fc\u20ac".encode()[:-1])
    partial = capture.take_partial_character()
    assert capture.text() == ("gr\u00fc", False)
    assert partial + "\u20ac".encode()[-1:] == "\u20ac".encode()
    whole = Capture(100)
    whole.add("\u20ac".encode())
    assert whole.take_partial_character() == b""


def test_frames_survive_the_wire_and_too_large_ones_are_refused():
    near_end, far_end = socket.socketpair()
    with near_end, far_end:
        wire.send(near_end, {"text": "ü" * 1000})
        assert wire.receive(far_end) == {"text": "ü" * 1000}
        frame = wire.encode({"text": "as long as it may be"})
        near_end.sendall(frame)
        assert wire.receive(far_end, limit=len(frame) - wire.HEADER.size)
        near_end.sendall(wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1))
        with pytest.raises(wire.FrameTooLarge):
            wire.receive(far_end)
        near_end.close()
        assert wire.receive(far_end) is None


ANSWER = wire.encode({"ok": True, "result": {}})


@pytest.mark.parametrize(
    ("answers", "gone_at"),
    [
        ([ANSWER[:2], ANSWER[2:9], ANSWER[9:], ANSWER], None),
        ([ANSWER + ANSWER], 0),
        ([ANSWER + b"x"], 0),
        ([wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1)], 0),
        ([ANSWER, ANSWER[:5], b""], 1),
    ],
    ids=["in pieces", "two", "more than one", "too large", "hangs up amid one"],
)
def test_an_answer_is_one_whole_frame(tmp_path, answers, gone_at):
    """Whatever else the other side says, the request has no answer, and the line is of no more use."""

    async def answer(reader, writer):
        for piece in answers:
            await asyncio.sleep(0.01)
            writer.write(piece)
            if not piece:
                writer.close()

    async def scenario():
        async with await asyncio.start_unix_server(answer, tmp_path / "s"):
            address = connection.Address(str(tmp_path / "s"))
            line = await connection.connect(address)
            for number in range(2):
                reply = await connection.round_trip(line, address, {"op": "ping"}, 60)
                if number == gone_at:
                    assert (
                        reply is None
                        and await connection.round_trip(line, address, {"op": "ping"}, 60) is None
                    )
                    break
                assert reply == {"ok": True, "result": {}}
            line.transport.close()

    asyncio.run(scenario())


def test_each_request_has_a_limit_of_its_own(tmp_path):
    """A shorter one than the request before it, or a longer one, whose clock goes on."""

    async def answer(reader, writer):
        for pause_s in (0.0, 0.3, 60.0):
            await connection.receive(reader)
            await asyncio.sleep(pause_s)
            writer.write(ANSWER)

    async def scenario():
        async with await asyncio.start_unix_server(answer, tmp_path / "s"):
            address = connection.Address(str(tmp_path / "s"))
            line = await connection.connect(address)
            assert await connection.round_trip(line, address, {"op": "ping"}, 0.1)
            assert await connection.round_trip(line, address, {"op": "ping"}, 60.0)
            with pytest.raises(errors.SandboxTimeout, match=r"no answer to 'ping' from .* in 0.2 s"):
                await connection.round_trip(line, address, {"op": "ping"}, 0.2)
            line.transport.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "argument"), [("bash", "true"), ("send_input", ""), ("exec", ["true"]), ("ipython", "1")]
)
def test_an_answer_is_waited_for_longer_than_what_it_is_the_answer_to(name, argument, monkeypatch):
    waits = []

    async def ask(client, op, wait_s, /, **fields):
        waits.append(wait_s)
        raise errors.SandboxGone("it only counts how long was waited for")

    monkeypatch.setattr(SandboxClient, "_ask", ask)
    monkeypatch.setattr(SandboxClient, "_ask_aside", ask)
    with pytest.raises(errors.SandboxGone):
        asyncio.run(getattr(SandboxClient("/s"), name)(argument, 100.0))
    assert waits[0] > 110.0


def test_after_a_call_that_was_given_up_the_next_one_gets_its_own_answer(tmp_path):
    async def serve(reader, writer):
        while request := await connection.receive(reader):
            await asyncio.sleep(0.1)
            content = base64.b64encode(request["path"].encode()).decode()
            await connection.send(writer, {"ok": True, "result": {"content": content}})
        writer.close()

    async def scenario():
        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(serve, path), SandboxClient(path) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.read_file("first"), 0.05)
            return await client.read_file("second")

    assert asyncio.run(scenario()) == b"second"


def test_errors_keep_their_type_over_the_wire():
    error = errors.from_wire(errors.to_wire(errors.ImageError("gone")))
    assert isinstance(error, errors.ImageError)
    assert str(error) == "gone"
    assert type(errors.from_wire(errors.to_wire(ValueError("odd")))) is errors.SandboxError
    assert errors.to_wire(connection.NotListening("x"))["type"] == "SandboxGone"


def test_spec_and_info_survive_json():
    spec = SandboxSpec(env={"A": "1"}, owner="r")
    assert SandboxSpec.from_json(spec.to_json() | {"of_a_newer_version": 1}) == spec
    info = SandboxInfo("1", "/s", "apptainer", "n", ["limits"], 7, 1.5)
    assert SandboxInfo.from_json(info.to_json()) == info


def test_an_absent_or_damaged_image_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path))
    store = ImageStore(tmp_path / "cache")
    with pytest.raises(errors.ImageError, match=r"base\.sif.*image\.sh"):
        store.rootfs("base")
    for content in (b"", b"no image", b"\0" * 32 + b"SIF_MAGIC\0" + b"\xff" * 200):
        (tmp_path / "bad.sif").write_bytes(content)
        with pytest.raises(errors.ImageError, match=r"bad\.sif"):
            squashfs_offset(tmp_path / "bad.sif")
        with pytest.raises(errors.ImageError, match=r"bad\.sif"):
            store.rootfs(str(tmp_path / "bad.sif"))


def test_without_any_runtime_the_choice_is_refused_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "tool_path", lambda: str(tmp_path))
    monkeypatch.delenv("ROLLOUT_APPTAINER", raising=False)
    with pytest.raises(errors.RuntimeUnavailable, match=r"apptainer\.sh.*local-unsafe by name"):
        select_runtime("auto")


def test_a_fallback_is_said_aloud(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("ROLLOUT_APPTAINER", str(tmp_path / "absent"))
    monkeypatch.setattr(RUNTIMES["bubblewrap"], "check_installed", lambda self: None)
    monkeypatch.setattr(RUNTIMES["bubblewrap"], "probe", lambda self, rootfs, within: None)
    assert select_runtime("auto").name == "bubblewrap"
    assert len(caplog.records) == 1
    assert "not enforced here" in caplog.text
    assert "ROLLOUT_APPTAINER" in caplog.text


@pytest.fixture
def closed() -> Iterator[Path]:
    """A directory of root's own with a runtime's program in it."""
    place = new_state()  # its mode: 0700
    program = place / "home" / "apptainer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes run as another user")
def test_root_whose_sandboxes_cannot_be_nobodys_is_refused_and_told_what_is_closed(monkeypatch, closed):
    monkeypatch.setenv("ROLLOUT_APPTAINER", str(closed / "home" / "apptainer"))
    remedy = rf"uid 65534 .*cannot enter {closed}: .*chmod o\+x {closed}`"
    with pytest.raises(errors.RuntimeUnavailable, match=remedy):
        select_runtime("apptainer")
    monkeypatch.setenv("ROLLOUT_SANDBOX_UID", "0")  # asked for by name
    assert "uid (processes run as the machine's root" in select_runtime("apptainer").missing_isolation[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes run as another user")
def test_root_is_told_that_the_place_of_the_sandboxes_is_closed(closed):
    remedy = rf"cannot enter {closed}: set ROLLOUT_SANDBOX_DIR .*chmod o\+x {closed}`"
    with pytest.raises(errors.RuntimeUnavailable, match=remedy):
        select_runtime("bubblewrap", within=closed / "home")
    closed.chmod(0o711)
    assert select_runtime("bubblewrap", within=closed / "home").name == "bubblewrap"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes run as another user")
def test_set_up_puts_apptainer_where_nobody_may_enter(closed):
    def prefix() -> str:
        script = f". {SETUP}/common.sh; echo $APPTAINER_PREFIX"
        environment = {"PATH": os.environ["PATH"], "ROLLOUT_HOME": str(closed / "home")}
        return subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert paths.closed_to_others(Path(prefix())) is None
    assert not prefix().startswith(str(closed))
    closed.chmod(0o711)
    assert prefix() == f"{closed}/home/apptainer"


def test_a_socket_path_is_measured_in_bytes():
    assert paths.check_socket_path("/" + "x" * 106)
    with pytest.raises(errors.SandboxError, match="ROLLOUT_SANDBOX_DIR"):
        paths.check_socket_path("/" + "ü" * 60)


def test_a_directory_of_somebody_else_is_not_used(tmp_path):
    (tmp_path / "link").symlink_to("/tmp")
    with pytest.raises(errors.SandboxError, match="choose another"):
        paths.own_directory(tmp_path / "link", 0o700)


def test_the_payload_needs_nothing_but_the_standard_library(tmp_path):
    staged = payload.stage(tmp_path)
    assert payload.stage(tmp_path) == staged  # and only once
    assert (staged / "ptyprocess" / "__init__.py").exists()
    command = [
        sys.executable,
        "-BESI",
        "-c",
        f"import sys; sys.path.insert(0, {str(staged)!r}); import start, server",
    ]
    subprocess.run(command, check=True, cwd="/")


def test_a_bound_place_that_cannot_be_seen_is_named(tmp_path):
    staged = payload.stage(tmp_path)
    check = "import start; start.check_binds([('/absent', 1, 2)])"
    code = f"import sys; sys.path.insert(0, {str(staged)!r}); {check}"
    done = subprocess.run([sys.executable, "-BESI", "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("what is bound at /absent cannot be seen: ")


@pytest.mark.parametrize("place", ["sbx", "sbx-python", "data"])
def test_an_image_with_a_link_where_our_code_is_mounted_is_refused_where_it_cannot_be_replaced(
    tmp_path, place, monkeypatch
):
    image = tmp_path / "image"
    (image / "elsewhere").mkdir(parents=True)
    (image / place).symlink_to("elsewhere")
    binds = (Bind(tmp_path, "/data/sub"),)
    launch = Launch("0", tmp_path, tmp_path, image, binds=binds)
    launch.make_directories(None)
    monkeypatch.setenv("ROLLOUT_APPTAINER", "/bin/true")
    for upper in (THEIRS, MEMORY):
        runtime = RUNTIMES["apptainer"]()
        runtime._upper = upper
        with pytest.raises(errors.SandboxStartError, match=f"link at /{place},"):
            runtime.start(launch, ["true"], b"")


def test_limits_go_to_the_runtime_only_where_cgroups_work(tmp_path):
    limits = Limits(memory_mb=100, processes=20, disk_mb=1, files=1)
    launch = Launch("0", tmp_path, tmp_path, tmp_path, limits=limits)
    launch.make_directories(None)
    runtime = RUNTIMES["apptainer"]()
    assert not {"--memory", "--pids-limit"} & set(runtime.argv(launch, ["true"]))
    runtime.has_cgroups = True
    argv = " ".join(runtime.argv(launch, ["true"]))
    assert "--memory 100M --pids-limit 20" in argv


def test_nobody_waits_for_input_while_there_is_some_unread(tmp_path, monkeypatch):
    with server_modules("bash", "session", "proc") as (bash, module, proc):
        place = str(tmp_path)
        session = module.Session(bash.Bash(["bash"], place, dict(os.environ), place), place, place)
        try:
            wait_until(lambda: session.read() == "marker", 60, "bash to be ready")
            assert session.start("read -r line", module.Capture(1000))
            wait_until(session.waits_for_input, 60, "bash to wait for a line")
            os.kill(session.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, session.pid, os.WSTOPPED | os.WNOWAIT)  # before that it could still read
            # As seen a moment before: a reader whom a line has woken does not sleep, nor does a stopped one.
            monkeypatch.setattr(proc, "waits_for_terminal", lambda *_: True)
            session.queue(b"a line\n")
            assert not session.waits_for_input()
            os.kill(session.pid, signal.SIGCONT)
            wait_until(lambda: session.read() == "marker", 60, "the line to be read")
            assert session.waits_for_input()
        finally:
            session.kill()


def test_a_server_with_very_many_descriptors_still_tells_who_waits_for_input(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, MANY + 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, max(most, hard)))
    place, kept = str(tmp_path), [os.open(os.devnull, os.O_RDONLY)]
    try:
        while kept[-1] < MANY:
            kept.append(os.dup(kept[0]))
        with server_modules("bash", "session") as (bash, module):
            session = module.Session(bash.Bash(["bash"], place, dict(os.environ), place), place, place)
            try:
                wait_until(lambda: session.read() == "marker", 60, "bash to be ready")
                assert session.start("read -r line", module.Capture(1000))
                wait_until(session.waits_for_input, 60, "bash to wait for a line")
            finally:
                session.kill()
    finally:
        for descriptor in kept:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pipe_in_the_place_of_our_file_is_replaced_also_by_an_empty_one(tmp_path):
    path = tmp_path / "aside"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else it could not be opened for writing
    try:
        with server_modules("repair") as (repair,):
            repair.write_private(str(path), "")
            assert path.is_file()
            for text in ("long", "", "more"):
                repair.write_private(str(path), text)
                assert path.read_text() == text
    finally:
        os.close(reader)


def test_a_command_whose_wait_failed_is_not_typed_over(tmp_path, monkeypatch):
    with server_modules("shell", "waiting", "errors") as (module, waiting, errors):
        shell = module.Shell(str(tmp_path), dict(os.environ), str(tmp_path), own_namespace=False)
        monkeypatch.setattr(waiting.Waiter, "wait", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shell.run("read -r line; echo $line", 5, keep=True)
        monkeypatch.undo()
        with pytest.raises(errors.RequestError, match="still running"):
            shell.run("echo hi", 5)
        assert shell.send_input(b"typed\n", 60)["output"] == "typed\n"
        shell.close()


def test_between_fork_and_exec_the_server_imports_nothing():
    # What another thread is importing just then would be waited for without an end.
    code = "\n".join(
        (
            "import os, sys",
            "sys.path.insert(0, sys.argv[1])",
            "import server",
            "known = set(sys.modules)",
            "os.get_exec_path({'PATH': '/bin'})",  # of `os.execvpe`, which does not come back
            "sys.exit(' '.join(set(sys.modules) - known))",
        )
    )
    directory = Path(wire.__file__).parent
    done = subprocess.run([sys.executable, "-IBS", "-c", code, directory], capture_output=True, text=True)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ([], "isolated: files, processes, network; limited: memory, processes, disk"),
        (["hard CPU limit"], "network; limited: memory, processes, disk; without hard CPU limit"),
        (["network"], "isolated: files, processes; limited: memory, processes, disk; without network"),
        (["files", "network", "processes", "all"], "NOTHING IS ISOLATED: files, network, processes, all"),
    ],
)
def test_what_is_isolated_is_told_before_what_is_not(missing, text):
    assert check.told(missing).endswith(text)


def test_a_record_is_read_as_it_was_written_last_however_long_it_was_before(tmp_path):
    records = Records(tmp_path)
    for size in (10, 3000, 20, 9000, 30):
        record = Record("0badc0de", "apptainer", None, "boot", spec=SandboxSpec(files={"f": size * "x"}))
        records.write(record)
        assert records.all() == [record]
