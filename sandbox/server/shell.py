"""One persistent interactive bash on a pseudo terminal.

A command is written to a file and only `. file` is typed, so quotes, heredocs and length cannot break the
framing and standard input stays free for the command. The end of a command is a marker (nonce, command
number, exit code, cwd) that bash prints to the terminal. Everything waits for events on file descriptors;
nothing polls.
"""

import binascii
import errno
import fcntl
import os
import select
import signal
import struct
import termios
import threading
import time

import ptyprocess

from confine import confiner
from errors import ServerError
from output import Capture, MarkerScanner

START_TIMEOUT_S = 15.0  # bash with its rc file; generous, because a loaded node is slow
READ_BYTES = 65536
WINDOW = (50, 200)  # rows, columns
DEFAULT_MAX_CHARS = 30000

# How a running command is ended: signal to the foreground group, seconds to wait for the shell to come back.
ESCALATION = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 0.5))

# Names an agent may send instead of text when a command is running.
CONTROL_KEYS = {"C-c": b"\x03", "C-d": b"\x04", "C-z": b"\x1a"}

# `set +eu`: one command's strictness must not end the shell at the next. PROMPT_COMMAND is the way back after
# ^C, which skips the rest of the typed line; __sbx_open keeps it from printing a second marker otherwise. The
# marker goes to /dev/tty because a command may have redirected the shell's own output for good (`exec
# >file`).
RC_FILE = r"""
set +H +o history
unset HISTFILE PROMPT_COMMAND
PS1= PS2= PS4='+ '
__sbx_begin() { local code=$?; __sbx_number=$1; __sbx_open=1; return $code; }
__sbx_end() { __sbx_mark $?; }
__sbx_prompt() { local code=$?; [ -z "$__sbx_open" ] || __sbx_mark $code; return $code; }
__sbx_mark() {
    { set +eu; } 2>/dev/null
    PS1= PS2= PROMPT_COMMAND=__sbx_prompt
    __sbx_open=
    printf '\036%s;%s;%s;%s\036' @NONCE@ "$__sbx_number" "$1" "$PWD" >/dev/tty
    return $1
}
PROMPT_COMMAND=__sbx_prompt
"""


class ShellError(ServerError):
    """bash could not be started or does not answer."""


