"""The ports of a stack that starts beside another one."""

from __future__ import annotations

import subprocess
import sys

from services.launch.parts import pick_port

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
