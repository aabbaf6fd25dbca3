"""Waiting for a command: until it ends, is to be ended, or is to be left alone."""

import contextlib
import os
import select
import signal
import threading
import time

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


class Waiter:
    """One thread at a time waits for a session's command; others interrupt it or hand it input to type."""

    def __init__(self):
        self._lock = threading.Lock()  # guards the next two
        self._waiting = False
        self._typed = []  # input for the waiting thread to type
        self._interrupted = False
        self._wake_read, self.wake_fd = os.pipe()
        """Writing a byte to `wake_fd` has the waiting thread look again; it is for `signal.set_wakeup_fd`, as
        children die.
        """
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self.wake_fd, False)

    # -- what other threads do ----------------------------------------------

    def interrupt(self):
        """Have the waiting thread end the command. Returns False when none waits."""
        with self._lock:
            if self._waiting:
                self._interrupted = True
                self._wake()
            return self._waiting

    def hand_over(self, data, check):
        """Have the waiting thread type `data`, unless `check(data)` raises. Returns False when none waits."""
        with self._lock:
            if self._waiting:
                check(data)
                self._typed.append(data)
                self._wake()
            return self._waiting

    def _wake(self):
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            os.write(self.wake_fd, b"w")

    # -- the waiting thread ----------------------------------------------

    def follow(self, session, *arguments):
        """:meth:`wait`, open to other threads meanwhile."""
        with self._lock:
            self._waiting, self._interrupted = True, False
        try:
            return self.wait(session, *arguments)
        finally:
            with self._lock:
                self._waiting = False
                typed, self._typed = self._typed, []
            if session.ending is None:
                for data in typed:
                    session.queue(data)

    def wait(self, session, deadline, hangup_fd=None, watch=False, quiet=None, heed=True):
        """Collect output until something ends the wait.

        `watch`: look whether the command waits for input. `heed`: interrupts. Returns "marker", "exited",
        "timeout", "quiet", "input", "interrupt" or "hangup".
        """
        poller = select.poll()
        poller.register(session.fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        if hangup_fd is not None:
            poller.register(hangup_fd, select.POLLRDHUP)
        typing = False
        changed = time.monotonic()
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
                    waits = not typing and session.waits_for_input()
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
                    ending = self._on_wake(session, heed)
                    if ending is not None:
                        return ending
            if session.read_bytes != seen:
                seen, changed, look_at = session.read_bytes, time.monotonic(), LOOK_FIRST_S

    def _on_wake(self, session, heed):
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        if heed and self._interrupted:
            return "interrupt"
        with self._lock:
            typed, self._typed = self._typed, []
        for data in typed:
            session.queue(data)
        # A background job may hold the terminal open, so end of file is not to be waited for.
        return None if session.is_alive() else session.read(exited=True)

    def stop(self, session):
        """End the foreground command by ever stronger signals. Returns whether the shell came back."""
        for number, patience in ESCALATION:
            session.signal_foreground(number)
            ending = self.wait(session, time.monotonic() + patience, heed=False)
            if ending != "timeout":
                return ending == "marker"
            session.type_end()
        session.end_process()
        return self.wait(session, time.monotonic() + ESCALATION[0][1], heed=False) == "marker"