class Shell:
    """A bash that is started again whenever it dies; one command at a time."""

    def __init__(self, directory, env, cwd, program=("bash",), limits=None):
        """`directory`: private place for the rc and command files. `program`: command line of bash. `limits`: see
        `confine.py`. Raises ShellError when bash does not start.
        """
        self._directory = directory
        self._env = env
        self._program = list(program)
        self._confine = confiner(limits or {})
        self._cwd = cwd
        self._home_cwd = cwd
        self._command_file = os.path.join(directory, "cmd")
        self._rc_file = os.path.join(directory, "rc")
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._running = False
        self._interrupt = False
        self._number = 0
        self._exit_code = None
        self._process = None
        self._scanner = None
        self._spawn()

    # -- what other threads call while a command runs ----------------------------------------------

    def wake(self):
        """Have the waiting thread look again (a child died, an interrupt was asked for). Safe in signal
        handlers.
        """
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            pass  # full of wake-ups already

    def interrupt(self):
        """End the running command (^C, TERM, KILL). Returns whether one was running."""
        running = self._running
        if running:
            self._interrupt = True
            self.wake()
        return running

    def send_input(self, text):
        """Type `text` to the running command. Returns False when none is running."""
        if not self._running:
            return False
        os.write(self._process.fd, CONTROL_KEYS.get(text) or text.encode())
        return True

    def pid(self):
        """Process id of bash, as seen here; None while there is none."""
        return self._process and self._process.pid

    # -- running a command ----------------------------------------------

    def run(self, command, timeout, max_chars=DEFAULT_MAX_CHARS, hangup_fd=None):
        """Run `command` and return its result as a dict.

        `timeout` in seconds; a command that overruns it is ended and its output so far returned. `hangup_fd`:
        a socket whose closing by the peer ends the command. Raises ShellError when bash cannot be started
        again.
        """
        with self._lock:
            began = time.monotonic()
            capture = Capture(max_chars)
            self._interrupt = False
            self._type(command, capture)
            self._running = True
            try:
                ending = self._wait(capture, began + timeout, hangup_fd)
                stopped = ending in ("timeout", "interrupt", "hangup")
                alive = ending == "marker" or (stopped and self._stop_command(capture))
            finally:
                self._running = False
            exit_code = self._exit_code
            if not alive:
                self._spawn()
            output, truncated = capture.text()
            return {
                "output": output,
                "exit_code": exit_code,
                "cwd": self._cwd,
                "timed_out": ending == "timeout",
                "interrupted": ending in ("interrupt", "hangup"),
                "truncated": truncated,
                "shell_restarted": not alive,
                "duration_s": time.monotonic() - began,
            }

    def close(self):
        """End bash; its background jobs are left to the end of the container."""
        self._discard_process()

    # -- inside ----------------------------------------------

    def _spawn(self):
        self._discard_process()
        nonce = binascii.hexlify(os.urandom(8)).decode()
        _write_private(self._rc_file, RC_FILE.replace("@NONCE@", nonce))
        if not os.path.isdir(self._cwd):
            self._cwd = self._home_cwd
        argv = [*self._program, "--noediting", "--noprofile", "--rcfile", self._rc_file, "-i"]
        try:
            process = ptyprocess.PtyProcess.spawn(
                argv, cwd=self._cwd, env=self._env, dimensions=WINDOW, preexec_fn=self._confine
            )
        except Exception as error:  # ptyprocess raises whatever exec said, in several types
            raise ShellError("cannot start %s: %s" % (self._program[0], error))
        process.delayafterclose = process.delayafterterminate = 0  # else closing sleeps
        os.set_blocking(process.fd, False)
        self._process = process
        self._scanner = MarkerScanner(nonce)
        self._number += 1
        self._set_terminal()
        capture = Capture(2000)
        self._write_line("__sbx_begin %d; __sbx_end" % self._number)
        if self._wait(capture, time.monotonic() + START_TIMEOUT_S, None, startup=True) != "marker":
            raise ShellError("bash did not become ready; it said: %r" % capture.text()[0])

    def _discard_process(self):
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.kill(signal.SIGKILL)
            process.close(force=True)
        except Exception:  # already gone, which is what is wanted
            pass

    def _set_terminal(self):
        """No echo, no output translation, signals and line input on: whatever the last command left
        behind.
        """
        attributes = termios.tcgetattr(self._process.fd)
        attributes[0] = termios.ICRNL
        attributes[1] = 0
        attributes[3] = (attributes[3] | termios.ISIG | termios.ICANON) & ~(termios.ECHO | termios.ECHONL)
        termios.tcsetattr(self._process.fd, termios.TCSANOW, attributes)

    def _type(self, command, capture):
        """Write the command file and type the line that sources it."""
        if self._process is None or not self._process.isalive():
            self._spawn()  # it died between two commands, e.g. killed by a background job
        if self._read_available(capture) == "exited":  # late output of background jobs comes first
            self._spawn()
        self._set_terminal()
        termios.tcflush(self._process.fd, termios.TCIFLUSH)
        _write_private(self._command_file, command + "\n")
        self._number += 1
        self._exit_code = None
        self._write_line("__sbx_begin %d; . %s; __sbx_end" % (self._number, self._command_file))

    def _write_line(self, line):
        os.write(self._process.fd, line.encode() + b"\n")

    def _wait(self, capture, deadline, hangup_fd, startup=False, ignore_interrupt=False):
        """Collect output until something ends the wait.

        Returns "marker", "exited", "timeout", "interrupt" or "hangup".
        """
        poller = select.poll()
        poller.register(self._process.fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        if hangup_fd is not None:
            poller.register(hangup_fd, select.POLLRDHUP)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for fd, _ in poller.poll(left * 1000 + 1):
                if fd == self._process.fd:
                    ending = self._read_available(capture)
                    if ending is not None:
                        return ending
                elif fd == hangup_fd:
                    return "hangup"
                else:
                    self._drain_wake_ups()
                    if self._interrupt and not startup and not ignore_interrupt:
                        return "interrupt"
                    if not self._process.isalive():
                        # A background job may hold the terminal open, so end of file is not to be waited for.
                        return self._read_available(capture, exited=True)

    def _read_available(self, capture, exited=False):
        """Read what is there. Returns "marker" at this command's marker, "exited" at the shell's end, else
        None.
        """
        rounds = 0
        while exited or rounds < 64:  # now and then let the caller look at the clock
            rounds += 1
            try:
                data = os.read(self._process.fd, READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # all holders of the terminal are gone
            if not data:
                exited = True
                break
            for kind, value in self._scanner.feed(data):
                if kind == "output":
                    capture.add(value)
                elif value[0] == self._number:  # a marker of an older command is dropped
                    _, self._exit_code, self._cwd = value
                    return "marker"
        if not exited:
            return None
        capture.add(self._scanner.flush())
        self._process.wait()
        status = self._process
        self._exit_code = (
            status.exitstatus if status.exitstatus is not None else 128 + (status.signalstatus or 0)
        )
        return "exited"

    def _stop_command(self, capture):
        """End the foreground command by ever stronger signals. Returns whether the shell came back."""
        for number, patience in ESCALATION:
            self._signal_foreground(number)
            ending = self._wait(capture, time.monotonic() + patience, None, ignore_interrupt=True)
            if ending != "timeout":
                return ending == "marker"
        self._process.kill(signal.SIGKILL)
        self._exit_code = 128 + signal.SIGKILL
        return False

    def _signal_foreground(self, number):
        """To the terminal's foreground group, or to bash itself when that runs a builtin or a loop."""
        try:
            group = struct.unpack("i", fcntl.ioctl(self._process.fd, termios.TIOCGPGRP, b"\0" * 4))[0]
        except OSError:
            group = 0
        try:
            if group > 0 and group != self._process.pid:
                os.killpg(group, number)
            else:
                os.kill(self._process.pid, number)
        except ProcessLookupError:
            pass  # it ended just now; the wait that follows sees it

    def _drain_wake_ups(self):
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass


def _write_private(path, text):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
