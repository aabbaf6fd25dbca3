"""The text of a cell, put together from pieces cut anywhere."""

from __future__ import annotations

import pytest

from tests.helpers.sandboxes import server_modules


@pytest.fixture(scope="module")
def cell():
    with server_modules("cell") as (module,):
        yield module


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_escapes_and_overwritten_text_vanish_however_the_stream_is_cut(cell, size):
    stream = b"\x1b[1;31mred\x1b[0m\r\n 10%\r 20%\r\x1b]0;title\x07 30%\nplain\rlast\r"
    output = cell.CellOutput(1000)
    for start in range(0, len(stream), size):
        output.stream(stream[start : start + size])
    assert output.text() == ("red\n 30%\nlast", False)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_and_their_like_is_output_however_the_stream_is_cut(cell, size):
    events = [
        *(b'\x1eab;1;0;{"a":1}\x1e', b'\x1eab;2;1;{"lost"\x1e'),
        *(b'\x1eab;3;1;{"b"\x1e', b"\x1eab;3;0;:2}\x1e"),
    ]
    like = b"\x1eab;x\x1e\x1eabc;3\x1e\x1eab;" + b"9" * 5000 + b"\x1eend\x1eab;4"
    stream = b"one%btwo%bthree%bfour%b" % tuple(events) + like
    scanner, parts = cell.EventScanner("ab"), []
    for start in range(0, len(stream), size):
        parts += scanner.feed(stream[start : start + size])
    assert [value for kind, value in parts if kind == "event" and value] == [{"a": 1}, {"b": 2}]
    output = b"".join(value for kind, value in parts if kind == "output") + scanner.flush()
    assert output == b"onetwothreefour" + like


def test_an_event_without_an_end_is_refused(cell):
    scanner = cell.EventScanner("ab")
    with pytest.raises(ValueError, match="without an end"):
        scanner.feed(b"\x1eab;1;1;x\x1e" * (cell.MAX_PIECES + 1))


def test_displays_stand_on_lines_of_their_own_and_change_in_place(cell):
    output = cell.CellOutput(1000)
    output.stream(b"no newline")
    output.show("first", display_id="a")
    output.stream(b"between")
    output.show("second")
    output.show("changed", display_id="a", update=True)
    output.show("of another cell", display_id="b", update=True)
    assert output.text()[0] == "no newline\nchanged\nbetween\nsecond\nof another cell\n"


def test_clearing_at_once_and_with_the_next_output(cell):
    output = cell.CellOutput(1000)
    output.stream(b"old\n")
    output.clear(wait=True)
    assert output.text()[0] == "old\n"
    output.stream(b"new\n")
    assert output.text()[0] == "new\n"
    output.clear(wait=False)
    assert output.text() == ("", False)


def test_what_is_kept_is_bounded(cell):
    output = cell.CellOutput(100)
    for i in range(500):
        output.show("x" * 1000, display_id=str(i))
        output.stream(b"y" * 1000)
    text, truncated = output.text()
    assert truncated
    assert len(text) < 400
    assert text.startswith("x")
    assert text.endswith("y")
