"""The persistent shell as operations: `bash`, `input`, `interrupt`, `reset`, `setup`, `breach`."""

import re

from errors import RequestError, of_system
from output import max_chars

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONTROL_KEY = re.compile(r"C-([a-zA-Z@\[\\\]^_])")


class Terminal:
    """Requests about one :class:`shell.Shell`."""

    def __init__(self, shell, while_all_end):
        """`while_all_end(message)`: context manager for the time in which all processes are ended; `message`:
        which limit was exceeded, or None.
        """
        self._shell = shell
        self._while_all_end = while_all_end

    def op_bash(self, request, connection):
        command = str(request["command"])
        if "\0" in command:
            raise RequestError("the command contains a NUL character, which no shell can take")
        _encode("command", command)
        on_timeout = request.get("on_timeout") or "kill"
        if on_timeout not in ("kill", "keep"):
            raise RequestError("on_timeout is %r; it must be 'kill' or 'keep'" % (on_timeout,))
        return _carry_out(
            self._shell.run,
            command,
            _seconds(request, "timeout"),
            max_chars(request),
            connection.fileno(),
            on_timeout == "keep",
            _seconds(request, "quiet_timeout", None),
        )

    def op_input(self, request, connection):
        return _carry_out(
            self._shell.send_input,
            keys(str(request["text"])),
            _seconds(request, "timeout", 0.0),
            max_chars(request),
            connection.fileno(),
            _seconds(request, "quiet_timeout", None),
        )

    def op_interrupt(self, request, connection):
        return {"was_running": self._shell.interrupt()}

    def op_reset(self, request, connection):
        with self._while_all_end(None):
            return _carry_out(self._shell.reset, max_chars(request))

    def op_setup(self, request, connection):
        env = request.get("env") or {}
        for name, value in env.items():
            if not NAME.fullmatch(name):
                raise RequestError("environment variable %r: a name has letters, digits and _ only" % name)
            if not isinstance(value, str) or "\0" in value:
                raise RequestError("environment variable %s: its value must be text without NUL" % name)
            _encode("environment variable %s" % name, value)
        if env:
            _carry_out(self._shell.setup, env)
        return {}

    def op_breach(self, request, connection):
        message = str(request["message"])
        with self._while_all_end(message):
            self._shell.breach(message)
        return {}


def keys(text):
    """What is typed for `text`, as bytes: `C-c` and its like are control keys, else a line end is added."""
    control = CONTROL_KEY.fullmatch(text)
    if control:
        return bytes([ord(control.group(1).upper()) & 0x1F])
    if text and not text.endswith("\n"):
        text += "\n"
    return _encode("text", text)


def _encode(what, text):
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise RequestError("%s: %s" % (what, error))


def _seconds(request, name, default=Ellipsis):
    value = request.get(name)
    if value is None:
        if default is Ellipsis:
            raise RequestError("%s is missing in the request" % name)
        return default
    value = float(value)
    if not 0 <= value < 1e9:  # false for NaN too
        raise RequestError("%s is %r; it must be a number of seconds from 0" % (name, value))
    return value


def _carry_out(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        raise of_system("the shell cannot work", error)
