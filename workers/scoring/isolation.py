"""How a scorer leaves the machine: its network, its processes and every privilege.

A worker's environment and memory hold the password of Redis, and the kernel lets every process of its user
read them in /proc. So a scorer gets a /proc with nothing in it but itself and what is no process. Standard
library only: it runs before the scorer's first call.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x08000000, 0x10000000, 0x40000000
CLONE_NEWPID = 0x20000000
PR_SET_PDEATHSIG, KILL = 1, 9
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18  # linux/mount.h
CAPABILITIES_V3 = 0x20080522  # linux/capability.h
KEPT = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "sys", "uptime", "version", "vmstat")
"""Of /proc, besides the scorer itself: what libraries look at."""

_libc = ctypes.CDLL(None, use_errno=True)


def isolate(network: bool = False, pids: bool = False) -> str | None:
    """Leave the machine's network, its shared memory, its other processes and every privilege behind.

    The process must have a single thread.

    Args:
        network: Whether the machine's network stays.
        pids: Go on as the first of a namespace of processes: all end with it, and it with this one, which
            waits and ends with its status.

    Returns:
        Why that is not possible here, in words; None: it is done.
    """
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    uid, gid, above = os.getuid(), os.getgid(), os.getppid()
    kinds = CLONE_NEWUSER | CLONE_NEWIPC | CLONE_NEWNS
    kinds |= (0 if network else CLONE_NEWNET) | (CLONE_NEWPID if pids else 0)
    try:
        _check(_libc.unshare(kinds), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        if pids and (first := os.fork()):
            _wait_for(first, above)
        if pids:
            _libc.prctl(PR_SET_PDEATHSIG, KILL)
        _hide_processes()
        # Who made the mounts could take them away again.
        _check(_libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()), "capset")
    except OSError as error:
        return f"no namespaces of their own on this machine: {error}"
    return None


def die_with(parent: int) -> None:
    """Be killed when the parent ends, however it ends. Not earlier than privileges change: that undoes it."""
    _libc.prctl(PR_SET_PDEATHSIG, KILL)
    if os.getppid() != parent:
        os._exit(0)


def _wait_for(first: int, above: int) -> None:
    """Hold nothing open that the first process has, and end as it does, or with the process above."""
    os.closerange(3, 1 << 16)
    _check(_libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()), "capset")
    die_with(above)
    status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 1)


def _hide_processes() -> None:
    """Cover /proc with a file system that has this process alone. Children see it under `self`, too."""
    # As /proc has it, which may be of another namespace than the process is.
    me, here = str(Path("/proc/self").readlink()), os.open(".", os.O_PATH)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    os.chdir("/proc")  # stays the way to what is covered now
    try:
        _mount("tmpfs", "/proc", "tmpfs", 0)
        Path("/proc", me).mkdir()
        _mount(me, f"/proc/{me}", None, MS_BIND)
        Path("/proc/self").symlink_to(me)
        Path("/proc/mounts").symlink_to("self/mounts")
        for name in KEPT:
            target = Path("/proc", name)
            with suppress(OSError):
                target.mkdir() if Path(name).is_dir() else target.touch()
                _mount(name, str(target), None, MS_BIND)
    finally:
        os.fchdir(here)
        os.close(here)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    names = [name and name.encode() for name in (source, target, kind)]
    _check(_libc.mount(*names, ctypes.c_ulong(flags), None), f"mount {target}")


def _check(status: int, what: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
