"""The server inside a sandbox: one shell and the file system, on a Unix socket.

`python3 server.py CONFIG`; the configuration is a JSON file with `socket, directory, workspace, env,
subreaper`. One line goes to standard output when the socket listens and the shell is ready. Each connection
is served by a thread, one request after the other; a second connection can interrupt a command that the first
one runs.
"""

import base64
import json
import os
import signal
import socket
import stat
import sys
import threading
import time

import wire
from shell import DEFAULT_MAX_CHARS, Shell, ShellError

MAX_FILE_BYTES = 64 * 1024 * 1024  # content travels as base64 in one frame
PR_SET_CHILD_SUBREAPER = 36


class RequestError(Exception):
    """The caller's request cannot be carried out; the message says why."""


class Server:
    """Answers requests about one shell and its file system."""

    def __init__(self, shell, workspace):
        self._shell = shell
        self._workspace = workspace
        self._started = time.monotonic()
        self._operations = {
            "bash": self._bash,
            "interrupt": self._interrupt,
            "ping": self._ping,
            "read_file": self._read_file,
            "write_file": self._write_file,
            "shutdown": self._shutdown,
        }

    def serve_connection(self, connection):
        """Answer requests until the peer closes the connection."""
        with connection:
            try:
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
                names = ", ".join(sorted(self._operations))
                raise RequestError("unknown operation %r; known are %s" % (request.get("op"), names))
            return {"ok": True, "result": operation(request, connection)}
        except (RequestError, OSError, KeyError, TypeError, ValueError) as error:
            return _failure("SandboxRequestError", error)
        except ShellError as error:
            return _failure("SandboxError", error)

    def _bash(self, request, connection):
        command = str(request["command"])
        if request.get("is_input"):
            if not self._shell.send_input(command):
                raise RequestError("no command is running that could take input; send it as a command")
            return {"sent": True}
        if "\0" in command:
            raise RequestError("the command contains a NUL character, which no shell can take")
        limit = int(request.get("max_chars") or DEFAULT_MAX_CHARS)
        try:
            return self._shell.run(command, float(request["timeout"]), limit, connection.fileno())
        except OSError as error:
            raise ShellError("the shell cannot work: %s" % error)  # a full disk, no processes left

    def _interrupt(self, request, connection):
        return {"was_running": self._shell.interrupt()}

    def _ping(self, request, connection):
        return {"shell_pid": self._shell.pid(), "uptime_s": time.monotonic() - self._started}

    def _read_file(self, request, connection):
        path = os.path.join(self._workspace, request["path"])
        limit = min(int(request.get("max_bytes") or MAX_FILE_BYTES), MAX_FILE_BYTES)
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise RequestError("%s is not a regular file" % path)
        with open(path, "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise RequestError("%s has %d bytes; at most %d are read" % (path, info.st_size, limit))
        return {"content": base64.b64encode(content).decode()}

    def _write_file(self, request, connection):
        path = os.path.join(self._workspace, request["path"])
        content = base64.b64decode(request["content"])
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        if request.get("mode") is not None:
            os.chmod(path, int(request["mode"]))
        return {"size": len(content)}

    def _shutdown(self, request, connection):
        wire.send(connection, {"ok": True, "result": {}})
        os._exit(0)


def _failure(kind, error):
    text = "%s is missing in the request" % error if isinstance(error, KeyError) else str(error)
    return {"ok": False, "error": {"type": kind, "message": text}}


def become_subreaper():
    """Without a container: orphans below us become our children, so that a killer of descendants finds
    all.
    """
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap_orphans(shell):
    """Wait for dead children other than the shell, which ptyprocess waits for."""
    try:
        keep = shell.pid()
        with open("/proc/self/task/%d/children" % os.getpid()) as file:
            for pid in map(int, file.read().split()):
                if pid != keep:
                    os.waitpid(pid, os.WNOHANG)
    except (OSError, AttributeError):
        pass  # nothing to reap, or the shell is being replaced


def main(config_path):
    """Serve until killed."""
    with open(config_path) as file:
        config = json.load(file)
    if config.get("subreaper"):
        become_subreaper()
    os.chdir(config["workspace"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(config["socket"]):
        os.unlink(config["socket"])
    listener.bind(config["socket"])
    listener.listen(64)

    holder = []

    def on_child(signum, frame):
        for shell in holder:
            shell.wake()
            if config.get("subreaper"):
                reap_orphans(shell)

    signal.signal(signal.SIGCHLD, on_child)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, frame: os._exit(0))
    shell = Shell(config["directory"], config["env"], config["workspace"])
    holder.append(shell)
    server = Server(shell, config["workspace"])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # the host closes its end of the pipe now
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=server.serve_connection, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
