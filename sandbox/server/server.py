"""The server inside a sandbox: a shell, files and tools, on a Unix socket that the host hands in.

Started by `start.py`. The listening socket is made outside and its path is never visible inside, so no
process in the sandbox can connect to it, replace it or answer in the server's place. A key comes with it that
every connection has to begin with; an agent that had it could speak to us as the host does. Each connection
is served by a thread, one request after the other; a second connection can interrupt or feed a command that
the first one runs. What a client numbers outlives its connection (`ledger.py`).

In a container the server is the init of the PID namespace. So no process inside can kill or stop it, what
loses its parent comes to it, and there is no other init, in which a process could outlive a reset, or through
which it could act under no filter of system calls.
"""

import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import warnings  # noqa: F401 (`os.execvpe` imports it: after a fork amid another thread's import, never)

import wire
from errors import RequestError, ServerError
from ipython import IPython
from ledger import Ledger
from program import Programs
from repair import open_root
from tape import TAPE
from terminal import Terminal
from tree import Trees

LOAD_REST_S = 0.2
"""After the start; sooner it would hold up the first command."""


class Server:
    """Answers requests by handing each to the part that knows the operation."""

    def __init__(self, shell, ipython, programs, workspace, key, env):
        self._shell = shell
        self._key = key
        self._started = time.monotonic()
        self._operations = {}
        self._workspace = workspace
        self._loading = threading.Lock()
        self._bridge = None
        terminal = Terminal(shell, ipython.while_all_end)
        self._ledger, trees = Ledger(), Trees(workspace)
        self._add(self, self._ledger, terminal, ipython, programs, trees, TAPE)
        self._state = [shell, ipython, self._ledger, trees, env, dict(env)]
        self._operations.update(dict.fromkeys(("state", "trees", "restore"), self._load_state))

    def _add(self, *parts):
        """Answer what these parts can: NAME by their method `op_NAME(request, connection)`."""
        for part in parts:
            names = [name for name in dir(type(part)) if name.startswith("op_")]
            self._operations.update((name[len("op_") :], getattr(part, name)) for name in names)

    def load_rest(self):
        """The parts that no first command needs; to import them takes as long as to start bash. Once."""
        with self._loading:
            if self._workspace is not None:
                import kernel_life  # noqa: F401 (of the first cell)
                from editor import Editor
                from files import Files

                self._add(Editor(self._workspace), Files(self._workspace))
                self._workspace = None

    def serve_connection(self, connection):
        """Answer requests until the peer closes the connection."""
        with connection:
            try:
                if wire.receive(connection) != {"key": self._key}:
                    return
                while True:
                    request = wire.receive(connection)
                    if request is None:
                        return
                    reply = self._answer(request, connection)
                    if connection.fileno() < 0:
                        return  # an operation has taken it over
                    wire.send(connection, reply)
            except (OSError, ValueError, wire.FrameTooLarge):
                return  # the peer is gone or speaks something else; others are not disturbed

    def _answer(self, request, connection):
        try:
            if "known" in request:  # `abandon` has a number, too
                return self._ledger.answer(request, self._answer)
            operation = self._operations.get(request.get("op"))
            if operation is None:
                self.load_rest()
                operation = self._operations.get(request.get("op"))
            if operation is None:
                names = ", ".join(sorted(self._operations))
                raise RequestError("unknown operation %r; known are %s" % (request.get("op"), names))
            open_root()
            return {"ok": True, "result": operation(request, connection)}
        except (RequestError, OSError, KeyError, TypeError, ValueError) as error:
            return _failure("SandboxRequestError", error)
        except ServerError as error:
            return _failure(error.kind, error)

    def op_listen(self, request, connection):
        """The bridge's, which comes with the first of these: most sandboxes need none."""
        with self._loading:
            if self._bridge is None:
                from bridge import Bridge

                self._bridge = Bridge(int(request["port"]))
                self._add(self._bridge)
        return self._bridge.op_listen(request, connection)

    def _load_state(self, request, connection):
        """Of a sandbox that is kept or comes from one that was; most are neither."""
        with self._loading:
            if self._state is not None:
                from state import State

                self._add(State(*self._state))
                self._state = None
        return self._operations[request["op"]](request, connection)

    def op_ping(self, request, connection):
        return {"shell_pid": self._shell.pid(), "uptime_s": time.monotonic() - self._started}


def _failure(kind, error):
    text = "%s is missing in the request" % error if isinstance(error, KeyError) else str(error)
    return {"ok": False, "error": {"type": kind, "message": text}}


def reap_orphans(shell, ipython):
    """Wait for dead children other than the shell and the kernel, which are waited for elsewhere.

    What `exec` started is never among them: these are the main thread's children and what lost its parent.
    """
    try:
        keep = {shell.pid(), *ipython.pids()}
        with open("/proc/self/task/%d/children" % os.getpid()) as file:
            for pid in map(int, file.read().split()):
                if pid not in keep:
                    os.waitpid(pid, os.WNOHANG)
    except (OSError, AttributeError):
        pass  # nothing to reap, or the shell is being replaced


class CleanThreads:
    """Threads that the main one begins for others. A thread and a program inherit priority, scheduling class
    and processors of who begins them, and only the main one's are safe: the filter tells threads by number,
    and 1 is the only one that it can know. What an agent took from the others cannot be given back.
    """

    def __init__(self):
        self._functions = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()

    def fileno(self):
        """Readable when :meth:`begin` is to be called, by the main thread."""
        return self._reader

    def begin(self):
        """Begin one that is wanted."""
        os.read(self._reader, 1)
        threading.Thread(target=self._functions.get(), daemon=True).start()

    def call(self, function):
        """What `function()` returns or raises in such a thread."""
        answer = queue.SimpleQueue()  # a `concurrent.futures.Future` would import logging at each start

        def work():
            try:
                answer.put((function(), None))
            except BaseException as error:
                answer.put((None, error))

        self._functions.put(work)
        os.write(self._writer, b"1")
        result, error = answer.get()
        if error is not None:
            raise error
        return result


def serve(config, shell, loader, listener, key):
    """Serve until killed. `listener`: descriptor of the listening socket."""
    listener = socket.socket(fileno=listener)
    directory, workspace, env, limits = (config[key] for key in ("directory", "workspace", "env", "limits"))
    ipython = IPython(directory, workspace, env, limits)

    def on_child(signum, frame):
        reap_orphans(shell, ipython)

    signal.signal(signal.SIGCHLD, on_child)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # The kernel spares an init what it has no handler for; Python brings one for SIGINT.
        alone = signal.SIG_DFL if os.getpid() == 1 else lambda signum, frame: os._exit(0)
        signal.signal(number, alone)
    threads = CleanThreads()
    # The kernel gives SIGCHLD to the thread that started the child, and Python runs the handler only when
    # this one wakes; so the C part of the handler wakes the shell's waiting thread.
    signal.set_wakeup_fd(shell.wake_fd, warn_on_full_buffer=False)
    python = config["python"]
    programs = Programs(shell, ipython, directory, workspace, env, limits, python, loader, threads.call)
    server = Server(shell, ipython, programs, workspace, key, env)
    if "files" not in sys.modules:  # else this is a clone, where it takes no time when it is needed
        later = threading.Timer(LOAD_REST_S, server.load_rest)
        later.daemon = True
        later.start()
    poller = select.poll()
    for source in (listener, threads):
        poller.register(source, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd == threads.fileno():
                threads.begin()
                continue
            connection, _ = listener.accept()
            threading.Thread(target=server.serve_connection, args=(connection,), daemon=True).start()
