"""The ports of a stack that starts beside another one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

from services.launch.parts import FREED_S, await_freed, pick_port, port_is_free

CHOICE = """
import sys
from services.launch.parts import pick_port
print(pick_port([int(sys.argv[1])], set()), flush=True)
sys.stdin.read()
"""


def test_a_usual_port_is_chosen_by_one_of_two_that_start_together():
    """Nobody listens there yet."""
    usual = pick_port([], set())
    command = [sys.executable, "-c", CHOICE, str(usual)]
    starts = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    ports = [int(start.stdout.readline()) for start in starts]
    for start in starts:
        start.communicate(timeout=240)
    assert ports.count(usual) == 1, ports
    assert pick_port([usual], set()) == usual


def test_a_port_whose_owner_still_ends_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        end = threading.Timer(0.5, owner.close)
        assert not port_is_free("127.0.0.1", port)
        end.start()
        await_freed("127.0.0.1", port)
        assert port_is_free("127.0.0.1", port)
        end.join()


def test_a_port_that_is_another_program_s_is_not_waited_for_without_end():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        begun = time.monotonic()
        await_freed("127.0.0.1", owner.getsockname()[1])
        assert FREED_S <= time.monotonic() - begun < 10 * FREED_S
