"""The filter of system calls, run here on a machine of paper: what it answers to each call."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.server import seccomp

ALLOWED, X32 = 0, 0x40000000
I386, ARM = 0x40000003, 0x40000028
SERVER = Path(seccomp.__file__).parent


def answer(machine: str, name: str | int, *arguments: int, building=False, architecture=None) -> int:
    """Error number with which a call is answered; 0 = it is allowed."""
    number = name if isinstance(name, int) else seccomp.NUMBERS[name][seccomp.MACHINES.index(machine)]
    words = {0: number, 4: seccomp.AUDIT_ARCH[machine] if architecture is None else architecture}
    for place, value in enumerate([*arguments, *[0] * (6 - len(arguments))]):
        words[16 + 8 * place], words[20 + 8 * place] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    program = seccomp.program(machine, building)
    accumulator, at = 0, 0
    while True:
        code, yes, no, operand = program[at]
        at += 1
        if code == seccomp.RETURN:
            assert operand == seccomp.ALLOW or operand & 0xFFFF0000 == seccomp.ERRNO
            return 0 if operand == seccomp.ALLOW else operand & 0xFFFF
        if code == seccomp.LOAD:
            accumulator = words[operand]
        elif code == seccomp.JUMP:
            at += operand
        else:
            taken = {
                seccomp.EQUAL: accumulator == operand,
                seccomp.ABOVE: accumulator > operand,
                seccomp.ANY_BIT: bool(accumulator & operand),
            }[code]
            at += yes if taken else no


@pytest.fixture(params=seccomp.MACHINES)
def machine(request) -> str:
    """Each machine that the filter is known for."""
    return request.param


def test_every_jump_stays_inside_and_every_way_ends(machine):
    for building in (False, True):
        program = seccomp.program(machine, building)
        assert len(program) < 4096  # BPF_MAXINSNS
        assert program[-1][0] == seccomp.RETURN
        for at, (code, yes, no, operand) in enumerate(program):
            if code != seccomp.RETURN:
                jumps = (operand,) if code == seccomp.JUMP else (yes, no)
                assert all(0 <= jump < 256 and at + 1 + jump < len(program) for jump in jumps)


def test_each_call_that_is_named_is_refused_and_its_neighbours_are_not(machine):
    column = seccomp.MACHINES.index(machine)
    named = {numbers[column] for numbers in seccomp.NUMBERS.values()} - {None}
    refused = {number for number in range(seccomp.NEWEST + 1) if answer(machine, number)}
    assert refused <= named
    by_arguments = {*seccomp.ARGUMENTS, *seccomp.CONTAINER_ARGUMENTS}
    for name, numbers in seccomp.NUMBERS.items():
        if numbers[column] is not None and name not in by_arguments:
            assert numbers[column] in refused, name


def test_calls_that_are_newer_than_the_filter_are_not_there(machine):
    assert answer(machine, seccomp.NEWEST) == ALLOWED
    for number in (seccomp.NEWEST + 1, 1000, X32 | 1, 0xFFFFFFFF):
        assert answer(machine, number) == errno.ENOSYS


def test_calls_of_another_architecture_are_not_there(machine):
    for architecture in (I386, ARM, 0):
        assert answer(machine, 1, architecture=architecture) == errno.ENOSYS


NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
PTHREAD = 0x3D0F00  # CLONE_VM and the others of pthread_create
SOCKETS = [(1, 1), (1, 5, 0), (2, 1, 6), (2, 2, 17), (10, 2 | 0x80000, 0), (10, 3, 58), (16, 3, 0)]
TERMINAL = (seccomp.TIOCSTI, seccomp.TIOCLINUX, seccomp.TIOCSETD)
SCHEDULING = ("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
PROCESS, GROUP, USER = 1, 2, 3
HIGH = 1 << 32
ANSWERS = [
    # Threads and processes, but no namespaces.
    ("clone", ALLOWED, [(17,), (PTHREAD,), (0x4111,)]),
    ("clone", errno.EPERM, [(flag | 17,) for flag in NAMESPACES]),
    ("unshare", errno.EPERM, [(flag,) for flag in (*NAMESPACES, 0x80)]),  # CLONE_NEWTIME
    ("unshare", ALLOWED, [(0x400 | 0x200,)]),  # CLONE_FILES, CLONE_FS
    ("clone3", errno.ENOSYS, [()]),
    # Unix, TCP, UDP and the list of addresses.
    ("socket", ALLOWED, SOCKETS),
    ("socketpair", ALLOWED, SOCKETS),
    # By SOCK_DCCP, SOCK_SEQPACKET and SOCK_PACKET protocol 0 is another one.
    ("socket", errno.ESOCKTNOSUPPORT, [(2, 6, 0), (10, 5 | 0x800, 0), (2, 10, 0), (2, 6, 33)]),
    ("socket", errno.EPROTONOSUPPORT, [(2, 1, 132), (10, 1, 262), (16, 3, 12), (16, 3, 4)]),
    ("socket", errno.EAFNOSUPPORT, [(family, 1, 0) for family in (0, 3, 17, 31, 38, 40, 44, 0xFFFFFFFF)]),
    # Nothing is typed into a terminal, whatever stands in the high half (bubblewrap's CVE-2023-28100).
    ("ioctl", errno.EPERM, [(0, request | high) for request in TERMINAL for high in (0, HIGH)]),
    ("ioctl", ALLOWED, [(0, 0x5401)]),  # TCGETS
    # A debugger may switch off randomization.
    ("personality", ALLOWED, [(0,), (0x40000,), (0xFFFFFFFF,), (8,), (0x20000,)]),
    ("personality", errno.EPERM, [(0x400000,), (0x100000,), (0x40000 | 0x400000,), (0x200000,)]),
    # Scheduling of all but the server's main thread; the kernel takes the low half of its number.
    *((name, ALLOWED, [(0,), (2,), (4711,)]) for name in SCHEDULING),
    *((name, errno.EPERM, [(1,), (1 | HIGH,)]) for name in SCHEDULING),
    ("ioprio_set", ALLOWED, [(PROCESS, 0), (PROCESS, 9)]),
    ("ioprio_set", errno.EPERM, [(PROCESS, 1), (GROUP, 0), (USER, 0)]),
    # Small segments and sets of semaphores.
    ("shmget", ALLOWED, [(0, seccomp.SEGMENT_BYTES)]),
    ("shmget", errno.EINVAL, [(0, seccomp.SEGMENT_BYTES + 1), (0, HIGH), (0, 1 << 63)]),
    ("semget", ALLOWED, [(0, seccomp.SEMAPHORES)]),
    ("semget", errno.EINVAL, [(0, seccomp.SEMAPHORES + 1)]),
]


@pytest.mark.parametrize(("name", "expected", "calls"), ANSWERS)
def test_a_call_is_answered_by_its_arguments(machine, name, expected, calls):
    for arguments in calls:
        assert answer(machine, name, *arguments) == expected, arguments


def test_builds_mount_and_make_namespaces_but_reach_neither_keys_nor_the_kernel(machine):
    for name in ("mount", "unshare", "clone", "clone3", "setns", "pivot_root", "fsopen", "socket"):
        assert {answer(machine, name, flag, building=True) for flag in NAMESPACES} == {ALLOWED}
    for name in (
        "keyctl",
        "add_key",
        "request_key",
        "bpf",
        "userfaultfd",
        "init_module",
        "open_by_handle_at",
    ):
        assert answer(machine, name, building=True) == errno.EPERM
    assert answer(machine, "io_uring_setup", building=True) == errno.ENOSYS


def test_a_machine_whose_calls_are_not_known_gets_no_sandbox():
    with pytest.raises(OSError, match="no filter of system calls is known for s390x"):
        seccomp.program("s390x")


def test_the_kernel_takes_the_filter_for_all_that_follows():
    shown = "grep -E 'Seccomp:|NoNewPrivs' /proc/self/status; python3 -c 'print(1)' && unshare -m true"
    done = subprocess.run(
        [sys.executable, "seccomp.py", "sh", "-c", shown], cwd=SERVER, capture_output=True, text=True
    )
    assert done.stdout.split() == ["NoNewPrivs:", "1", "Seccomp:", "2", "1"]
    assert "Operation not permitted" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="as a plain user builds may go without, see `tool`")
def test_what_an_image_build_runs_has_the_filter_of_builds():
    code = """
import ctypes, errno
from sandbox.images import tool
tool.confine()
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 250, "aarch64": 219}[__import__("os").uname().machine]
assert libc.syscall(number, 0, -3, 0) == -1 and ctypes.get_errno() == errno.EPERM
assert libc.unshare(0x20000) == 0
print("NoNewPrivs:\\t0" in open("/proc/self/status").read())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=SERVER.parents[1], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
