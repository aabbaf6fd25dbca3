"""Looking into sandboxes whose servers answer nonsense, or nothing."""

from __future__ import annotations

import socket
import threading

import pytest

from sandbox.peek import Peek
from sandbox.server import wire
from workers.chores.watch import Watched

ANSWERS = {
    "a piece without its end": wire.encode({"ok": True, "result": {"operation": 1, "text": "x"}}),
    "no object": wire.encode(["ok"]),
    "no JSON": wire.HEADER.pack(3) + b"{{{",
    "a frame of four gigabytes": b"\xff" * 4,
    "half a frame": wire.HEADER.pack(100) + b"{",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_sandbox_that_answers_nonsense_is_looked_at_no_more(tmp_path, answer):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                wire.receive(connection)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        watched = Watched(Peek(str(path), 5.0), until=1.0)
        assert watched.look() == []
        assert watched.until == 0.0
        watched.peek.close()
        thread.join()
