"""A process that stays and starts containers for the host, so that Python need not start for each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from sandbox import processes
from sandbox.errors import SandboxStartError

ANSWER_S = 5.0
"""It takes a millisecond."""
FIRST_ANSWER_S = 10.0
"""A new launcher's takes longer: a Python starts before it, on a machine that is perhaps busy."""
REAP_S = 1.0
"""What is killed ends in a moment, or hangs in a file system; it must not hold up the next start."""


class Started:
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
            except ChildProcessError:  # somebody else has waited for it
                self.returncode = 0
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Launcher:
    """`writable_root.py --serve`, started when it is needed and again should it have ended."""

    def __init__(self, command: Sequence[str], **as_user) -> None:
        """`command`: starts the script; `as_user`: arguments of `subprocess` that make it another user's."""
        self.command = tuple(command)
        self._as_user = as_user
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._started: list[Started] = []
        """What may still be of the launcher's group, though it is somebody's by now."""
        self._untold: list[int] = []
        """Clones whose pid did not come, killed and not waited for yet."""

    def start(
        self, mount: Sequence[str], argv: Sequence[str], env: dict[str, str], stdin: socket.socket
    ) -> Started:
        """Start `argv` behind a mount, in a session of its own, once something was sent to `stdin`. Blocks.

        Raises:
            SandboxStartError: The process did not answer, or it and its successor ended. What they may have
                started was ended as well. It is started anew for the next one.
        """
        request = json.dumps({"mount": list(mount), "argv": list(argv), "env": env}).encode()
        try:
            try:
                started = self._ask(request, stdin)
            except (EOFError, ConnectionError):
                # It was killed, perhaps too lately to be seen. What it had begun waited for `stdin` and is
                # ended with it, so that asking another does nothing twice.
                self.close()
                started = self._ask(request, stdin)
        except (EOFError, OSError, ValueError) as error:
            self.close()
            raise SandboxStartError(f"the launcher of containers does not answer: {error}") from error
        self._started = [child for child in self._started if child.returncode is None]
        self._started.append(started)
        return started

    def _ask(self, request: bytes, stdin: socket.socket) -> Started:
        """Have a launcher that runs start what `request` says. Raises EOFError when it ended instead."""
        if self._process is None or self._process.poll() is not None:
            self._begin()
        assert self._connection is not None
        out, err = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._connection, [request], [stdin.fileno(), out[1], err[1]])
            reply = self._connection.recv(32)
            if not reply:
                raise EOFError("it has ended")
            pid = int(reply)
            if pid <= 0:
                raise ValueError(f"its clone failed ({pid})")
            self._connection.settimeout(ANSWER_S)
        except BaseException:
            os.close(out[0])
            os.close(err[0])
            raise
        finally:
            os.close(out[1])
            os.close(err[1])
        return Started(pid, out[0], err[0])

    def close(self) -> None:
        """End it, and what it has started that nobody knows of; the rest runs on."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._untold += [pid for pid in processes.children(os.getpid()) if self._is_untold(pid)]
            self._process, self._started = None, []
        self._reap()

    def _is_untold(self, pid: int) -> bool:
        """Whether it is a clone of the launcher's whose pid did not come. Those that came run on, and are of
        the launcher's group as well until they become what they shall be.
        """
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            return os.getpgid(pid) == self._process.pid and all(pid != child.pid for child in self._started)
        return False

    def _reap(self) -> None:
        """End and wait for clones that nobody knows of; what does not end in time, the next time."""
        deadline = time.monotonic() + REAP_S
        for pid in self._untold:
            os.kill(pid, signal.SIGKILL)  # it is there: nobody else waits for a child of ours
        while self._untold and time.monotonic() < deadline:
            time.sleep(0.01)
            self._untold = [pid for pid in self._untold if os.waitpid(pid, os.WNOHANG)[0] == 0]

    def _begin(self) -> None:
        self.close()
        self._connection, launcher_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(FIRST_ANSWER_S)
        with launcher_end:
            self._process = subprocess.Popen(
                [*self.command, "--serve", str(launcher_end.fileno())],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[launcher_end.fileno()],
                cwd="/",
                start_new_session=True,
                **self._as_user,
            )
