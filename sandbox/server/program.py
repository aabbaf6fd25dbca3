"""Programs as an operation: `exec`. What decides a reward is run by this, and by nothing else.

The server itself forks, executes and waits, so exit code and times are the kernel's word: no shell and no
marker takes part. Every other process of the sandbox is ended before the program starts and after it has
ended, so nothing that the agent left behind can trace, stop or imitate it, or write into its output. What it
changed and left are files: what a check needs should come from elsewhere (`docs/sandbox.md`).
"""

import base64
import binascii
import contextlib
import os
import resource
import select
import signal
import threading
import time

from confine import confiner
from errors import RequestError, ServerError
from output import Capture, max_chars
from repair import PRELOAD
from tape import TAPE

READ_BYTES = 65536
TRUSTED_PYTHON = "@python"
"""As first argument: the server's own interpreter, which is mounted read-only, and isolated (`-I`)."""
LIMITS = {
    "memory_mb": (resource.RLIMIT_AS, 1 << 20),
    "cpu_s": (resource.RLIMIT_CPU, 1),
    "file_mb": (resource.RLIMIT_FSIZE, 1 << 20),
}


class Programs:
    """Runs one program at a time, alone in the sandbox."""

    def __init__(self, shell, ipython, directory, workspace, env, limits, python, loader, in_clean_thread):
        """`directory`: private place for homes. `env`, `limits`: as the shell's. `python`: command line of
        our own interpreter. `loader`: see `repair.py`. `in_clean_thread`: calls a function in a thread
        whose priority no agent has changed.
        """
        self._in_clean_thread = in_clean_thread
        self._shell = shell
        self._ipython = ipython
        self._directory = directory
        self._workspace = workspace
        self._env = env
        self._limits = limits or {}
        self._python = [*python, "-IBS"]
        self._loader = loader
        self._lock = threading.Lock()

    def op_exec(self, request, connection):
        argv = _strings("argv", request["argv"])
        if not argv or not argv[0]:
            raise RequestError("argv is %r; it must name a program" % (argv,))
        trusted = argv[0] == TRUSTED_PYTHON
        if trusted:
            argv = self._python + argv[1:]
        given = request.get("env") or {}
        _strings("env", [*given.keys(), *given.values()])
        timeout = float(request["timeout"])
        if not 0 < timeout < 1e9:  # false for NaN too
            raise RequestError("timeout is %r; it must be a number of seconds above 0" % timeout)
        stdin = base64.b64decode(request.get("stdin") or "")
        chars = max_chars(request)
        prepare = self._preparation(request.get("limits") or {})
        cwd = os.path.join(self._workspace, request.get("cwd") or "")
        merge = bool(request.get("merge"))
        with contextlib.ExitStack() as held:
            held.enter_context(self._lock)
            held.enter_context(self._ipython.absent(self._shell.end_all))
            fate = held.enter_context(self._shell.alone())
            try:
                if trusted:
                    self._loader.restore()
            except OSError:
                return {"not_started": "%s cannot be taken back to what it was" % PRELOAD}
            env = dict(self._env, HOME=held.enter_context(self._new_home()))
            env.update(given)

            def run():
                program = _Program(argv, env, cwd, stdin, chars, merge, prepare)
                return program.run(timeout, connection.fileno(), self._shell.end_all, fate)

            try:
                return self._in_clean_thread(run)
            except OSError as error:
                raise ServerError("the program cannot be run: %s" % error)

    @contextlib.contextmanager
    def _new_home(self):
        """A directory of its own: what the agent left in its home configures git, Python and much else."""
        home = os.path.join(self._directory, "home-" + binascii.hexlify(os.urandom(8)).decode())
        try:
            os.mkdir(home, 0o700)
        except OSError:
            pass  # the agent filled the disk or closed the directory; a home that is not there is as clean
        try:
            yield home
        finally:
            import shutil  # slow to import, and not of the first command

            shutil.rmtree(home, ignore_errors=True)

    def _preparation(self, limits):
        limited = []
        for name, value in limits.items():
            if name not in LIMITS or not 0 < float(value) < 1e9:
                raise RequestError(
                    "limit %s=%r; there are %s, each above 0" % (name, value, ", ".join(sorted(LIMITS)))
                )
            kind, unit = LIMITS[name]
            limited.append((kind, int(float(value) * unit)))
        return confiner(self._limits, limited)


