"""The persistent shell: one command at a time on one bash, which is replaced whenever it dies.

A command is written to a file and only `. file` is typed, so quotes, heredocs and length cannot break the
framing and standard input stays free for the command. Where a command begins and ends bash prints a marker
(nonce, command number, exit code, directory) to the terminal. Everything waits for events on file
descriptors; nothing polls, but for a look now and then at whether a silent command waits for input, if that
was asked for.
"""

import os
import select
import shlex
import signal
import threading
import time

import proc
from confine import confiner
from errors import RequestError, ServerError
from output import Capture
from session import LATE_MAX_CHARS, MOST_LINE_BYTES, Session

START_TIMEOUT_S = 15.0  # bash with its rc file; generous, because a loaded node is slow
SETUP_TIMEOUT_S = 10.0
DEFAULT_MAX_CHARS = 30000

# How a running command is ended: signal to the foreground group, seconds to wait for the shell to come back.
# After SIGKILL bash goes on with the next line of the command, so ^C follows.
ESCALATION = (
    (signal.SIGINT, 1.0),
    (signal.SIGTERM, 0.7),
    (signal.SIGKILL, 0.3),
    (signal.SIGINT, 1.0),
    (signal.SIGKILL, 0.7),
)

# A silent command is looked at after the first of these many seconds, then ever more rarely.
LOOK_FIRST_S = 0.06
LOOK_MOST_S = 1.0
# So long a reader that has not gone to sleep anew is taken to be yet to see what was typed.
SETTLE_S = 2.0


