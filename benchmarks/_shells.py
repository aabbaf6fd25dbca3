"""The ways to a shell that `shell_latency` compares: each is a block that yields `run(command) -> output`.

All but ours and `apptainer_exec` run on the machine itself, without a container.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pexpect.replwrap
import ptyprocess

from benchmarks._apptainer import PlainApptainer
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec

Run = Callable[[str], str]

LIMIT_S, MOST_LOOKS = 60.0, 1000
BASH = ["bash", "--noprofile", "--norc", "--noediting"]
POLL_S, CLEAR_S = 0.5, 0.1
"""OpenHands' own."""
FACTS = ("$?", "$!", r"\u", r"\h", "$(pwd)", "$(which python 2>/dev/null || echo)")
"""What OpenHands' prompt tells, found anew for each prompt; here one a line."""
PS1 = "\n" + "\n".join(("<<<prompt", *FACTS, "prompt>>>")) + "\n"
PROMPT = re.compile(r"<<<prompt\s+-?\d+.*?prompt>>>", re.DOTALL)


@contextmanager
def ours(host: HostClient) -> Iterator[Run]:
    """The persistent shell of an Apptainer sandbox without network, from outside, as a worker calls it."""
    with asyncio.Runner() as runner:
        info = runner.run(host.start(SandboxSpec(runtime="apptainer")))
        client = SandboxClient(info.socket)
        try:
            yield lambda command: runner.run(client.bash(command, LIMIT_S)).output
        finally:
            runner.run(client.close())


@contextmanager
def host_pty(env: dict[str, str]) -> Iterator[Run]:
    """The floor: bash on a pseudo terminal; a second line prints a marker. Right for single lines only."""
    process = ptyprocess.PtyProcess.spawn(BASH, env=env, echo=False, dimensions=(50, 200))
    attributes = termios.tcgetattr(process.fd)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(process.fd, termios.TCSANOW, attributes)
    half = secrets.token_hex(8)  # typed in two halves, so that nothing but the end of a command matches
    end = f"\x1e{half}{half}\x1e".encode()

    def run(command: str) -> str:
        os.write(process.fd, f"{command}\nprintf '\\036%s%s\\036' {half} {half}\n".encode())
        output = bytearray()
        while not output.endswith(end):
            output += os.read(process.fd, 65536)
        return output[: -len(end)].decode(errors="replace")

    try:
        run("PS1= PS2=; unset PROMPT_COMMAND; set +o history")
        yield run
    finally:
        process.kill(signal.SIGKILL)
        process.wait()
        process.close(force=True)


@contextmanager
def swe_rex() -> Iterator[Run]:
    """SWE-ReX's LocalRuntime in this process, with its defaults: its HTTP server would add to it."""
    from swerex.exceptions import CommandTimeoutError
    from swerex.runtime.abstract import BashAction, CloseBashSessionRequest, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    for name in ("rex-session", "rex-runtime", "quiet"):  # it reports each action on standard output
        logging.getLogger(name).setLevel(logging.CRITICAL)
    runtime = LocalRuntime(logger=logging.getLogger("quiet"))
    with asyncio.Runner() as runner:

        def start() -> None:
            # Its own limit for that is 1 s, too little for a loaded machine.
            runner.run(runtime.create_session(CreateBashSessionRequest(startup_timeout=LIMIT_S)))

        def run(command: str) -> str:
            # It waits 0.1 s for its last prompt, whatever limit is set; a loaded machine may miss that, and
            # the session is lost then: a new one takes the command again, which medians do not see.
            while True:
                with suppress(CommandTimeoutError):
                    action = BashAction(command=command, timeout=LIMIT_S)
                    return runner.run(runtime.run_in_session(action)).output
                runner.run(runtime.close_session(CloseBashSessionRequest()))
                start()

        start()
        try:
            yield run
        finally:
            runner.run(runtime.close())


@contextmanager
def pexpect_repl() -> Iterator[Run]:
    """pexpect's own wrapper of bash, with its defaults."""
    repl = pexpect.replwrap.bash()
    try:
        yield partial(repl.run_command, timeout=LIMIT_S)
    finally:
        repl.child.close(force=True)


