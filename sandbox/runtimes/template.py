"""A started container of which a node's sandboxes are clones: our side of `sandbox/server/template.py`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox import payload, processes
from sandbox.errors import SandboxStartError
from sandbox.server import seccomp

ANSWER_S, MOUNT_S = 10.0, 60.0
"""Until a process has been begun, which takes milliseconds, and a tenth of a second where the template starts
first; and until its image is mounted, from a disk that may be slow.
"""
TRIES = 2
NAME = "sbx-template"  # as in `server/template.py`
END_S = 1.0
FIRST_TREE = 64
"""From which number on the descriptors are by whose names it goes: a clone uses the first few otherwise."""
HOLD = "echo $$; read end; exit 0"
BECOME = 'exec 8<"$1" 9<"$2"; shift 2; exec "$@"'
"""What the container's shell does: tells its pid and waits to be joined, or is the template itself."""
RESTRICTED = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
"""Where this says 1, as on Ubuntu since 23.10, Apptainer may make user namespaces and so may what it starts,
but no other: the template has to be one of these, and takes longer to start.
"""
PR_SET_CHILD_SUBREAPER = 36
MOST_WORDS = 2000
_adopters: set[Template] = set()
"""Those that are yet to become children of this process, where Apptainer has started them."""
_adopters_lock = threading.Lock()


class NotMounted(SandboxStartError):
    """A clone says so of its image; nothing is wrong with the template."""


