"""Keeping what a process of the service knows, such as Redis' password, from others of the same user."""

from __future__ import annotations

import ctypes

PR_SET_DUMPABLE = 4  # linux/prctl.h


def close_memory() -> None:
    """Have nobody without privileges read this process's environment and memory, or trace it.

    It leaves no core dump from now on. What it starts anew (exec) is open again.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
