"""What scripts of attackers begin with: the kernel's calls by number, and what they said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.attacks import attack

CALLS = '''
import ctypes, errno, json, mmap, os, platform, socket, struct, sys, time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = platform.machine() == "x86_64"
NUMBERS = {  # x86_64, aarch64
    "add_key": (248, 217), "bpf": (321, 280), "clone": (56, 220), "clone3": (435, 435),
    "fanotify_init": (300, 262), "fsopen": (430, 430), "getpid": (39, 172), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "memfd_secret": (447, 447), "modify_ldt": (154, None), "mount": (165, 40),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "personality": (135, 92),
    "process_vm_readv": (310, 270), "ptrace": (101, 117), "request_key": (249, 218), "semctl": (66, 191),
    "semget": (64, 190), "setns": (308, 268), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "shmget": (29, 194), "syslog": (103, 116), "unshare": (272, 97), "userfaultfd": (323, 282),
}

def call(name, *arguments):
    """Result of a call, or minus its error's number."""
    number = NUMBERS[name][0 if X86 else 1]
    made = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *made)
    return -ctypes.get_errno() if result == -1 else result

def in_child(attempt):
    """What `attempt()` returns, from a process that it may spoil; 0 to 200."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            code = int(attempt())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def won(yes):
    print("WON" if yes else "LOST")
'''


def scripted(stopped_by: str, script: str | Callable[[Any], str]) -> Callable:
    """An attack that is one script, which ends with `won(…)`; or what makes it for a target."""

    @attack(stopped_by)
    def attempt(target) -> bool:
        return succeeds(target, script(target) if callable(script) else script)

    return attempt


def succeeds(target, attempt: str, timeout: float = 60.0) -> bool:
    """Run a script in the sandbox that ends with `won(…)`; whether it says so."""
    result = target.python(CALLS + attempt, timeout)
    last = (result.output.strip().splitlines() or [""])[-1]
    if last not in ("WON", "LOST") and not result.limit_exceeded:
        raise AssertionError(f"the attack could not be made: {result.output[-2000:]}")
    return last == "WON"
