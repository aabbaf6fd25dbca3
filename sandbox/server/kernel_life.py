"""One life of an IPython kernel, seen from the server: two processes (`kernel.py`), the pipe they print to,
and the thread that collects. A kernel that ends is never revived; the next cell gets a new life.
"""

import array
import binascii
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import termios
import threading
import time

import proc
import wire
from cell import CellOutput, PlaceScanner
from confine import confiner
from errors import RequestError, ServerError, Spoiled
from kernel import NO_PACKAGES
from output import Capture
from tape import TAPE

READ_BYTES = 65536
MAX_EVENT_BYTES = 16 * 1024 * 1024  # of one frame; the bridge belongs to the agent and could send anything
START_TIMEOUT_S = 90.0  # about half a second when idle; a loaded node has been seen to take ten
BRIDGE_END_S = 2.0
STARTUP_CHARS = 2000
LATE_CHARS = 5000
SOCKET_PATH_BYTES = 107  # of a Unix socket; ZeroMQ appends "-N" to the prefix


class KernelLife:
    """From the start of the processes to their end."""

    def __init__(self, python, directory, image_directory, env, cwd, limits):
        """Start the processes without waiting for them. `python`: program that has ipykernel; `directory`:
        private place for the connection. Raises OSError when a process cannot be started.
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
        self.started = None
        """Number of the last cell whose code the kernel has begun with."""
        self.done = None
        """The bridge's last word on the current cell."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._connection_file = _connection_file(directory)
        self._processes = []
        self._start(directory, image_directory, env, cwd, limits)

    def _start(self, directory, image_directory, env, cwd, limits):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernel.py")
        connection_file = self._connection_file
        nonce = binascii.hexlify(os.urandom(8)).decode()
        self._scanner = PlaceScanner(nonce)
        self._held = []  # what was printed after a display that has not come yet
        self._awaited = None  # number of that display
        self._placed = 0  # number of the last display that came
        self._output, output_end = os.pipe()
        os.set_blocking(self._output, False)
        ready_read, ready_write = os.pipe()
        self._sock, bridge_end = socket.socketpair()
        parts = (
            (
                ["kernel", connection_file, os.path.join(directory, "ipython"), nonce, str(ready_write)],
                {"pass_fds": (ready_write,), "stdout": output_end, "cwd": cwd},
            ),
            (
                ["bridge", connection_file, image_directory, str(bridge_end.fileno()), str(ready_read)],
                {"pass_fds": (bridge_end.fileno(), ready_read), "stdout": output_end, "cwd": "/"},
            ),
        )
        try:
            for arguments, options in parts:
                process = subprocess.Popen(
                    [self.python, script, *arguments],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                    preexec_fn=confiner(limits),
                    **options,
                )
                self._processes.append(process)
        except BaseException:
            self._kill_all()
            os.close(self._output)
            self._sock.close()
            _remove(connection_file)
            raise
        finally:
            bridge_end.close()
            for fd in (output_end, ready_read, ready_write):
                os.close(fd)
        self._waiter = threading.Thread(target=self._await_ends, daemon=True)
        self._waiter.start()
        self._pump_thread = threading.Thread(target=self._pump, daemon=True)
        self._pump_thread.start()

    # -- for the thread that runs a cell ---------------------------------------------------------------

    def pids(self):
        """Process ids of kernel and bridge."""
        return [process.pid for process in self._processes]

    def wait(self, condition, deadline, hangup_fd=None):
        """Sleep until `condition()` holds (True), or the time is over or the peer of `hangup_fd` has closed
        (False both).
        """
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if hangup_fd is not None:
            poller.register(hangup_fd, select.POLLRDHUP)
        while not condition():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                return False
            for fd, _ in poller.poll(rest_s * 1000 + 1):
                if fd == hangup_fd:
                    return bool(condition())
                _drain(self._wake_read)
        return True

    def wake(self):
        """Have :meth:`wait` look at its condition again."""
        try:
            os.write(self._wake_write, b"w")
        except OSError:
            pass  # full of wake-ups already, or closed

    def begin(self, number, code, max_chars, env):
        """Hand a cell over; returns what was printed since the last one. `gone` says when it was too late.

        `env`: environment as it should be by now; what changed since the start is told the kernel first.
        """
        changed = {name: value for name, value in env.items() if self._env.get(name) != value}
        self._env.update(changed)
        with self._lock:
            late, self._late = self._late, CellOutput(LATE_CHARS)
            self._cell, self.done = CellOutput(max_chars), None
            self._reel = TAPE.begin("ipython")
            self._number, self.used = number, True
        try:
            request = {"op": "run", "cell": number, "code": code, "max_chars": max_chars, "env": changed}
            wire.send(self._sock, request)
        except OSError:
            self.gone = True  # the bridge has ended this moment
        return late.text()[0]

    def end_cell(self):
        """(output, truncated) of the current cell; what comes later is late."""
        with self._lock:
            cell, self._cell = self._cell, None
            self._reel.end()
            return cell.text()

    def interrupt(self):
        """SIGINT to the kernel and the commands it runs."""
        self._signal(self._processes[0], signal.SIGINT)
        try:  # a kernel that awaits something looks at the signal only when a message comes
            wire.send(self._sock, {"op": "nudge"})
        except OSError:
            pass  # the bridge has ended, which is noticed elsewhere

    def kill(self):
        """End kernel and bridge, and collect what they had said."""
        if self.gone:
            return  # the process ids may belong to others by now
        self._kill_all()
        self._pump_thread.join(BRIDGE_END_S)
        self.gone = True

    def complaint(self):
        """What the processes printed while starting, and whether they ended for want of packages."""
        codes = [process.returncode for process in self._processes]
        return self._startup.text()[0].strip() or "(nothing)", NO_PACKAGES in codes

    # -- the collecting thread -----------------------------------------------------------------------

    def _pump(self):
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        printing = True
        try:
            while True:
                if printing and self._awaited is None:
                    poller.register(self._output, select.POLLIN)
                else:  # a flood must not pile up here while a display is on its way
                    _unregister(poller, self._output)
                ready = {fd for fd, _ in poller.poll()}
                if self._output in ready:
                    printing = self._read_output(READ_BYTES)
                if self._sock.fileno() in ready and not self._take_event():
                    break
        except (OSError, ValueError, KeyError, TypeError, wire.FrameTooLarge):
            pass  # a bridge that does not keep to the protocol has been tampered with: this life is over
        self._kill_all()
        self._waiter.join(BRIDGE_END_S)
        self._placed = float("inf")
        self._read_output(_waiting(self._output))
        self._release()
        self._collect("stream", True, self._scanner.flush())
        self.gone = True
        self.wake()
        _remove(self._connection_file)
        self._sock.close()
        os.close(self._output)

    def _read_output(self, size):
        """Take up to `size` printed bytes. False at their end."""
        while size > 0:
            try:
                data = os.read(self._output, min(size, READ_BYTES))
            except BlockingIOError:
                return True
            if not data:
                return False
            size -= len(data)
            self._held += self._scanner.feed(data)
            if self._awaited is None:
                self._release()
        return True

    def _release(self):
        """Pass on what was held, up to the next marker whose display has not come."""
        held, self._held, self._awaited = self._held, [], None
        for position, (kind, value) in enumerate(held):
            if kind == "output":
                self._collect("stream", True, value)
            elif value > self._placed:
                self._awaited, self._held = value, held[position + 1 :]
                return

    def _take_event(self):
        """One frame of the bridge; False when it has ended."""
        event = wire.receive(self._sock, MAX_EVENT_BYTES)
        if event is None:
            return False
        kind = event["event"]
        if kind in ("show", "clear"):
            place = event.get("place")
            # Printed before the display, so it is in the pipe by now: everything up to the marker.
            while place and (self._awaited or 0) < place and _waiting(self._output):
                self._placed = place - 1
                self._release()
                if self._awaited is None:
                    self._read_output(min(_waiting(self._output), 4096))
            if kind == "show":
                text, display_id = str(event["text"]), event.get("display_id")
                self._collect("show", event["current"], text, display_id, bool(event.get("update")))
            elif event["current"]:
                self._collect("clear", True, bool(event["wait"]))
            self._placed = max(self._placed, place or 0)
            self._release()
            return True
        if kind == "stream":
            self._collect("stream", event["current"], str(event["text"]).encode("utf-8", "replace"))
            return True
        if kind == "started":
            self.started = event["cell"]
            return True
        if kind == "ready":
            self.ready = True
        elif kind == "done" and event["cell"] == self._number:
            self._placed = max(self._placed, self._awaited or 0)  # lost, if it is not here by now
            self._release()
            self._read_output(_waiting(self._output))  # flushed by the kernel before it said so
            if self._awaited is None:
                self._collect("stream", True, self._scanner.flush())
            self.done = event
        self.wake()
        return True

    def _collect(self, method, current, *values):
        with self._lock:
            if not self.ready:
                if method == "stream":
                    self._startup.add(values[0])
                return
            # Once its end is known a cell prints nothing more, even if nobody has asked for the result yet.
            target = self._cell if current and self._cell is not None and self.done is None else self._late
            getattr(target, method)(*values)
            if target is self._cell and method != "clear":
                shown = values[0] if method == "stream" else (values[0] + "\n").encode("utf-8", "replace")
                self._reel.add(shown)

    def _await_ends(self):
        kernel, bridge = self._processes
        kernel.wait()
        try:
            wire.send(self._sock, {"op": "end"})  # it may hold displays from just before the end
            bridge.wait(BRIDGE_END_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        self._signal(bridge, signal.SIGKILL)
        bridge.wait()

    def starved(self):
        """See `proc.starved`, of the kernel or the bridge."""
        return any(proc.starved(process.pid) for process in self._processes)

    def _kill_all(self):
        for process in self._processes:
            self._signal(process, signal.SIGKILL)

    @staticmethod
    def _signal(process, number):
        """To the whole process group, which can outlive its first process."""
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # nobody is left

    def __del__(self):
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)


def wait_until_ready(life, hangup_fd=None):
    """Wait for the kernel's first answer. Raises ServerError with what the processes said, Spoiled where they
    had what they need of the machine.
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


def _connection_file(directory):
    """Write a connection file for Unix sockets and return its path."""
    name = binascii.hexlify(os.urandom(4)).decode()
    prefix = os.path.join(directory, "k" + name)
    if len(os.fsencode(prefix)) + 2 > SOCKET_PATH_BYTES:
        prefix = "/tmp/.k" + name  # only where the server runs without a container, in a deep directory
    ports = {kind + "_port": i for i, kind in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}
    content = dict(
        ports,
        transport="ipc",
        ip=prefix,
        key=binascii.hexlify(os.urandom(16)).decode(),
        signature_scheme="hmac-sha256",
        kernel_name="python3",
    )
    path = prefix + ".json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file)
    return path


def _remove(connection_file):
    prefix = connection_file[: -len(".json")]
    for path in [connection_file] + ["%s-%d" % (prefix, i) for i in range(1, 6)]:
        try:
            os.unlink(path)
        except OSError:
            pass


def _unregister(poller, fd):
    try:
        poller.unregister(fd)
    except KeyError:
        pass


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
