"""The server inside a sandbox: a shell, files and tools, on a Unix socket that the host hands in.

`python3 server.py CONFIG`, with a socket as standard input over which the listening socket comes. The
configuration is a JSON file with `directory, workspace, env, limits, python, bash, walls, binds` (`python`:
command line of the interpreter that runs us; `bash`: one of our own, for images without; null = the image's;
`walls`: whether this is a container, see `walls.py`; `binds`: see `check_binds`). With the socket comes the
key that every connection has to begin with; an agent that had it could speak to us as the host does. The
listening socket is made outside and its path is never visible inside, so no process in the sandbox can
connect to it, replace it or answer in the server's place. One line goes to standard output when the shell is
ready. Each connection is served by a thread, one request after the other; a second connection can interrupt
or feed a command that the first one runs.

In a container the server is the init of the PID namespace. So no process inside can kill or stop it, what
loses its parent comes to it, and there is no other init, in which a process could outlive a reset, or through
which it could act under no filter of system calls.
"""

import array
import concurrent.futures
import json
import os
import queue
import select
import shutil
import signal
import socket
import sys
import threading
import time

import seccomp
import walls
import wire
from errors import RequestError, ServerError
from ipython import IPython
from program import Programs
from repair import Loader
from shell import Shell
from terminal import Terminal
from tree import Trees

PR_SET_CHILD_SUBREAPER = 36
LOAD_REST_S = 0.2
"""After the start; sooner it would hold up the first command."""


class Server:
    """Answers requests by handing each to the part that knows the operation."""

    def __init__(self, shell, ipython, programs, workspace, key):
        self._shell = shell
        self._key = key
        self._started = time.monotonic()
        self._operations = {"ping": self._ping, "shutdown": self._shutdown}
        self._workspace = workspace
        self._loading = threading.Lock()
        terminal = Terminal(shell, ipython.while_all_end)
        for part in (terminal, ipython, programs, Trees(workspace)):
            self._operations.update(part.operations())

    def load_rest(self):
        """The parts that no first command needs; to import them takes as long as to start bash. Once."""
        with self._loading:
            if self._workspace is not None:
                import kernel_life  # noqa: F401 (of the first cell)
                from editor import Editor
                from files import Files

                for part in (Editor(self._workspace), Files(self._workspace)):
                    self._operations.update(part.operations())
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
                    wire.send(connection, self._answer(request, connection))
            except (OSError, ValueError, wire.FrameTooLarge):
                return  # the peer is gone or speaks something else; others are not disturbed

    def _answer(self, request, connection):
        try:
            operation = self._operations.get(request.get("op"))
            if operation is None:
                self.load_rest()
                operation = self._operations.get(request.get("op"))
            if operation is None:
                names = ", ".join(sorted(self._operations))
                raise RequestError("unknown operation %r; known are %s" % (request.get("op"), names))
            return {"ok": True, "result": operation(request, connection)}
        except (RequestError, OSError, KeyError, TypeError, ValueError) as error:
            return _failure("SandboxRequestError", error)
        except ServerError as error:
            return _failure("SandboxError", error)

    def _ping(self, request, connection):
        return {"shell_pid": self._shell.pid(), "uptime_s": time.monotonic() - self._started}

    def _shutdown(self, request, connection):
        wire.send(connection, {"ok": True, "result": {}})
        os._exit(0)


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


def prefer_us_when_memory_is_short():
    """Should the node run out of memory, the kernel ends something here and not a worker or the host.

    For all of the sandbox, because the children of a process that is not dumpable cannot say it themselves.
    Nor can such a process itself. Of equals the kernel takes the largest, which is not the server.
    """
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # a machine without it; nothing depends on it


class CleanThreads:
    """Threads that the main one begins for others. A thread and a program inherit priority, scheduling class
    and processors of who begins them, and only the main one's are safe: the filter tells threads by number,
    and 1 is the only one that it can know. What an agent took from the others cannot be given back.
    """

    def __init__(self):
        self._wanted = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()

    def fileno(self):
        """Readable when :meth:`begin` is to be called, by the main thread."""
        return self._reader

    def begin(self):
        """Begin one that is wanted."""
        os.read(self._reader, 1)
        threading.Thread(target=self._wanted.get(), daemon=True).start()

    def call(self, function):
        """What `function()` returns or raises in such a thread."""
        answer = concurrent.futures.Future()

        def work():
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        self._wanted.put(work)
        os.write(self._writer, b"1")
        return answer.result()


def take_listener():
    """The listening socket and the key, which the host sends over the socket that is our standard input.

    Sent and not inherited, because what the runtime runs in the container before us has the same.
    """
    item = array.array("i", [-1])
    with socket.socket(fileno=os.dup(0)) as source:
        key, messages, _, _ = source.recvmsg(64, socket.CMSG_SPACE(item.itemsize))
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            item = array.array("i", data[: item.itemsize])
    listener = socket.socket(fileno=item[0])
    os.set_inheritable(listener.fileno(), False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return listener, key.decode()


def check_binds(binds):
    """That each (place, device, inode) shows what the host had checked: runtimes mount by name, and who may
    write to the directory above may have given the name to something else meanwhile.
    """
    for place, *identity in binds:
        info = os.stat(place)
        if [info.st_dev, info.st_ino] != identity:
            raise SystemExit("what is bound at %s was swapped between check and mount; ask again" % place)


def start_shell(config, loader):
    """The image's bash, else, or should the agent break it, the one that comes with our interpreter."""
    programs = [["bash"]]
    if config.get("bash"):
        programs.append(config["bash"])
        if shutil.which("bash", path=config["env"].get("PATH")) is None:
            programs.pop(0)
    return Shell(
        config["directory"],
        config["env"],
        config["workspace"],
        programs,
        config.get("limits"),
        config["own_namespace"],
        loader,
    )


def main(config_path):
    """Serve until killed."""
    prefer_us_when_memory_is_short()
    with open(config_path) as file:
        config = json.load(file)
    if config["walls"]:
        walls.put_up()
    check_binds(config["binds"])
    listener, key = take_listener()
    # The init of a namespace of our own? Only then "all processes" are the agent's, and only then can none of
    # them signal us: the kernel spares an init, stopping and killing included.
    config["own_namespace"] = os.getpid() == 1
    if not config["own_namespace"]:  # what loses its parent becomes our child, and is found
        seccomp.prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.chdir(config["workspace"])

    holder = []
    ipython = IPython(config["directory"], config["workspace"], config["env"], config.get("limits"))

    def on_child(signum, frame):
        for shell in holder:
            reap_orphans(shell, ipython)

    signal.signal(signal.SIGCHLD, on_child)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # The kernel spares an init what it has no handler for; Python brings one for SIGINT.
        alone = signal.SIG_DFL if config["own_namespace"] else lambda signum, frame: os._exit(0)
        signal.signal(number, alone)
    loader = Loader(config["own_namespace"])
    threads = CleanThreads()
    shell = start_shell(config, loader)
    holder.append(shell)
    # The kernel gives SIGCHLD to the thread that started the child, and Python runs the handler only when
    # this one wakes; so the C part of the handler wakes the shell's waiting thread.
    signal.set_wakeup_fd(shell.wake_fd, warn_on_full_buffer=False)
    programs = Programs(
        shell,
        ipython,
        config["directory"],
        config["workspace"],
        config["env"],
        config.get("limits"),
        config["python"],
        loader,
        threads.call,
    )
    server = Server(shell, ipython, programs, config["workspace"], key)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    os.dup2(0, 1)  # the host closes its end of the pipe now
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


if __name__ == "__main__":
    main(sys.argv[1])
