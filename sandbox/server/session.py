"""Conversation with one bash on its terminal: how it is fed, read and signalled."""

import errno
import fcntl
import io
import os
import select
import signal
import struct
import termios
import time

import ptyprocess

import framing
import proc
from bash import set_terminal
from output import Capture, MarkerScanner
from repair import write_private
from tape import TAPE, Reel

READ_BYTES = 65536
READ_ROUNDS = 64  # then the caller looks at the clock
EXIT_READ_ROUNDS = 1024  # of what a shell that ended left behind
EXIT_TIMEOUT_S = 2.0  # from the closing of the terminal to the end of bash; then it is killed
LATE_MAX_CHARS = 4000
MOST_LINE_BYTES = 4095  # of one line of input in canonical mode; the kernel drops the rest silently
TIOCGPTN = 0x80045430
TIOCGPTPEER = 0x5441


class Session:
    """A bash that runs one command at a time; what it prints goes to `capture` or, between commands, to
    `late`.
    """

    def __init__(self, bash, directory, cwd):
        """`bash`: see `bash.py`; it is ready when the marker of its first, empty command has been read.
        `directory`: private place for the command file.
        """
        self._command_file = os.path.join(directory, "cmd")
        self._rc_file = bash.rc_file
        self._process = ptyprocess.PtyProcess(bash.pid, bash.fd)
        os.set_blocking(bash.fd, False)
        self.fd = bash.fd
        self.pid = bash.pid
        self.terminal = os.makedev(136, struct.unpack("I", fcntl.ioctl(self.fd, TIOCGPTN, b"\0" * 4))[0])
        self._scanner = MarkerScanner(bash.nonce)
        self._number = 0
        self._to_type = bytearray()
        self._typed = False  # since the command began, something that it may not have read
        self._inside = False  # the command's own output comes
        self.begun = True
        """False while it is not known whether the command has begun."""
        self._call = None  # the file in /proc that tells what bash waits for
        self.ending = None
        """How the command ended: "marker", "exited", or None while it runs."""
        self.exit_code = None
        self.cwd = os.fsencode(cwd)
        self.capture = Capture(2)
        self.late = Capture(LATE_MAX_CHARS)
        self._reel = Reel("bash", 0)
        self.read_bytes = 0
        """All that was ever read; tells whether something was."""
        self._begin(": ")

    # -- typing ----------------------------------------------

    def start(self, command, capture, ours=False):
        """Run `command` (text without NUL); its output goes to `capture`. `ours`: not the agent's. Returns
        False, and runs nothing, where bash has ended.
        """
        write_private(self._command_file, command + "\n")
        at_prompt = self._at_prompt()
        if not at_prompt:
            if self.look() == "exited":
                return False
            os.kill(self.pid, signal.SIGCONT)  # a background job may have stopped it, or be about to
        set_terminal(self.fd)
        if self._typed:
            self._drop_input()
        self.read()  # all that bash said before it waited
        self.capture = capture
        self._begin(r"\builtin . " + self._command_file, at_prompt, ours)
        self._reel = Reel("bash", 0) if ours else TAPE.begin("bash")
        return True

    def _begin(self, line, at_prompt=False, ours=False):
        self._number += 1
        self._to_type = bytearray()
        self.ending = self.exit_code = None
        self.queue(framing.framed(self._number, line, at_prompt, ours).encode() + b"\n")
        self._inside = self.begun = at_prompt
        self._typed = False

    def _at_prompt(self):
        """Whether bash waits for a line (after a command it reads nothing else). False if that is unknown."""
        try:
            self._call = self._call or io.FileIO("/proc/%d/syscall" % self.pid)
            if os.pread(self._call.fileno(), 8, 0).split()[0] in proc.READS:  # so it is also while stopped
                return not os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            pass
        return False

    def queue(self, data):
        """Type `data`, now as far as the terminal takes it; :meth:`wants_to_type` tells of the rest."""
        self._typed = True
        self._to_type += data
        self.type_queued()

    def wants_to_type(self):
        """Whether input waits for room in the terminal."""
        return bool(self._to_type)

    def type_queued(self):
        """Give the terminal what it takes."""
        try:
            while self._to_type:
                del self._to_type[: os.write(self.fd, self._to_type)]
        except BlockingIOError:
            pass
        except OSError:
            self._to_type = bytearray()  # the terminal is closed; reading it tells so

    def too_long_line(self, data):
        """Whether the kernel would cut a line of `data`, because the terminal is in line mode."""
        longest = max(map(len, data.split(b"\n")))
        return longest > MOST_LINE_BYTES and bool(termios.tcgetattr(self.fd)[3] & termios.ICANON)

    def type_end(self):
        """Ask a shell that lost its PROMPT_COMMAND, and is back at the prompt, for the marker."""
        if self.foreground() != self.pid or self._rc_file not in proc.command_line(self.pid):
            return  # another program runs, or `exec` has put one in the shell's place
        self.queue(b"\n" + framing.end(self._number).encode() + b"\n")

    def _drop_input(self):
        """Drop what was typed and not read. On the slave: flushing the master would drop the output."""
        self._on_slave(lambda slave: termios.tcflush(slave, termios.TCIFLUSH))

    def _on_slave(self, function):
        """What a function gives of the terminal as bash has it; None before Linux 4.13."""
        try:
            slave = fcntl.ioctl(self.fd, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return function(slave)
        finally:
            os.close(slave)

    # -- reading ----------------------------------------------

    def read(self, exited=False):
        """Read what is there and return `ending`. `exited`: the process is known to be gone."""
        for _ in range(EXIT_READ_ROUNDS if exited else READ_ROUNDS):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # all holders of the terminal are gone
            if not data:
                exited = True
                break
            self.read_bytes += len(data)
            before = self.ending
            for kind, value in self._scanner.feed(data):
                if kind == "output":
                    self._keep(value)
                elif value[0] == self._number:  # a marker of an older command is dropped
                    self._on_marker(kind, value)
            if self.ending != before and not exited:
                break  # what comes after it is for whoever reads next
        if exited:
            self._on_exit()
        return self.ending

    def _keep(self, data):
        (self.capture if self._inside else self.late).add(data)
        if self._inside:
            self._reel.add(data)

    def _on_marker(self, kind, value):
        if kind == "begin":
            self._inside = self.begun = True
        elif self.ending is None:
            if not self._inside:  # the shell could not even say that it began; see `framing.framed`
                self.capture.add(self.late.text()[0].encode())
                self.late = Capture(LATE_MAX_CHARS)
            self._inside = False
            self.ending = "marker"
            self._reel.end()
            self._to_type = bytearray()
            self.exit_code = value[1]
            self.update_cwd(value[2])

    def _on_exit(self):
        self._keep(self._scanner.flush())
        if not self._await_exit():  # the terminal closes a moment before the process is gone
            os.kill(self.pid, signal.SIGKILL)  # `exec` made it something that has left the terminal
            self._await_exit()
        if self.ending is None:
            code, number = self._process.exitstatus, self._process.signalstatus or signal.SIGKILL
            self.exit_code = 128 + number if code is None else code
        self.ending = "exited"
        self._inside = False
        self._reel.end()

    def _await_exit(self):
        """Wait a little for the end of the process. Returns whether it came."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while self.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def is_alive(self):
        """Whether the process runs; also reaps it."""
        try:
            return self._process.isalive()
        except ptyprocess.PtyProcessError:
            return False  # it was reaped by somebody else

    def look(self):
        """Bring `ending` up to date while nobody waits, and return it."""
        if self.ending != "exited" and self.read() != "exited" and not self.is_alive():
            self.read(exited=True)
        return self.ending

    # -- where it is ----------------------------------------------

    def update_cwd(self, logical=None):
        """Look where the shell is: the name it has for that (`$PWD`) if it is true, else the kernel's."""
        logical = logical or self.cwd
        actual = proc.working_directory(self.pid)
        if actual is None or logical == actual:
            self.cwd = logical
            return
        try:
            same = logical.startswith(b"/") and os.path.samestat(
                os.stat(logical), os.stat(b"/proc/%d/cwd" % self.pid)
            )
        except (OSError, ValueError):
            same = False
        self.cwd = logical if same else actual

    # -- signals ----------------------------------------------

    def foreground(self):
        """Process group that the terminal's signals go to; the shell's own when that runs a builtin."""
        try:
            group = struct.unpack("i", fcntl.ioctl(self.fd, termios.TIOCGPGRP, b"\0" * 4))[0]
        except OSError:
            group = 0
        return group if group > 0 else self.pid

    def signal_foreground(self, number):
        """Signal what runs in the foreground. All but SIGINT spare the shell if there is something else."""
        group, self._typed = self.foreground(), True
        try:
            if group == self.pid and number != signal.SIGINT:  # without job control all is the shell's group
                for pid in [p for p in proc.group_members(group) if p != self.pid] or [self.pid]:
                    os.kill(pid, number)
            else:
                os.killpg(group, number)
                os.killpg(group, signal.SIGCONT)  # what is stopped gets no other signal
                os.kill(self.pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it ended just now; the wait that follows sees it

    def waits_for_input(self):
        """Whether something in the foreground certainly does. Nothing while there is some: a worker of the
        kernel hands over what was typed and wakes who reads, on a loaded machine much later.
        """
        if self._on_slave(_has_input):
            return False
        return proc.waits_for_terminal(self.foreground(), self.terminal)

    def end_process(self):
        """Kill the shell itself."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)

    def kill(self):
        """End the process and close the terminal; background jobs get a hang-up."""
        self.ending = "exited"
        self._reel.end()
        self.end_process()
        self._await_exit()
        self._process.fileobj.close()


def _has_input(slave):
    """Whether some is to be read; what was typed is handed over first."""
    poller = select.poll()  # not `select`, for the server may have more than 1024 descriptors
    poller.register(slave, select.POLLIN)
    return bool(poller.poll(0))