class _Program:
    """One program, from fork to wait."""

    def __init__(self, argv, env, cwd, stdin, chars, merge, prepare):
        self._began = time.monotonic()
        self._stdin = memoryview(stdin)
        ends, failure = self._pipes(merge), os.pipe()
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _become(argv, env, cwd, ends, failure[1], prepare)
        finally:
            for fd in set(ends):
                os.close(fd)
            os.close(failure[1])
        self._stdout = Capture(chars)
        self._stderr = self._stdout if merge else Capture(chars)
        self._outputs = dict(zip(self._output_fds, (self._stdout, self._stderr)))
        self._reel = TAPE.begin("exec")
        with os.fdopen(failure[0], "rb") as file:
            reason = file.read()  # its end comes with the exec, which closes the other one
        self._not_started = reason.decode("utf-8", "replace") or None

    def _pipes(self, merge):
        """Make the pipes; returns the program's ends of standard input, output and error."""
        stdin, stdout = os.pipe(), os.pipe()
        stderr = stdout if merge else os.pipe()
        self._input_fd = stdin[1]
        self._output_fds = [stdout[0]] if merge else [stdout[0], stderr[0]]
        for fd in (self._input_fd, *self._output_fds):
            os.set_blocking(fd, False)
        return stdin[0], stdout[1], stderr[1]

    def run(self, timeout, hangup_fd, end_all, fate):
        """Wait for its end, or bring it about; the reply. `end_all()`, `fate()`: see `Shell.alone`."""
        try:
            ending = self._follow(self._began + timeout, hangup_fd)
            wall = time.monotonic() - self._began
            # Before it is waited for: nothing can be written into its pipes any more, nor its pid be taken.
            end_all()
            for fd in list(self._outputs):
                self._read(fd, to_the_end=True)
        finally:
            self._reel.end()
            self._close()
        _, status, usage = os.wait4(self._pid, 0)
        reset, limit_exceeded = fate()
        ended = ending == "exited" and not reset and limit_exceeded is None
        exited = ended and os.WIFEXITED(status) and self._not_started is None
        stdout, cut = self._stdout.text()
        stderr, cut_too = ("", False) if self._stderr is self._stdout else self._stderr.text()
        return {
            "exit_code": os.WEXITSTATUS(status) if exited else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "stdout": stdout,
            "stderr": stderr,
            "truncated": cut or cut_too,
            "timed_out": ending == "timeout",
            "interrupted": reset or ending == "hangup",
            "not_started": self._not_started,
            "limit_exceeded": limit_exceeded,
            "wall_s": wall,
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }

    def _follow(self, deadline, hangup_fd):
        """Feed and read it until it has ended: "exited", "timeout" or "hangup"."""
        exited, wake = os.pipe()
        threading.Thread(target=_await, args=(self._pid, wake), daemon=True).start()
        poller = select.poll()
        for fd in self._outputs:
            poller.register(fd, select.POLLIN)
        poller.register(exited, select.POLLIN)
        poller.register(hangup_fd, select.POLLRDHUP)
        self._feed(poller, first=True)
        try:
            while True:
                rest_s = deadline - time.monotonic()
                if rest_s <= 0:
                    return "timeout"
                for fd, _ in poller.poll(rest_s * 1000 + 1):
                    if fd == exited:
                        return "exited"
                    if fd == hangup_fd:
                        return "hangup"
                    if fd == self._input_fd:
                        self._feed(poller)
                    elif self._read(fd):
                        poller.unregister(fd)
        finally:
            os.close(exited)

    def _feed(self, poller, first=False):
        try:
            while self._stdin:
                self._stdin = self._stdin[os.write(self._input_fd, self._stdin) :]
        except BlockingIOError:
            if first:
                poller.register(self._input_fd, select.POLLOUT)
            return
        except OSError:
            self._stdin = memoryview(b"")  # it does not want to read (on)
        if not first:
            poller.unregister(self._input_fd)
        os.close(self._input_fd)
        self._input_fd = None

    def _read(self, fd, to_the_end=False):
        """Read once, or what is there; whether its end has come."""
        try:
            while True:
                data = os.read(fd, READ_BYTES)
                self._outputs[fd].add(data)
                self._reel.add(data)
                if not data:
                    return True
                if not to_the_end:
                    return False
        except BlockingIOError:
            return False

    def _close(self):
        for fd in (self._input_fd, *self._output_fds):
            if fd is not None:
                os.close(fd)


def _await(pid, wake):
    """Close `wake` when the process has ended; it stays to be waited for, so its pid cannot be taken."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    finally:
        os.close(wake)


def _become(argv, env, cwd, ends, failure, prepare):
    """In the child: never returns."""
    try:
        os.setsid()
        for number, fd in enumerate(ends):
            os.dup2(fd, number)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.umask(0o022)
        prepare()
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except BaseException as error:
        os.write(failure, ("%s: %s" % (argv[0], error)).encode("utf-8", "replace"))
    finally:
        os._exit(127)


def _strings(what, values):
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RequestError("%s is %r; it must be made of texts" % (what, values))
    for value in values:
        try:
            if b"\0" in value.encode("utf-8", "surrogateescape"):
                raise RequestError("%s contains a NUL character, which no program can be given" % what)
        except UnicodeEncodeError as error:
            raise RequestError("%s: %s" % (what, error))
    return values
