"""What operations print, seen from beside them while they run."""

from __future__ import annotations

import time

import pytest

from sandbox.errors import SandboxRequestError
from sandbox.peek import Peek
from tests.helpers.blocking import SyncSandboxClient
from tests.helpers.sandboxes import server_modules
from tests.sandbox.conftest import THREADS, sandbox_on

sandbox = sandbox_on("apptainer", "local-unsafe")
with server_modules("tape") as (tape_module,):
    MOST_BYTES, Tape = tape_module.MOST_BYTES, tape_module.Tape


@pytest.fixture
def client(sandbox):
    with SyncSandboxClient(sandbox.socket) as client:
        client.reset()
        yield client


@pytest.fixture
def peek(sandbox, client):
    peek = Peek(sandbox.socket, 5.0)
    yield peek
    peek.close()


def look_until(peek: Peek, text: str) -> list[dict]:
    """All pieces until one brings the text."""
    pieces, ends = [], time.monotonic() + 30
    while not any(text in piece["text"] for piece in pieces):
        assert time.monotonic() < ends, pieces
        pieces += peek.look()
        time.sleep(0.02)
    return pieces


def test_a_command_is_seen_line_by_line_while_it_runs_and_then_its_end(client, peek):
    peek.look()
    command = THREADS.submit(client.bash, "echo one; read line; echo two $line; printf '\\033[31mred'")
    pieces = look_until(peek, "one")
    assert [(piece["kind"], piece["running"]) for piece in pieces] == [("bash", True)] * len(pieces)
    client.send_input("three")
    pieces += look_until(peek, "red")
    result = command.result()
    while pieces[-1]["running"]:
        pieces += peek.look()
    assert "".join(piece["text"] for piece in pieces) == result.output == "one\ntwo three\n\x1b[31mred"
    assert len({piece["operation"] for piece in pieces}) == 1
    ends = [0, *(piece["end"] for piece in pieces)]
    assert [piece["offset"] for piece in pieces] == ends[:-1]
    assert peek.look() == []


def test_who_comes_later_sees_the_latest_from_its_beginning_and_then_those_after_it(client, peek):
    client.bash("echo before")
    client.bash("echo now")
    assert [piece["text"] for piece in peek.look()] == ["now\n"]
    client.bash("echo 1")
    client.bash("echo 2")
    assert [piece["text"] for piece in peek.look()] == ["1\n", "2\n"]


def test_programs_are_seen_too(client, peek):
    peek.look()
    client.exec(["sh", "-c", "echo out; echo err >&2"])
    (piece,) = peek.look()
    assert (piece["kind"], piece["running"]) == ("exec", False)
    assert sorted(piece["text"].split()) == ["err", "out"]


def test_cells_of_ipython_are_seen_too(client, sandbox, peek, request):
    try:
        client.ipython("1")
    except SandboxRequestError as error:
        assert "apptainer" not in request.node.name, error
        request.node.add_marker(pytest.mark.may_skip)
        pytest.skip("only the image is sure to have a kernel")
    peek.look()
    gate = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)"
    cell = THREADS.submit(client.ipython, f"print('hello', flush=True)\n{gate}\n6*7")
    assert look_until(peek, "hello")[-1]["kind"] == "ipython"
    with SyncSandboxClient(sandbox.socket) as second:
        second.write_file("go", "")
    assert "42" in look_until(peek, "42")[-1]["text"]
    assert "42" in cell.result().output


def test_of_a_flood_the_newest_part_is_seen_and_how_much_came_before(client, peek):
    client.bash("head -c 300000 /dev/zero | tr '\\0' x; printf '\\nend'", max_output_chars=100)
    (piece,) = peek.look()
    assert piece["end"] == 300_004
    assert len(piece["text"]) == piece["end"] - piece["offset"] == MOST_BYTES
    assert piece["text"].endswith("x\nend")


def test_half_a_character_waits_for_its_other_half():
    tape = Tape()
    reel = tape.begin("bash")
    reel.add("é".encode()[:1])
    first = tape.op_peek({}, None)
    assert (first["text"], first["end"]) == ("", 0)
    reel.add("é".encode()[1:] + b"\xff")
    asked = {name: first[name] for name in ("operation", "running")} | {"offset": first["end"]}
    piece = tape.op_peek(asked, None)
    assert (piece["text"], piece["end"]) == ("é\ufffd", 3)
    reel.add("é".encode()[:1])
    reel.end()
    last = tape.op_peek(asked | {"offset": 3}, None)
    assert (last["text"], last["running"]) == ("\ufffd", False)
    assert tape.op_peek({"operation": last["operation"], "offset": 4, "running": False}, None) == {}
