"""One life of an IPython kernel, seen from the server: the process (`kernel.py`), the pipe it prints to, and
the thread that collects. A kernel that ends is never revived; the next cell gets a new life.
"""

import array
import binascii
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import termios
import threading
import time

import proc
from cell import CellOutput, EventScanner
from confine import confiner
from errors import RequestError, ServerError, Spoiled
from kernel import NO_PACKAGES
from output import Capture
from tape import TAPE

READ_BYTES = 65536
START_TIMEOUT_S = 90.0  # about half a second when idle; a loaded node has been seen to take ten
END_S = 2.0
STARTUP_CHARS = 2000
LATE_CHARS = 5000


class KernelLife:
    """From the start of the process to its end."""

    def __init__(self, python, directory, image_directory, env, cwd, limits):
        """Start the process without waiting for it. `python`: program that has ipykernel; `directory`:
        private place for IPython's files. Raises OSError when it cannot be started.
        """
        self.python = python
        self._env = dict(env)
        self._lock = threading.Lock()
        self._cell = self._reel = None
        self._late = CellOutput(LATE_CHARS)
        self._startup = Capture(STARTUP_CHARS)
        self.ready = False
        self.gone = False
        """True once no cell can come to an end here any more."""
        self.used = False
        """Whether a cell was given to it."""
        self._number = None
        self._unsent = b""  # of the current cell's request
        self.done = None
        """The kernel's last word on the current cell."""
        nonce = binascii.hexlify(os.urandom(8)).decode()
        self._scanner = EventScanner(nonce)
        self._wake_read, self._wake_write = os.pipe()
        self._output, output_end = os.pipe()
        requests_end, self._requests = os.pipe()
        for fd in (self._wake_read, self._wake_write, self._output, self._requests):
            os.set_blocking(fd, False)
        # Where it lies for others: to us it may be known by a descriptor's name, see `template.py`.
        script = os.path.join(os.path.dirname(os.path.realpath(__file__)), "kernel.py")
        ipython_dir = os.path.join(directory, "ipython")
        try:
            self._process = subprocess.Popen(
                [python, script, str(requests_end), image_directory, ipython_dir, nonce],
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=subprocess.STDOUT,
                pass_fds=(requests_end,),
                cwd=cwd,
                env=env,
                start_new_session=True,
                preexec_fn=confiner(limits),
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(output_end)
            os.close(requests_end)
        self._pump_thread = threading.Thread(target=self._pump, daemon=True)
        self._pump_thread.start()

    # -- for the thread that runs a cell ---------------------------------------------------------------

    def pids(self):
        """Process ids: the kernel's."""
        return [self._process.pid]

    def wait(self, condition, deadline, hangup_fd=None):
        """Sleep until `condition()` holds (True), or the time is over or the peer of `hangup_fd` has closed
        (False both).
        """
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if hangup_fd is not None:
            poller.register(hangup_fd, select.POLLRDHUP)
        if self._unsent:
            poller.register(self._requests, select.POLLOUT)
        while not condition():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                return False
            for fd, _ in poller.poll(rest_s * 1000 + 1):
                if fd == hangup_fd:
                    return bool(condition())
                if fd == self._wake_read:
                    _drain(fd)
                elif self._send():
                    poller.unregister(fd)
        return True

    def wake(self):
        """Have :meth:`wait` look at its condition again."""
        try:
            os.write(self._wake_write, b"w")
        except OSError:
            pass  # full of wake-ups already, or closed

    def begin(self, number, code, max_chars, env):
        """Hand a cell over; returns what was printed since the last one. `gone` says when it was too late.

        `env`: environment as it should be by now; what changed since the start is told the kernel, too.
        """
        changed = {name: value for name, value in env.items() if self._env.get(name) != value}
        self._env.update(changed)
        with self._lock:
            late, self._late = self._late, CellOutput(LATE_CHARS)
            self._cell, self.done = CellOutput(max_chars), None
            self._reel = TAPE.begin("ipython")
            self._number, self.used = number, True
        request = {"cell": number, "code": code, "max_chars": max_chars, "env": changed}
        self._unsent = memoryview(json.dumps(request).encode() + b"\n")
        self._send()
        return late.text()[0]

    def _send(self):
        """Write what the pipe takes of the request; whether that was the rest."""
        try:
            self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True  # the kernel has ended this moment
        return not self._unsent

    def begun(self):
        """Whether the kernel has taken the current cell's code."""
        return not self._unsent and not _waiting(self._requests)

    def end_cell(self):
        """(output, truncated) of the current cell; what comes later is late."""
        with self._lock:
            cell, self._cell = self._cell, None
            self._reel.end()
            return cell.text()

    def interrupt(self):
        """SIGINT to the kernel and the commands it runs."""
        self._signal(signal.SIGINT)

    def kill(self):
        """End the kernel, and collect what it had said."""
        if self.gone:
            return  # the process id may belong to others by now
        self._signal(signal.SIGKILL)
        self._pump_thread.join(END_S)
        self.gone = True

    def complaint(self):
        """What the process printed while starting, and whether it ended for want of packages."""
        return self._startup.text()[0].strip() or "(nothing)", self._process.returncode == NO_PACKAGES

    # -- the collecting thread -----------------------------------------------------------------------

    def _pump(self):
        try:
            self._follow()
            self._signal(signal.SIGKILL)
            self._read(_waiting(self._output))
            self._collect("stream", self._scanner.flush())
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # A kernel that does not keep to the protocol has been tampered with: this life is over.
            self._signal(signal.SIGKILL)
        self._process.wait()  # only now is its id free for others
        self.gone = True
        self.wake()
        os.close(self._output)

    def _follow(self):
        """Until the kernel ends or closes its output."""
        ended, end = os.pipe()
        threading.Thread(target=self._await_end, args=(end,), daemon=True).start()
        poller = select.poll()
        for fd in (self._output, ended):
            poller.register(fd, select.POLLIN)
        with open(ended, "rb"):
            while self._read(READ_BYTES):
                if ended in dict(poller.poll()):
                    return

    def _await_end(self, end):
        """Close `end` when the kernel has ended, which may have left others with its output."""
        with open(end, "wb"), contextlib.suppress(ChildProcessError):  # it may have been waited for by now
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

    def _read(self, size):
        """Take up to `size` printed bytes. False at their end."""
        while size > 0:
            try:
                data = os.read(self._output, min(size, READ_BYTES))
            except BlockingIOError:
                return True
            if not data:
                return False
            size -= len(data)
            for kind, value in self._scanner.feed(data):
                if kind == "output":
                    self._collect("stream", value)
                elif value is not None:
                    self._take(value)
        return True

    def _take(self, event):
        kind = event["event"]
        if kind == "show":
            self._collect("show", str(event["text"]), event.get("display_id"), bool(event.get("update")))
        elif kind == "stream":
            self._collect("stream", str(event["text"]).encode("utf-8", "replace"))
        elif kind == "clear":
            self._collect("clear", bool(event["wait"]))
        elif kind == "ready":
            self.ready = True
            self.wake()
        elif kind == "done" and event["cell"] == self._number:
            self.done = event
            self.wake()

    def _collect(self, method, *values):
        with self._lock:
            if not self.ready:
                if method == "stream":
                    self._startup.add(values[0])
                return
            # Once its end is known a cell prints nothing more, even if nobody has asked for the result yet.
            target = self._cell if self._cell is not None and self.done is None else self._late
            getattr(target, method)(*values)
            if target is self._cell and method != "clear":
                shown = values[0] if method == "stream" else (values[0] + "\n").encode("utf-8", "replace")
                self._reel.add(shown)

    def starved(self):
        """See `proc.starved`, of the kernel."""
        return proc.starved(self._process.pid)

    def _signal(self, number):
        """To the whole process group, which can outlive its first process."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # nobody is left

    def __del__(self):
        for fd in (self._wake_read, self._wake_write, self._requests):
            os.close(fd)


def wait_until_ready(life, hangup_fd=None):
    """Wait for the kernel's first answer. Raises ServerError with what the process said, Spoiled where it
    had what it needs of the machine.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    if life.wait(lambda: life.ready or life.gone, deadline, hangup_fd):
        if life.ready and not life.gone:
            return
        words, lacking = life.complaint()
        if lacking:
            raise NoPackages(words)
        raise Spoiled("the IPython kernel (%s) ended while starting; it said: %s" % (life.python, words))
    if time.monotonic() < deadline:
        raise RequestError("the caller went away while the IPython kernel was starting")
    kind = ServerError if life.starved() else Spoiled
    life.kill()
    raise kind(
        "the IPython kernel (%s) was not ready after %g s; it said: %s"
        % (life.python, START_TIMEOUT_S, life.complaint()[0])
    )


class NoPackages(Exception):
    """This Python lacks ipykernel or jupyter_client."""


def _waiting(fd):
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def _drain(fd):
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
