"""A process that stays and starts containers for the host, so that Python need not start for each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence

from sandbox.errors import SandboxStartError

ANSWER_S = 5.0
"""It takes a millisecond."""


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

    def start(
        self, mount: Sequence[str], argv: Sequence[str], env: dict[str, str], stdin: socket.socket
    ) -> Started:
        """Start `argv` behind a mount, in a session of its own, once something was sent to `stdin`. Blocks.

        Raises:
            SandboxStartError: The process did not answer; it and what it may have started were ended. It is
                started anew for the next one.
        """
        if self._process is None or self._process.poll() is not None:
            self._begin()
        assert self._connection is not None
        request = json.dumps({"mount": list(mount), "argv": list(argv), "env": env}).encode()
        out, err = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._connection, [request], [stdin.fileno(), out[1], err[1]])
            pid = int(self._connection.recv(32))
            if pid <= 0:
                raise ValueError(f"its clone failed ({pid})")
        except (OSError, ValueError) as error:
            os.close(out[0])
            os.close(err[0])
            self.close()
            raise SandboxStartError(f"the launcher of containers does not answer: {error}") from error
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-self._process.pid, 0)
            self._process = None

    def _begin(self) -> None:
        self.close()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(
                [*self.command, "--serve", str(theirs.fileno())],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                start_new_session=True,
                **self._as_user,
            )
