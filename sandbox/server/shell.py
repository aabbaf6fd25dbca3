"""The persistent shell: one command at a time on one bash, which is replaced whenever it dies.

A command is written to a file and only `. file` is typed, so quotes, heredocs and length cannot break the
framing and standard input stays free for the command. Where a command ends bash prints a marker (nonce,
command number, exit code, directory) to the terminal, and where it begins, unless it was at its prompt then.
Everything waits for events on file descriptors; nothing polls, but for a look now and then at whether a
silent command waits for input, if that was asked for.
"""

import contextlib
import os
import select
import signal
import threading
import time

import proc
from bash import Bash
from errors import RequestError, ServerError, Spoiled, of_system
from output import DEFAULT_MAX_CHARS, Capture
from repair import content, open_root, usable_directory, write_private
from session import LATE_MAX_CHARS, MOST_LINE_BYTES, Session
from waiting import Waiter

START_TIMEOUT_S = 15.0  # bash with its rc file; generous, because a loaded node is slow
FIRST_START_TIMEOUT_S = 5.0  # of one that another can stand in for
SETUP_TIMEOUT_S = 10.0
MOST_ASIDE_BYTES = 4 << 20
ASIDE_LOCK_S = 3.0  # a command that is waited for holds it longer


class Shell:
    """A bash that is started again whenever it dies; one command at a time."""

    def __init__(
        self,
        directory,
        env,
        cwd,
        programs=(("bash",),),
        limits=None,
        own_namespace=True,
        loader=None,
        first=None,
    ):
        """`directory`: private place for the rc and command files. `env`: a dict that is also read later,
        whenever bash is started again. `programs`: command lines of bash, each tried when the one before does
        not start. `limits`: see `confine.py`. `own_namespace`: see `proc.end_all`. `loader`: see `repair.py`.
        `first`: the first of `programs` if it was started already (`bash.py`). Raises ServerError when bash
        does not start.
        """
        self._directory = directory
        self._env = env
        self._programs = [list(program) for program in programs]
        self._loader = loader
        self._limits = limits
        self._first = first
        self.home = cwd
        self._own_namespace = own_namespace
        self._lock = threading.Lock()  # whoever holds it reads the terminal
        self._killing = threading.Lock()  # to end all processes, or start bash, which that would end
        self._waiter = Waiter()
        self.wake_fd = self._waiter.wake_fd
        self._resetting = 0  # threads that are ending all processes, so that no shell is to be started
        self._resets = 0
        self._counting = threading.Lock()  # guards the last two
        self._session = None
        self._behind = False  # a command runs, or has ended, whose last result nobody got
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

    def interrupt(self):
        """End the running command (^C, TERM, KILL). Returns whether one was running."""
        if self._told_or_locked(self._waiter.interrupt):
            return True
        try:
            with self._unattended():
                if not self._behind or self._session.look() is not None:
                    return False
                self._waiter.stop(self._session)
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
        with self._counting:
            self._resets += 1
        with self._nobody():
            self._spawn(os.fsencode(self.home))
            self._restarted = True
            return self._result(Capture(max_chars), began)

    @contextlib.contextmanager
    def alone(self):
        """No process of the sandbox runs but what this thread starts in the block, and none of those after.
        The next command gets a fresh shell. Gives a function that tells, of what was started in the block,
        (whether a reset has ended it, which limit it exceeded and was ended for; None = none).
        """
        with self._nobody():
            self._session.kill()
            open_root()
            self._restarted = True
            resets = self._resets
            # What the agent exceeded before is told with its next command, not with ours.
            earlier, self._limit_exceeded = self._limit_exceeded, None
            try:
                yield lambda: (self._resets != resets, self._limit_exceeded)
            finally:
                self.end_all()
                self._limit_exceeded = earlier

    @contextlib.contextmanager
    def _nobody(self):
        """Hold the terminal, with every process ended."""
        with self._counting:
            self._resetting += 1
        try:
            self.end_all()
            while not self._lock.acquire(timeout=0.2):
                self.end_all()  # a command that was waiting for its turn had it
        finally:
            with self._counting:
                self._resetting -= 1
        try:
            with self._unattended():
                self._behind = False
                self.end_all()  # what that command has left behind
                yield
        finally:
            self._lock.release()

    def breach(self, message):
        """End every process because a limit was exceeded; the running command's result, or else the next one,
        carries `message`.
        """
        self._limit_exceeded = message
        self.end_all()

    # -- running a command ----------------------------------------------

    def run(self, command, timeout, max_chars=DEFAULT_MAX_CHARS, hangup_fd=None, keep=False, quiet=None):
        """Run `command` and return its result as a dict, the fields of `sandbox.client.BashResult`.

        `timeout` in seconds. A command that overruns it is ended, with `keep` left running. With `keep` that
        also happens after `quiet` seconds without output and when it certainly waits for input. `hangup_fd`:
        a socket whose closing by the peer ends the command. Raises RequestError while an earlier command
        runs, ServerError when bash cannot be started again.
        """
        with self._lock, self._unattended():
            began = time.monotonic()
            late_exit_code = self._settle_behind()
            self._suspending = False
            for _ in range(2):
                if not self._session.start(command, Capture(max_chars)):
                    self._spawn(self._session.cwd)
                    self._restarted = True
                    self._session.start(command, Capture(max_chars))
                ending = self._follow(began + timeout, hangup_fd, keep, quiet)
                if ending != "exited" or self._session.begun or self._resetting:
                    break  # else bash was about to end, and has not got as far as the command
            result = self._outcome(ending, began, keep)
            result["late_exit_code"] = late_exit_code
            return result

    def send_input(self, data, timeout, max_chars=DEFAULT_MAX_CHARS, hangup_fd=None, quiet=None):
        """Type `data` (bytes) to the running command, then wait as :meth:`run` does with `keep`.

        Returns at once while another thread waits for the command. Raises RequestError when none runs.
        """
        began = time.monotonic()
        self._suspending = self._suspending or data == b"\x1a"
        if self._told_or_locked(lambda: self._waiter.hand_over(data, self._check_input)):
            return dict(self._result(Capture(2), began, notices=False), running=True, exit_code=None)
        try:
            if not self._behind:
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
                session.queue(data)
                return self._outcome(self._follow(began + timeout, hangup_fd, True, quiet), began, True)
        finally:
            self._lock.release()

    def setup(self, env):
        """Add variables to the environment of this shell and of all that follow. Raises RequestError for a
        name that bash does not let be set, or while a command runs.
        """
        exports = "".join("export %s=%s\n" % (name, quoted(value)) for name, value in env.items())
        result = self.run("set -e\n" + exports + "set +e", SETUP_TIMEOUT_S)
        if result["exit_code"] != 0:
            raise RequestError("bash refused the environment: %s" % result["output"].strip())
        self._env.update(env)

    def aside(self, command, timeout):
        """Run a command of ours: the agent's next result is as if it had not been. Returns what it wrote to
        standard output (bytes); None when it was not to be run, as while another one runs, or did not end.
        """
        report = self.private("aside")
        if not self._lock.acquire(timeout=ASIDE_LOCK_S):
            return None
        try:
            with self._unattended():
                session = self._session
                if session.look() != "marker":
                    return None
                kept = session.capture, session.exit_code
                write_private(report, "")
                framed = "{ %s\n} >|%s </dev/null 2>/dev/null || \\builtin :" % (command, quoted(report))
                if not session.start(framed, Capture(LATE_MAX_CHARS), ours=True):
                    return None
                ending = self._waiter.wait(session, time.monotonic() + timeout, heed=False)
                if ending != "marker":
                    self._waiter.stop(session)
                session.late.add(session.capture.text()[0].encode())  # of background jobs
                session.capture, session.exit_code = kept
                return content(report, MOST_ASIDE_BYTES) if ending == "marker" else None
        finally:
            self._lock.release()

    def notes(self):
        """What the next result is to say besides; for :meth:`go_on`. Nothing may run."""
        session = self._session
        rest = session.capture.text()[0] if self._behind else ""
        return {
            "restarted": self._restarted or session.ending == "exited",
            "limit_exceeded": self._limit_exceeded,
            "told_cwd": self._told_cwd,
            "late": rest + session.late.text()[0],
            "late_exit_code": session.exit_code if self._behind else None,
        }

    def go_on(self, notes, cwd=None):
        """Say that in the next result. `cwd`: begin a fresh bash there, which is told, too."""
        with self._lock, self._unattended():
            if cwd is not None:
                self._spawn(cwd)
            self._restarted = notes["restarted"] or cwd is not None
            self._limit_exceeded, self._told_cwd = notes["limit_exceeded"], notes["told_cwd"]
            self._session.late.add(notes["late"].encode())
            self._behind = notes["late_exit_code"] is not None
            if self._behind:
                self._session.exit_code = notes["late_exit_code"]

    def private(self, name):
        """Path of a file for what goes between us and bash."""
        return os.path.join(self._directory, name)

    def cwd(self):
        """The directory of bash (bytes), or in which the next one will be."""
        session = self._session
        if session.ending != "exited":
            session.update_cwd()
        return session.cwd

    def close(self):
        """End bash; its background jobs are left to the end of the container."""
        with self._lock:
            self._set_attended(False)
            self._session.kill()

    def _told_or_locked(self, tell):
        """Whether `tell()` reached a thread that waits for a command. If there is none, the lock is held."""
        while not tell():
            if self._lock.acquire(timeout=0.01):  # else a request has just begun or is about to end
                return False
        return True

    # -- inside: a command's life ----------------------------------------------

    def _follow(self, deadline, hangup_fd, keep, quiet):
        """Wait for the running command; how that ended."""
        self._behind = True  # should the wait fail
        ending = self._waiter.follow(self._session, deadline, hangup_fd, keep, quiet if keep else None)
        self._behind = False
        return ending

    def _outcome(self, ending, began, keep):
        """The result of the command that was waited for."""
        session = self._session
        if ending in ("quiet", "input") or (ending == "timeout" and keep):
            self._behind = True
            result = self._running_result(session.capture, began)
            result["timed_out"] = ending == "timeout"
            result["waiting_for_input"] = ending == "input"
            return result
        alive = ending == "marker"
        if ending in ("timeout", "interrupt", "hangup"):
            alive = self._waiter.stop(self._session)
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
        session, self._behind = self._session, False
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
            interrupted=ending in ("interrupt", "hangup") or bool(self._resetting and not alive),
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

    def _settle_behind(self):
        """Before a new command: refuse it while the one left behind runs. Returns that one's exit code if it
        has ended since its last result; what it still said goes to the late output.
        """
        if not self._behind:
            return None
        session = self._session
        if session.look() is None:
            raise RequestError(
                "the previous command is still running; send it input (is_input), wait for it with empty "
                "input, interrupt it with the input C-c, or use reset"
            )
        self._behind = False
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

    # -- inside: the bash process ----------------------------------------------

    def _spawn(self, cwd):
        """Replace bash. What the old one said late is kept."""
        old = self._session
        if old is not None:
            old.kill()
        open_root()
        cwd = usable_directory([cwd, os.fsencode(self.home)])
        # The last one once more: on a loaded machine a bash was seen that never said a word.
        tries = [(program, FIRST_START_TIMEOUT_S) for program in self._programs[:-1]]
        tries += 2 * [(self._programs[-1], START_TIMEOUT_S)]
        while True:
            try:
                session = self._start(*tries.pop(0), cwd)
                break
            except ServerError as error:
                if not tries:
                    raise
                with contextlib.suppress(OSError):  # of a host that is gone
                    os.write(2, ("%s; tried again\n" % error).encode("utf-8", "replace"))
                # The agent may have replaced the image's bash, put something into every program, or left
                # something running that ends each.
                self._loader.restore()
                if old is not None and len(tries) == 1:
                    self.end_all()
        session.late = old.late if old is not None else Capture(LATE_MAX_CHARS)

    def _start(self, program, timeout, cwd):
        """The new session. Raises ServerError; Spoiled where bash had what it needs of the machine: then what
        it reads, such as /etc/bash.bashrc, keeps it.
        """
        with self._killing:
            bash, self._first = self._first, None
            try:
                bash = bash or Bash(program, self._directory, self._env, cwd, self._limits)
            except OSError as error:
                raise of_system("cannot start %s" % program[0], error)
            self._session = session = Session(bash, self._directory, cwd)
            ending = self._waiter.wait(session, time.monotonic() + timeout, heed=False)
        if ending != "marker":
            words, state = session.late.text()[0], proc.description(session.pid)
            kind = ServerError if proc.starved(session.pid) else Spoiled
            session.kill()
            raise kind("bash did not become ready (%s; %s); it said: %r" % (ending, state, words))
        return session

    def end_all(self):
        """End every process of the sandbox but the server. Raises ServerError when one does not end."""
        with self._killing:
            proc.end_all(self._own_namespace)

    # -- inside: reading while nobody waits ----------------------------------------------

    @contextlib.contextmanager
    def _unattended(self):
        """A request reads the terminal itself in this block. Needs the lock."""
        self._set_attended(False)
        try:
            yield
        finally:
            self._set_attended(True)

    def _set_attended(self, attended):
        """Have the attendant thread read the terminal, or not. Needs the lock."""
        if attended and self._session.ending != "exited":
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


def quoted(text):
    """For bash, as it is. `shlex` does that too, but imports more than all of the shell."""
    return "'%s'" % text.replace("'", "'\\''")
