"""IPython cells as operations: `ipython`, `ipython_warm`, `ipython_interrupt`, `ipython_restart`.

The kernel is started by the first cell (or ahead of it by `ipython_warm`) and started anew whenever it has
died, whoever killed it. A result says when that cost the variables.
"""

import contextlib
import os
import shutil
import threading
import time

from errors import RequestError, ServerError, Spoiled
from output import max_chars

PYTHON_VARIABLE = "ROLLOUT_IPYTHON"
INTERRUPT_PATIENCE_S = 5.0  # from SIGINT to SIGKILL
REMEDY = (
    "no Python in this sandbox can run an IPython kernel (tried %s): install the packages ipykernel and "
    "jupyter_client in the image, or name a Python that has them in the sandbox's variable " + PYTHON_VARIABLE
)


class IPython:
    """Cells, one at a time, in a kernel that is replaced when it dies."""

    def __init__(self, directory, workspace, env, limits=None):
        """`directory`: private place for connections. `env`, `limits`: as the shell's."""
        self._directory = directory
        self._workspace = workspace
        self._env = env
        self._limits = limits or {}
        self._images = os.path.join(env.get("TMPDIR") or "/tmp", "ipython")
        self._python = None  # once one has worked
        self._life = None
        self._had_life = False  # whether there were variables to lose
        self._cells = 0
        self._lock = threading.Lock()  # held while a cell runs
        self._start_lock = threading.Lock()
        self._birth_lock = threading.Lock()  # held while processes start that `_life` does not tell of yet
        self._running = None  # the life whose cell runs
        self._interrupted = False
        self._limit_exceeded = None  # to be told with the next result
        self._may_start = threading.Event()  # not while all processes are being ended, a new kernel with them
        self._may_start.set()
        self._endings = 0
        self._endings_under_way = 0
        self._ending = threading.Lock()  # guards the last three

    @contextlib.contextmanager
    def while_all_end(self, limit_exceeded=None):
        """All processes are ended in this block, the kernel among them; for a limit that was exceeded, or
        None.
        """
        if limit_exceeded and self._had_life:
            self._limit_exceeded = limit_exceeded
        with self._ending:
            self._may_start.clear()
            self._endings += 1
            self._endings_under_way += 1
        try:
            yield
        finally:
            with self._ending:
                self._endings_under_way -= 1
                if not self._endings_under_way:
                    self._may_start.set()

    @contextlib.contextmanager
    def absent(self, end_all):
        """No kernel runs in this block, nor starts. `end_all()` ends all processes, one that starts too."""
        with self.while_all_end():
            end_all()
            while not self._start_lock.acquire(timeout=0.2):
                end_all()
            try:
                yield
            finally:
                self._start_lock.release()

    def variables(self, state=None):
        """For another sandbox: whether there were any to lose, which its first cell tells, and of how many
        cells images have the names. `state`: that of the other one.
        """
        if state is not None:
            self._had_life, self._cells = state["lost"], state["cells"]
        return {"lost": self._had_life, "cells": self._cells}

    def pids(self):
        """Children of the server that are waited for here."""
        return self._life.pids() if self._life is not None else []

    def all_pids(self):
        """As `pids`, and those that were starting when this was asked; it waits for their start."""
        with self._birth_lock:
            return self.pids()

    # -- operations ----------------------------------------------

    def op_ipython(self, request, connection):
        code = str(request["code"])
        timeout = float(request["timeout"])
        chars = max_chars(request)
        with self._lock:
            restarted = False
            while True:
                life = self._live(connection.fileno())
                restarted = restarted or (self._had_life and not life.used)
                self._had_life = True
                self._cells += 1
                result = self._run_in(life, code, timeout, chars, connection.fileno(), restarted)
                if life.done or life.begun() or result["timed_out"] or result["interrupted"]:
                    return result
                restarted = True  # it was dying already; nothing of the code was run

    def _run_in(self, life, code, timeout, chars, hangup_fd, restarted):
        began = time.monotonic()
        self._interrupted = False
        self._running = life
        try:
            late = life.begin(self._cells, code, chars, self._env)
            over = life.wait(lambda: life.done or life.gone or self._interrupted, began + timeout, hangup_fd)
            timed_out = not over and time.monotonic() >= began + timeout
            interrupted = not timed_out and (self._interrupted or not over)
            if life.done is None and not life.gone:
                life.interrupt()
                deadline = time.monotonic() + INTERRUPT_PATIENCE_S
                life.wait(lambda: life.done or life.gone, deadline)
        finally:
            self._running = None
        done = life.done
        died = done is None
        if died:
            life.kill()
        output, truncated = life.end_cell()
        limit_exceeded, self._limit_exceeded = self._limit_exceeded, None
        if died:
            self._had_life = False  # said in this result; not again in the next
            self._start_in_background()
        return {
            "output": output,
            "late_output": late,
            "error": done and done.get("error"),
            "execution_count": done and done.get("count"),
            "timed_out": timed_out,
            "interrupted": interrupted,
            "restarted": restarted or died,
            "limit_exceeded": limit_exceeded,
            "truncated": truncated,
            "duration_s": time.monotonic() - began,
        }

    def op_ipython_warm(self, request, connection):
        self._start_in_background()
        return {}

    def op_ipython_interrupt(self, request, connection):
        life = self._running
        if life is None:
            return {"was_running": False}
        self._interrupted = True
        life.wake()
        return {"was_running": True}

    def op_ipython_restart(self, request, connection):
        """End the kernel; a cell under way comes back as restarted."""
        life, self._life = self._life, None
        if life is not None:
            life.kill()
            life.wake()
        if self._running is None:
            self._had_life = False  # asked for, so the next cell need not say it
        self._start_in_background()
        return {}

    # -- the kernel ----------------------------------------------

    def _start_in_background(self):
        def start():
            from kernel_life import NoPackages  # not at the top: it costs a sandbox's start five milliseconds

            try:
                self._live(None)
            except (NoPackages, RequestError, ServerError, OSError):
                pass  # the next cell tries again and reports

        threading.Thread(target=start, daemon=True).start()

    def _live(self, hangup_fd):
        """A kernel that is ready. Raises RequestError when no Python here can run one."""
        while True:
            self._may_start.wait()
            endings = self._endings
            try:
                return self._live_now(hangup_fd)
            except ServerError:
                if endings == self._endings:
                    raise  # else it was ended with all others while it started

    def _live_now(self, hangup_fd):
        from kernel_life import KernelLife, NoPackages, wait_until_ready

        with self._start_lock:
            life = self._life
            if life is not None and not life.gone:
                wait_until_ready(life, hangup_fd)
                return life
            pythons = self._pythons()
            for python in pythons:
                try:
                    with self._birth_lock:
                        self._life = life = KernelLife(
                            python, self._directory, self._images, self._env, self._workspace, self._limits
                        )
                    wait_until_ready(life, hangup_fd)
                except (NoPackages, FileNotFoundError, PermissionError):
                    continue
                except Spoiled as error:
                    if self._python is None:  # it may be the image's fault: none has been ready here
                        raise ServerError(str(error))
                    raise
                self._python = python
                return life
            raise RequestError(REMEDY % ", ".join(pythons))

    def _pythons(self):
        if self._python is not None:
            return [self._python]
        named = self._env.get(PYTHON_VARIABLE)
        if named:
            return [named]
        pythons = [shutil.which("python3", path=self._env.get("PATH")), "/usr/bin/python3"]
        same = pythons[0] and os.path.realpath(pythons[0]) == os.path.realpath(pythons[1])
        return [python for python in pythons[: 1 if same else 2] if python]
