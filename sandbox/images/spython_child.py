"""Runs one operation of spython: `python -m sandbox.images.spython_child OPERATION JSON`.

In a process of its own, because spython ends the interpreter on errors, has no time limit and calls a program
named `singularity`, which must be found on a PATH that is ours to change only here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from sandbox.images import subordinates
from sandbox.server import keyring, seccomp

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(operation: str, arguments: dict) -> int:
    """0 = done, 1 = the program failed and has said why."""
    from spython.main import Client

    Client.quiet = True
    if operation == "inspect":
        result = Client.inspect(arguments["image"])
        print(json.dumps(result))
        return 0 if result else 1
    if operation == "pull":
        Client.pull(arguments["source"], name=arguments["image"], quiet=True)
    else:
        Client.build(
            arguments["source"], arguments["image"], options=arguments["options"], sudo=False, quiet=True
        )
    # spython does not tell success from failure here.
    return 0 if Path(arguments["image"]).exists() else 1


def confine() -> None:
    """What a definition runs may mount and make namespaces, as Apptainer does for it, but reaches neither the
    user's keys nor the kernel (`seccomp.KERNEL`).

    A plain user who has subordinate ids goes without the filter: only a setuid program, newuidmap, can map
    them, and whoever may load a filter without being root may start none.
    """
    keyring.join_own()
    if os.geteuid() == 0:
        seccomp.load(building=True, no_new_privs=False)
    elif not subordinates.are_given():
        seccomp.load(building=True)


def end_with_parent() -> None:
    """Should the parent be killed, a build that nobody waits for ends with all its processes: its group."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    confine()
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
