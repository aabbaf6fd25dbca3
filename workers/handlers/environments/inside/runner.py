"""The program in which an environment of a foreign package runs, by the Python that the package is for.

`python -s runner.py SCORING ADAPTER FD PARENT MEMORY_MB NETWORK`: `SCORING` is the folder of `wire.py` and
`isolation.py`, `ADAPTER` a file with a class `Episode`, made for each episode as `Episode(ask)`. Its methods,
functions or coroutines, are called by name; `ask(payload)` asks the worker for what is not reached from here.
Standard library only.
"""

import importlib.util
import os
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

MAX_TRACEBACK = 4000
MAX_FILE_BYTES = 1 << 30
MAX_PROCESSES = 1024


def load(name, path):
    """The module of a file that is on no path of modules."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def failure(error):
    """What is told of an exception. A text may hold half a surrogate pair, which no record carries."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    told = {"error": f"{type(error).__name__}: {error}"[:MAX_TRACEBACK], "traceback": lines[-MAX_TRACEBACK:]}
    told = {name: text.encode(errors="backslashreplace").decode() for name, text in told.items()}
    return dict(told, memory=isinstance(error, MemoryError))


def limit(memory_mb):
    """What a process here may use."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def serve(channel, wire, episode_of):
    """Answer calls until the worker has no more use for this process."""

    def ask(payload):
        channel.sendall(wire.encode({"ask": payload}))
        reply = wire.receive(channel)
        if "failed" in reply:
            raise RuntimeError(reply["failed"])
        return reply["answer"]

    def finished(coroutine):
        import asyncio  # only some packages have it

        if not loops:
            loops.append(asyncio.new_event_loop())
        return loops[0].run_until_complete(coroutine)

    episode, loops = None, []
    while True:
        call = wire.receive(channel)
        try:
            if call["method"] == "reset" or episode is None:
                episode = episode_of(ask)
            method = getattr(episode, call["method"], None)
            result = method(**call["arguments"]) if method else None
            reply = wire.encode({"result": finished(result) if hasattr(result, "__await__") else result})
        except BaseException as error:  # SystemExit, too
            reply = wire.encode(failure(error))
        channel.sendall(reply)


def main(scoring, adapter, fd, parent, memory_mb, network):
    """Leave the machine behind, import the package, then serve."""
    # Files of this folder have the names of packages.
    del sys.path[0]
    wire = load("rollout_wire", Path(scoring, "wire.py"))
    isolation = load("rollout_isolation", Path(scoring, "isolation.py"))
    channel = socket.socket(fileno=int(fd))
    channel.set_inheritable(False)
    missing = isolation.isolate(network == "network", True)
    if missing and os.getppid() == int(parent):
        isolation.die_with(int(parent))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    me = os.getpid()
    # A fork must not answer in our name.
    os.register_at_fork(after_in_child=channel.close)
    limit(int(memory_mb))
    hello, episode_of = {"result": missing}, None
    try:
        episode_of = load("rollout_adapter", adapter).Episode
    except BaseException as error:
        hello = failure(error)
    if os.getpid() == me:
        channel.sendall(wire.encode(hello))
        with suppress(EOFError, OSError):
            serve(channel, wire, episode_of)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
