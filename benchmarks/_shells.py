"""The ways to run a command that `shell_latency` compares; each has `start()`, `run(command) -> output` and
`close()`, which is also right after a failed start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import termios
from pathlib import Path

import pexpect.replwrap
import ptyprocess

from sandbox import paths
from sandbox.host_client import SyncHostClient
from sandbox.images import ImageStore
from sandbox.runtimes.apptainer import Apptainer
from sandbox.spec import SandboxSpec
from sandbox.sync_client import SyncSandboxClient

LIMIT_S = 60.0
RETRIES = 5
BASH = ["bash", "--noprofile", "--norc", "--noediting"]


class Ours:
    """The persistent shell of an Apptainer sandbox, from outside."""

    def __init__(self, state: Path):
        """`state`: directory of the sandbox host."""
        self._host = SyncHostClient(state)
        self._client: SyncSandboxClient | None = None

    def start(self) -> None:
        """Start a sandbox. Raises SandboxError."""
        self._client = SyncSandboxClient(self._host.start(SandboxSpec(runtime="apptainer")).socket)

    def run(self, command: str) -> str:
        """Output of the command."""
        assert self._client is not None
        return self._client.bash(command, LIMIT_S).output

    def close(self) -> None:
        """Close the connection; the sandbox ends with its host."""
        if self._client is not None:
            self._client.close()


class HostPty:
    """The floor: bash on a pseudo terminal of this machine; no container, no server, no second process.

    Right for single lines that leave standard input alone, and no more than that: a second typed line prints
    the marker, with the exit code.
    """

    def __init__(self, env: dict[str, str]):
        self._env = env
        self._process: ptyprocess.PtyProcess | None = None
        # Typed in two halves, so that nothing but the end of a command matches.
        self._nonce = secrets.token_hex(8)
        self.exit_code = 0

    def start(self) -> None:
        """Start bash."""
        self._process = ptyprocess.PtyProcess.spawn(BASH, env=self._env, echo=False, dimensions=(50, 200))
        attributes = termios.tcgetattr(self._process.fd)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(self._process.fd, termios.TCSANOW, attributes)
        self.run("PS1= PS2=; unset PROMPT_COMMAND; set +o history")

    def run(self, command: str) -> str:
        """Output of the command."""
        assert self._process is not None
        half = len(self._nonce) // 2
        marker = f"printf '\\036%s%s;%d\\036' {self._nonce[:half]} {self._nonce[half:]} $?"
        os.write(self._process.fd, f"{command}\n{marker}\n".encode())
        begin = b"\x1e" + self._nonce.encode() + b";"
        said = bytearray()
        while not (said.endswith(b"\x1e") and begin in said[-len(begin) - 4 :]):
            said += os.read(self._process.fd, 65536)
        output, _, code = said.rpartition(begin)
        self.exit_code = int(code[:-1])
        return output.decode(errors="replace")

    def close(self) -> None:
        """End bash."""
        if self._process is not None:
            self._process.kill(signal.SIGKILL)
            self._process.wait()
            self._process.close(force=True)


class SweRex:
    """The bash session of SWE-ReX's LocalRuntime, in this process: its HTTP server would add to it."""

    def __init__(self) -> None:
        from swerex.runtime.local import LocalRuntime

        # It reports each action on standard output.
        quiet = logging.getLogger("quiet")
        quiet.setLevel(logging.CRITICAL)
        for name in ("rex-session", "rex-runtime"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        self._runtime = LocalRuntime(logger=quiet)

    def start(self) -> None:
        """Start bash. Its own limit for that is 1 s, too little for a loaded machine."""
        from swerex.runtime.abstract import CreateBashSessionRequest

        self._await(self._runtime.create_session(CreateBashSessionRequest(startup_timeout=LIMIT_S)))

    def run(self, command: str) -> str:
        """Output of the command.

        SWE-ReX waits 0.1 s for its last prompt, whatever limit is set. A loaded machine may miss that, and
        the session is lost then: a new one takes the command again, which medians do not see.
        """
        from swerex.exceptions import CommandTimeoutError
        from swerex.runtime.abstract import BashAction, CloseBashSessionRequest

        action = BashAction(command=command, timeout=LIMIT_S)
        for _ in range(RETRIES):
            try:
                return self._await(self._runtime.run_in_session(action)).output
            except CommandTimeoutError:
                self._await(self._runtime.close_session(CloseBashSessionRequest()))
                self.start()
        return self._await(self._runtime.run_in_session(action)).output

    def close(self) -> None:
        """End bash."""
        self._await(self._runtime.close())
        self._loop.close()

    def _await(self, coroutine):
        return self._loop.run_until_complete(coroutine)


class Pexpect:
    """pexpect's own wrapper of bash, with its defaults."""

    def __init__(self) -> None:
        self._repl: pexpect.replwrap.REPLWrapper | None = None

    def start(self) -> None:
        """Start bash."""
        self._repl = pexpect.replwrap.bash()

    def run(self, command: str) -> str:
        """Output of the command."""
        assert self._repl is not None
        return self._repl.run_command(command, timeout=LIMIT_S)

    def close(self) -> None:
        """End bash."""
        if self._repl is not None:
            self._repl.child.close(force=True)


class ApptainerExec:
    """A container for each command, of the same unpacked image as ours; no state but files would remain."""

    def __init__(self, directory: Path):
        """`directory`: becomes Apptainer's home."""
        self._directory = directory
        self._prefix: list[str] = []
        self._user = paths.sandbox_user()

    def start(self) -> None:
        """Unpack the image, if this node has not done so yet."""
        runtime = Apptainer()
        runtime.check_installed()
        rootfs = ImageStore().rootfs("base", self._user)
        self._prefix = [
            str(runtime.program()),
            *("-q", "exec", "--userns", "--containall", "--no-home", "--cleanenv", "--writable-tmpfs"),
            *("--pwd", "/", str(rootfs)),
        ]
        if self._user is not None:
            os.chown(self._directory, self._user, self._user)

    def run(self, command: str) -> str:
        """Output of the command."""
        as_user = {}
        if self._user is not None:
            as_user = {"user": self._user, "group": self._user, "extra_groups": []}
        done = subprocess.run(
            [*self._prefix, "bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": paths.tool_path(), "HOME": str(self._directory), "LANG": "C.UTF-8"},
            cwd="/",
            timeout=LIMIT_S,
            **as_user,
        )
        return done.stdout.decode(errors="replace")

    def close(self) -> None:
        """Nothing is left of a command."""