class Shell:
    """A bash that is started again whenever it dies; one command at a time."""

    def __init__(self, directory, env, cwd, program=("bash",), limits=None, own_namespace=True):
        """`directory`: private place for the rc and command files. `env`: a dict that is also read later,
        whenever bash is started again. `program`: command line of bash. `limits`: see `confine.py`.
        `own_namespace`: see `proc.end_all`. Raises ServerError when bash does not start.
        """
        self._directory = directory
        self._env = env
        self._program = list(program)
        self._confine = confiner(limits or {})
        self._home_cwd = cwd
        self._own_namespace = own_namespace
        self._lock = threading.Lock()  # whoever holds it reads the terminal
        self._killing = (
            threading.Lock()
        )  # held to end all processes, and to start bash, so as not to end that
        self._state = threading.Lock()  # guards the two below
        self._waiting = False  # a thread waits for the running command
        self._typed = []  # input for that thread to type
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.wake_fd = self._wake_write
        """Writing a byte has the waiting thread look again; for `signal.set_wakeup_fd`, as children die."""
        self._interrupt = False
        self._resetting = False
        self._session = None
        self._left = False  # a command runs, or has ended, whose last result nobody got
        self._suspending = False  # C-z was typed to the running command
        self._restarted = False  # since the last result
        self._limit_exceeded = None
        self._told_cwd = cwd  # with the last result
        self._epoll = select.epoll()
        self._attended = False
        self._spawn(os.fsencode(cwd))
        threading.Thread(target=self._attend, daemon=True).start()
        self._set_attended(True)

    # -- what other threads call while a command runs ----------------------------------------------

    def wake(self):
        """Have the waiting thread look again: an interrupt was asked for, or there is input to type."""
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            pass  # full of wake-ups already

    def interrupt(self):
        """End the running command (^C, TERM, KILL). Returns whether one was running."""

        def ask():
            self._interrupt = True

        if self._tell_waiting(ask):
            return True
        try:
            with self._unattended():
                if not self._left or self._session.look() is not None:
                    return False
                self._stop_command()
                return True
        finally:
            self._lock.release()

    def pid(self):
        """Process id of bash, as seen here; None while there is none."""
        session = self._session
        return session and session.pid

    def reset(self, max_chars=DEFAULT_MAX_CHARS):
        """End every process of the sandbox but the server and start a fresh shell in the workspace."""
        began = time.monotonic()
        self._resetting = True
        try:
            self._end_all()
            while not self._lock.acquire(timeout=0.2):
                self._end_all()  # a command that was waiting for its turn had it
        finally:
            self._resetting = False
        try:
            with self._unattended():
                self._left = False
                self._spawn(os.fsencode(self._home_cwd))
                self._restarted = True
                return self._result(Capture(max_chars), began)
        finally:
            self._lock.release()

    def breach(self, message):
        """End every process because a limit was exceeded; the running command's result, or else the next one,
        carries `message`.
        """
        self._limit_exceeded = message
        self._end_all()

    # -- running a command ----------------------------------------------

    def run(self, command, timeout, max_chars=DEFAULT_MAX_CHARS, hangup_fd=None, keep=False, quiet=None):
        """Run `command` and return its result as a dict, the fields of `sandbox.calls.BashResult`.

        `timeout` in seconds. A command that overruns it is ended, with `keep` left running. With `keep` that
        also happens after `quiet` seconds without output and when it certainly waits for input. `hangup_fd`:
        a socket whose closing by the peer ends the command. Raises RequestError while an earlier command
        runs, ServerError when bash cannot be started again.
        """
        with self._lock, self._unattended():
            began = time.monotonic()
            late_exit_code = self._settle_left()
            self._ensure_session()
            self._interrupt = self._suspending = False
            self._session.start(command, Capture(max_chars))
            result = self._follow(began, timeout, hangup_fd, keep, quiet)
            result["late_exit_code"] = late_exit_code
            return result

    def send_input(self, data, timeout, max_chars=DEFAULT_MAX_CHARS, hangup_fd=None, quiet=None):
        """Type `data` (bytes) to the running command, then wait as :meth:`run` does with `keep`.

        Returns at once while another thread waits for the command. Raises RequestError when none runs.
        """
        began = time.monotonic()

        def hand_over():
            self._check_input(data)
            self._typed.append(data)

        if self._tell_waiting(hand_over):
            return dict(self._result(Capture(2), began, notices=False), running=True, exit_code=None)
        try:
            if not self._left:
                raise RequestError(
                    "no command is running that could take input; send it as a command (without is_input)"
                )
            with self._unattended():
                session = self._session
                self._carry_over(max_chars)
                if session.look() is not None:
                    result = self._finish(session.capture, began, session.ending, True)
                    result["input_sent"] = not data
                    return result
                self._check_input(data)
                self._interrupt = False
                old_readers = session.readers() if data else frozenset()
                self._suspending = self._suspending or data == b"\x1a"
                session.queue(data)
                return self._follow(began, timeout, hangup_fd, True, quiet, old_readers)
        finally:
            self._lock.release()

    def setup(self, env):
        """Add variables to the environment of this shell and of all that follow. Raises RequestError for a
        name that bash does not let be set, or while a command runs.
        """
        exports = "".join("export %s=%s\n" % (name, shlex.quote(value)) for name, value in env.items())
        result = self.run("set -e\n" + exports + "set +e", SETUP_TIMEOUT_S)
        if result["exit_code"] != 0:
            raise RequestError("bash refused the environment: %s" % result["output"].strip())
        self._env.update(env)

    def close(self):
        """End bash; its background jobs are left to the end of the container."""
        with self._lock:
            self._set_attended(False)
            self._session.kill()

    def _tell_waiting(self, tell):
        """Call `tell` if a thread waits for a command, and wake that. Returns False, holding the lock, if
        none does.
        """
        while True:
            with self._state:
                if self._waiting:
                    tell()
                    self.wake()
                    return True
            if self._lock.acquire(timeout=0.01):  # else a request has just begun or is about to end
                return False

    # -- inside: a command's life ----------------------------------------------

    def _follow(self, began, timeout, hangup_fd, keep, quiet, old_readers=frozenset()):
        """Wait for the running command and make its result."""
        session = self._session
        self._left = False
        with self._state:
            self._waiting = True
        try:
            ending = self._wait(began + timeout, hangup_fd, keep, quiet if keep else None, old_readers)
        finally:
            with self._state:
                self._waiting = False
                typed, self._typed = self._typed, []
        if ending in ("quiet", "input") or (ending == "timeout" and keep):
            for data in typed:
                session.queue(data)
            self._left = True
            result = self._running_result(session.capture, began)
            result["timed_out"] = ending == "timeout"
            result["waiting_for_input"] = ending == "input"
            return result
        alive = ending == "marker"
        if ending in ("timeout", "interrupt", "hangup"):
            alive = self._stop_command()
        return self._finish(session.capture, began, ending, alive)

    def _running_result(self, capture, began):
        """The result so far of a command that goes on; what could be the start of a character waits."""
        session = self._session
        session.update_cwd()
        partial = capture.take_partial_character()
        result = self._result(capture, began)
        result.update(running=True, exit_code=None)
        session.capture = Capture(capture.max_chars)
        session.capture.add(partial)
        return result

    def _carry_over(self, max_chars):
        """Hold what came since the last result to the size that is wanted now."""
        old = self._session.capture
        if old.max_chars != max_chars:
            self._session.capture = Capture(max_chars)
            self._session.capture.add(old.text()[0].encode())

    def _finish(self, capture, began, ending, alive):
        """The last result of a command; a dead shell is replaced."""
        session, self._left = self._session, False
        exit_code = session.exit_code
        if ending == "exited" or not alive:
            alive = False
            if not self._resetting:
                self._spawn(session.cwd)
            self._restarted = True
        result = self._result(capture, began, notices=ending != "hangup")  # nobody reads it after a hang-up
        result.update(
            exit_code=exit_code,
            timed_out=ending == "timeout",
            interrupted=ending in ("interrupt", "hangup") or (self._resetting and not alive),
            suspended=self._suspending and exit_code == 128 + signal.SIGTSTP,
        )
        return result

    def _result(self, capture, began, notices=True):
        """Fields that all results have. `notices`: tell, for once, what happened besides."""
        session = self._session
        output, truncated = capture.text()
        result = {
            "output": output,
            "exit_code": 0,
            "cwd": os.fsdecode(session.cwd),
            "timed_out": False,
            "truncated": truncated,
            "shell_restarted": False,
            "duration_s": time.monotonic() - began,
        }
        if notices:
            late, session.late = session.late, Capture(LATE_MAX_CHARS)
            result.update(
                late_output=late.text()[0],
                shell_restarted=self._restarted,
                limit_exceeded=self._limit_exceeded,
                previous_cwd=self._told_cwd,
            )
            self._told_cwd = result["cwd"]
            self._restarted, self._limit_exceeded = False, None
        return result

    def _settle_left(self):
        """Before a new command: refuse it while the one left behind runs. Returns that one's exit code if it
        has ended since its last result; what it still said goes to the late output.
        """
        if not self._left:
            return None
        session = self._session
        if session.look() is None:
            raise RequestError(
                "the previous command is still running; send it input (is_input), wait for it with empty "
                "input, interrupt it with the input C-c, or use reset"
            )
        self._left = False
        rest = session.capture.text()[0].encode()
        after, session.late = session.late, Capture(LATE_MAX_CHARS)
        session.late.add(rest)
        session.late.add(after.text()[0].encode())
        return session.exit_code

    def _check_input(self, data):
        if self._session.too_long_line(data):
            raise RequestError(
                "a line of the input is longer than %d bytes, which a terminal cannot take; write it to a "
                "file and have the command read that" % MOST_LINE_BYTES
            )

    # -- inside: waiting ----------------------------------------------

    def _wait(self, deadline, hangup_fd=None, watch=False, quiet=None, old_readers=frozenset(), heed=True):
        """Collect output until something ends the wait.

        `watch`: look whether the command waits for input, as somebody else than `old_readers`. `heed`:
        interrupts. Returns "marker", "exited", "timeout", "quiet", "input", "interrupt" or "hangup".
        """
        session = self._session
        poller = select.poll()
        poller.register(session.fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        if hangup_fd is not None:
            poller.register(hangup_fd, select.POLLRDHUP)
        typing = False
        began = changed = time.monotonic()
        seen, look_at = session.read_bytes, LOOK_FIRST_S
        while True:
            if typing != session.wants_to_type():
                typing = not typing
                poller.modify(session.fd, select.POLLIN | (select.POLLOUT if typing else 0))
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            until = deadline
            if quiet is not None:
                until = min(until, changed + quiet)
                if now >= until:
                    return "quiet"
            if watch:
                if now >= changed + look_at:
                    if now > began + SETTLE_S:
                        old_readers = frozenset()
                    waits = not typing and session.readers() - old_readers
                    if session.read() is not None:
                        return session.ending
                    if waits and session.read_bytes == seen:  # else it has just said something
                        return "input"
                    look_at = look_at + min(look_at, LOOK_MOST_S)
                until = min(until, changed + look_at)
            for fd, event in poller.poll(max(0, until - now) * 1000 + 1):
                if fd == session.fd:
                    if event & select.POLLOUT:
                        session.type_queued()
                    if event & ~select.POLLOUT and session.read() is not None:
                        return session.ending
                elif fd == hangup_fd:
                    return "hangup"
                else:
                    ending = self._on_wake(heed)
                    if ending is not None:
                        return ending
            if session.read_bytes != seen:
                seen, changed, look_at = session.read_bytes, time.monotonic(), LOOK_FIRST_S

    def _on_wake(self, heed):
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        if heed and self._interrupt:
            return "interrupt"
        with self._state:
            typed, self._typed = self._typed, []
        for data in typed:
            self._suspending = self._suspending or data == b"\x1a"
            self._session.queue(data)
        if not self._session.is_alive():
            # A background job may hold the terminal open, so end of file is not to be waited for.
            return self._session.read(exited=True)
        return None

    def _stop_command(self):
        """End the foreground command by ever stronger signals. Returns whether the shell came back."""
        session = self._session
        for number, patience in ESCALATION:
            session.signal_foreground(number)
            ending = self._wait(time.monotonic() + patience, heed=False)
            if ending != "timeout":
                return ending == "marker"
            session.type_end()
        os.kill(session.pid, signal.SIGKILL)
        return self._wait(time.monotonic() + ESCALATION[0][1], heed=False) == "marker"

    # -- inside: the bash process ----------------------------------------------

    def _ensure_session(self):
        if self._session.look() == "exited":
            self._spawn(self._session.cwd)
            self._restarted = True

    def _spawn(self, cwd):
        """Replace bash. What the old one said late is kept."""
        old = self._session
        if old is not None:
            old.kill()
        if not os.path.isdir(cwd) or not os.access(cwd, os.X_OK):
            cwd = os.fsencode(self._home_cwd)
        with self._killing:
            session = Session(self._program, self._directory, self._env, os.fsdecode(cwd), self._confine)
            self._session = session
            ending = self._wait(time.monotonic() + START_TIMEOUT_S, heed=False)
        if ending != "marker":
            said = session.late.text()[0]
            session.kill()
            raise ServerError("bash did not become ready (%s); it said: %r" % (ending, said))
        session.late = old.late if old is not None else Capture(LATE_MAX_CHARS)

    def _end_all(self):
        with self._killing:
            proc.end_all(self._own_namespace)

    # -- inside: reading while nobody waits ----------------------------------------------

    def _unattended(self):
        return _Unattended(self)

    def _set_attended(self, wanted):
        """Have the attendant thread read the terminal, or not. Needs the lock."""
        if wanted and self._session.ending != "exited":
            self._epoll.register(self._session.fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._attended = True
        elif self._attended:
            self._attended = False
            self._epoll.unregister(self._session.fd)

    def _attend(self):
        """Read what a command that was left running and background jobs print, so that they do not block."""
        while True:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    if not self._attended or fd != self._session.fd:
                        continue  # a request came first
                    self._session.read()
                    if self._session.ending == "exited":
                        self._set_attended(False)
                    else:
                        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
            time.sleep(0.001)  # a flood of output must not keep a request from the lock


class _Unattended:
    """While a request reads the terminal itself."""

    def __init__(self, shell):
        self._shell = shell

    def __enter__(self):
        self._shell._set_attended(False)

    def __exit__(self, *exc_info):
        self._shell._set_attended(True)