@contextmanager
def apptainer_exec(home: Path) -> Iterator[Run]:
    """A container of our image for each command; no state but files would remain."""
    yield PlainApptainer(home).run


class Tmux:
    """One bash in a private tmux server, typed to with `send-keys` and read with `capture-pane`."""

    def __init__(self, directory: Path, env: dict[str, str]):
        """`directory`: for the socket, made here; short. `env`: all that bash gets."""
        directory.mkdir()
        self.socket = directory / "tmux"
        self._env = env
        shell = "bash --noprofile --norc"
        # Long lines and long outputs must not be wrapped or scrolled away.
        self("-f", "/dev/null", "new-session", "-d", "-s", "s", "-x", "1000", "-y", "1000", shell)
        self("set-option", "-g", "history-limit", "10000")
        self("new-window", "-t", "s:", shell)  # the limit counts for windows made after it was set
        self("kill-window", "-t", "s:0")

    def __call__(self, *arguments: str) -> str:
        """What this command of tmux prints."""
        argv = ["tmux", "-S", str(self.socket), *arguments]
        return subprocess.check_output(argv, text=True, env=self._env, timeout=LIMIT_S)

    def type_line(self, line: str) -> None:
        """A line and Enter, each by a process of its own, as libtmux does it."""
        self("send-keys", "-t", "s:", "-l", line)
        self("send-keys", "-t", "s:", "Enter")

    def screen_with(self, prompts: int, pause_s: float) -> tuple[str, int]:
        """(screen once it has so many prompts, how many looks that took), with a pause after each look."""
        for look in range(1, MOST_LOOKS):
            screen = self("capture-pane", "-t", "s:", "-J", "-p", "-S", "-")
            if len(PROMPT.findall(screen)) >= prompts:
                return screen, look
            time.sleep(pause_s)
        raise RuntimeError(f"no prompt after {look} looks; the screen of tmux ends with {screen[-300:]!r}")


@contextmanager
def tmux_polled(directory: Path, env: dict[str, str], looks: list[int]) -> Iterator[Run]:
    """As OpenHands' BashSession of November 2025, written anew from its behaviour, poll and pause its own.

    After each command the screen is cleared, with a pause of 0.1 s. `looks` gets how many each command took.
    """
    tmux = Tmux(directory, env)

    def clear() -> None:
        tmux("send-keys", "-t", "s:", "C-l")
        time.sleep(CLEAR_S)
        tmux("clear-history", "-t", "s:")

    def run(command: str) -> str:
        tmux.type_line(command)
        screen, count = tmux.screen_with(prompts=2, pause_s=POLL_S)
        looks.append(count)
        clear()
        return PROMPT.split(screen)[1].strip("\n").partition("\n")[2].strip("\n")

    try:
        tmux.type_line(f"PS2= PS1='{PS1}'")
        tmux.screen_with(prompts=1, pause_s=0.05)
        clear()
        yield run
    finally:
        tmux("kill-server")


@contextmanager
def tmux_wait_for(directory: Path, env: dict[str, str]) -> Iterator[Run]:
    """The best that one can do with tmux: nothing sleeps, the prompt itself reports to `tmux wait-for`."""
    tmux = Tmux(directory, env)

    def type_line(line: str) -> str:
        enter = ("send-keys", "-t", "s:", "Enter")
        tmux("send-keys", "-t", "s:", "-l", line, ";", *enter, ";", "wait-for", "over")
        screen, _ = tmux.screen_with(prompts=1, pause_s=0)  # printed just after the signal
        # Not Ctrl-L, which bash would carry out some time later; this is done when it returns.
        tmux("send-keys", "-t", "s:", "-R", ";", "clear-history", "-t", "s:")
        return PROMPT.split(screen)[0].partition("\n")[2].strip("\n")

    try:
        type_line(f"PROMPT_COMMAND='tmux -S {tmux.socket} wait-for -S over' PS2= PS1='{PS1}'")
        yield type_line
    finally:
        tmux("kill-server")