class Clone:
    """A child of ours that another process has started, as a container needs it of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        self.pid, self._started = pid, processes.start_time(pid) or 0
        self.stdout, self.stderr = os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # not ours yet, or somebody else has waited for it
                self.returncode = None if processes.is_alive(self.pid, self._started) else 0
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def end(self) -> None:
        """End it, and wait for that a little."""
        processes.send_to(self.pid, self._started)
        deadline = time.monotonic() + END_S
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        self.stdout.close()
        self.stderr.close()


class Template:
    """The process and its container, started when needed and again should it have ended. For any thread."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        shown: Sequence[Path],
        code: Path,
        interpreter: Path,
        **as_user,
    ) -> None:
        """`command` starts the container with a shell, whose script follows; `shown`: directories that it
        shows, the host's first; `code, interpreter`: what the process is made of, below these; `as_user`:
        arguments of `subprocess`.
        """
        self.command = list(command)
        self._env, self._as_user = dict(env), as_user
        self.shown = {path: _identity(path) for path in shown}
        self._state, self._trees = shown[0], (code, interpreter)
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen] = []
        """What holds the container until it is joined, and the template; each has begun a process group."""
        self._connection: socket.socket | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)

    def is_current(self) -> bool:
        """Whether what it shows has not been replaced by other directories of the same names."""
        with contextlib.suppress(OSError):
            return all(_identity(path) == identity for path, identity in self.shown.items())
        return False

    def clone(self, request: bytes) -> tuple[Clone, socket.socket]:
        """Start what is asked for; returns it, with its mounts made, and a socket to its standard input.

        Blocks. When the socket is closed before anything more was sent, it ends.

        Raises:
            SandboxStartError: With what it said. Nothing of it runs then. The template is started anew for
                the next one if it did not answer, and at once if it had ended.
        """
        for _ in range(TRIES):
            connection = self._connected()
            try:
                return self._ask(request, connection)
            except (EOFError, OSError, ValueError) as error:  # the last: another thread has closed it
                self._give_up(connection)
                problem = error
                if isinstance(error, TimeoutError):
                    break
        raise SandboxStartError(f"the template of containers does not answer: {problem}") from problem

    def _ask(self, request: bytes, connection: socket.socket) -> tuple[Clone, socket.socket]:
        """As `clone`; raises EOFError when the template has ended instead of answering."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (out, far_out), (err, far_err) = os.pipe(), os.pipe()
        clone = None
        try:
            try:
                ours.send(request)
                socket.send_fds(connection, [b"c"], [theirs.fileno(), far_out, far_err])
            finally:
                theirs.close()
                os.close(far_out)
                os.close(far_err)
            clone = Clone(self._pid(ours, connection, err), out, err)
            if self in _adopters:
                self._adopt(False)
            self._await_mounts(ours, err)
            return clone, ours
        except BaseException:
            ours.close()
            if clone is None:  # what has been begun ends, for nobody has been told of it
                os.close(out)
                os.close(err)
            else:
                clone.end()
            raise

    def _pid(self, ours: socket.socket, connection: socket.socket, err: int) -> int:
        """Of the process that has been begun; nothing of it goes on before that is known."""
        answer = _answer(ours, time.monotonic() + ANSWER_S, connection)
        if not answer and (words := _words(err)):
            raise SandboxStartError(words)
        if not answer:
            raise EOFError(f"it has ended; it said: {self._words()}")
        return int(answer)

    @staticmethod
    def _await_mounts(ours: socket.socket, err: int) -> None:
        try:
            answer = _answer(ours, time.monotonic() + MOUNT_S)
        except TimeoutError as error:
            raise NotMounted(f"its image was not mounted after {MOUNT_S:g} s") from error
        if answer != b"entered":
            raise NotMounted(_words(err) or "it has ended before all was mounted")

    def _connected(self) -> socket.socket:
        with self._lock:
            if self._connection is None or _has_ended(self._connection):
                self._begin()
            assert self._connection is not None
            return self._connection

    def tidy(self) -> None:
        """Let nothing stay of one that has ended."""
        with self._lock:  # while it is held, no number becomes another's
            connection = self._connection
            for process in self._processes:
                process.poll()
        if connection is not None and _has_ended(connection):
            self._give_up(connection)

    def close(self) -> None:
        """End it; the clones run on."""
        with self._lock:
            self._end()

    def _give_up(self, connection: socket.socket) -> None:
        """End the one at the other end, unless another one has taken its place."""
        with self._lock:
            if self._connection is connection:
                self._end()

    def _end(self) -> None:
        if self._connection is not None:
            # Whoever waits for it hears so. It is closed with its last user: its number would be another's.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection = None
        while self._processes:
            process, deadline = self._processes.pop(), time.monotonic() + END_S
            group = process.pid
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has none any more
                os.waitpid(-group, os.WNOHANG)  # where none of it is ours, the number is another's by now
                os.killpg(group, signal.SIGKILL)  # what hangs, and what it had begun
                while time.monotonic() < deadline:
                    if not os.waitpid(-group, os.WNOHANG)[0]:
                        time.sleep(0.001)
            process.poll()
        self._adopt(False)

    def _adopt(self, does: bool) -> None:
        """Have orphans become ours, or no longer: all but the template would stay zombies, and who waits for
        their end would wait for ever.
        """
        with _adopters_lock:
            (_adopters.add if does else _adopters.discard)(self)
            seccomp.prctl(PR_SET_CHILD_SUBREAPER, bool(_adopters))

    def _words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-MOST_WORDS:].decode(errors="replace").strip() or "(nothing)"

    def _begin(self) -> None:
        self._end()
        self._said.seek(0)
        self._said.truncate()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inside, outside = socket.socketpair()
        with theirs, inside, outside, contextlib.ExitStack() as stack:
            places = [str(path) for path in self._trees]
            if _is_restricted():
                self._adopt(True)  # it leaves Apptainer, and becomes a child of ours
                command = [*self.command, BECOME, "sh", *places, *self._program(8, 9)]
                self._run(command, theirs, subprocess.DEVNULL)
                return
            self._run([*self.command, HOLD], inside, inside)
            trees = [_opened(path, stack) for path in self._trees]
            self._run([*self._program(*trees), *places], theirs, outside, pass_fds=trees)

    def _program(self, code: int, python: int) -> list[str]:
        """Its command line, by descriptors of what it is made of."""
        usr = f"/proc/self/fd/{python}"
        command = [*payload.loader(self._trees[1], usr), f"{usr}/bin/python3", "-BES"]
        return [*command, f"/proc/self/fd/{code}/template.py", f"{self._state}/"]

    def _run(self, command: Sequence[str], stdin: socket.socket, stdout: Any, **options: Any) -> None:
        process = subprocess.Popen(
            command,
            env=self._env,
            stdin=stdin,
            stdout=stdout,
            stderr=self._said,
            cwd="/",
            start_new_session=True,
            **self._as_user,
            **options,
        )
        self._processes.append(process)


def _is_restricted() -> bool:
    with contextlib.suppress(OSError):
        return RESTRICTED.read_text().strip() == "1"
    return False


def _opened(path: Path, stack: contextlib.ExitStack) -> int:
    """A descriptor of a directory, closed at the end of `stack`."""
    first = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        tree = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, FIRST_TREE)
    finally:
        os.close(first)
    stack.callback(os.close, tree)
    return tree


def reap_again(before: set[int]) -> set[int]:
    """Wait for clones of which nobody was told, if they had ended a while ago already, and return those that
    have by now. By their name: another one's end is for whoever has begun it to hear of.
    """
    zombies = {pid for pid in processes.children(os.getpid()) if processes.start_time(pid) is None}
    for pid in zombies & before:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == NAME:
                os.waitpid(pid, os.WNOHANG)
    return zombies


def _identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino


def _has_ended(connection: socket.socket) -> bool:
    """Whether nobody has its other end: the template says nothing over it."""
    with contextlib.suppress(TimeoutError):
        return not _answer(connection, 0.0)
    return False


def _answer(ours: socket.socket, deadline: float, other: socket.socket | None = None) -> bytes:
    """What a clone says next; nothing when it has ended, or the `other` has. Raises TimeoutError."""
    events = select.poll()  # not `select`, for a host has thousands of descriptors
    for source in filter(None, (ours, other)):
        events.register(source, select.POLLIN)
    ready = [fd for fd, _ in events.poll(max(deadline - time.monotonic(), 0) * 1000)]
    if not ready:
        raise TimeoutError("nothing for too long")
    with contextlib.suppress(ConnectionError):  # it has ended, and read nothing
        return ours.recv(64, socket.MSG_DONTWAIT) if ours.fileno() in ready else b""
    return b""


def _words(err: int) -> str:
    """What has been said on a pipe to whose other end nobody writes any more."""
    os.set_blocking(err, False)
    try:
        return os.read(err, MOST_WORDS).decode(errors="replace").strip()
    except BlockingIOError:
        return ""
    finally:
        os.set_blocking(err, True)
