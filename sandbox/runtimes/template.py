"""A started container of which a node's sandboxes are clones: our side of `sandbox/server/template.py`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sandbox import processes
from sandbox.errors import SandboxStartError
from sandbox.server import seccomp

ANSWER_S = 10.0
"""It takes milliseconds; where the template has to start first, on a machine that is idle, a tenth of one."""
TRIES = 2
END_S = 1.0
PR_SET_CHILD_SUBREAPER = 36
MOST_WORDS = 2000


class Clone:
    """A child of ours that another process has started, as a container needs it of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.stdout, self.stderr = os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # not ours yet, or somebody else has waited for it
                self.returncode = None if processes.start_time(self.pid) else 0
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Template:
    """The container, started when it is needed and again should it have ended. For any thread."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], shown: Iterable[Path], **as_user
    ) -> None:
        """`command` starts it; `shown`: directories that it shows; `as_user`: arguments of `subprocess`."""
        self.command = list(command)
        self._env, self._as_user = dict(env), as_user
        self.shown = {path: _identity(path) for path in shown}
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)

    def shows(self, path: Path) -> bool:
        """Whether it shows what is there now: nothing has been mounted since in the way to it."""
        with contextlib.suppress(OSError):
            device = path.stat().st_dev
            return any(
                identity[0] == device and path.is_relative_to(place) for place, identity in self.shown.items()
            )
        return False

    def is_current(self) -> bool:
        """Whether what it shows has not been replaced by other directories of the same names."""
        with contextlib.suppress(OSError):
            return all(_identity(path) == identity for path, identity in self.shown.items())
        return False

    def clone(self, request: bytes) -> tuple[Clone, socket.socket]:
        """Start what is asked for; returns it, with its mounts made, and a socket to its standard input.

        Blocks. When the socket is closed before anything more was sent, it ends.

        Raises:
            SandboxStartError: With what it said. The template is started anew for the next one if it did not
                answer, and at once if it had ended: what that had begun ends, for its socket is closed.
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
        try:
            try:
                socket.send_fds(connection, [b"c"], [theirs.fileno(), far_out, far_err])
            finally:
                theirs.close()
                os.close(far_out)
                os.close(far_err)
            ours.send(request)
            return Clone(self._pid(ours, connection, err), out, err), ours
        except BaseException:
            ours.close()
            os.close(out)
            os.close(err)
            raise

    def _pid(self, ours: socket.socket, connection: socket.socket, err: int) -> int:
        """Of the clone, once that has told that all is mounted."""
        deadline, answers = time.monotonic() + ANSWER_S, set()
        events = select.poll()  # not `select`, for a host has thousands of descriptors
        for source in (ours, connection):
            events.register(source, select.POLLIN)
        while len(answers) < 2:
            ready = [fd for fd, _ in events.poll(max(deadline - time.monotonic(), 0) * 1000)]
            if not ready:
                raise TimeoutError(f"nothing for {ANSWER_S:g} s")
            answer = b""
            if ours.fileno() in ready:
                with contextlib.suppress(ConnectionError):  # it has ended, and read nothing
                    answer = ours.recv(64)
                if not answer and (words := os.read(err, MOST_WORDS)):
                    raise SandboxStartError(words.decode(errors="replace").strip())
            if not answer:
                raise EOFError(f"it has ended; it said: {self._words()}")
            answers.add(answer)
        (pid,) = answers - {b"entered"}
        return int(pid)

    def _connected(self) -> socket.socket:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._begin()
            assert self._connection is not None
            return self._connection

    def tidy(self) -> None:
        """Let nothing stay of one that has ended."""
        if self._process is not None and self._process.poll() is not None:
            self.close()

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
            self._connection.close()  # at which it ends
            self._connection = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            group = self._process.pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)  # what hangs, and what it had begun
            self._process.wait()
            deadline = time.monotonic() + END_S
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0] or time.monotonic() < deadline:
                    time.sleep(0.001)  # these have become our children
            self._process = None

    def _words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-MOST_WORDS:].decode(errors="replace").strip() or "(nothing)"

    def _begin(self) -> None:
        self._end()
        # A clone's parent ends at once, and it becomes a child of ours, whoever has started the template.
        seccomp.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._said.truncate(0)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                self.command,
                env=self._env,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",
                start_new_session=True,
                **self._as_user,
            )


def _identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino
