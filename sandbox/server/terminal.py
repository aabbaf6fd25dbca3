"""The persistent shell as operations: `bash`, `input`, `interrupt`."""

from errors import RequestError, ServerError
from shell import DEFAULT_MAX_CHARS


class Terminal:
    """Requests about one :class:`shell.Shell`."""

    def __init__(self, shell):
        self._shell = shell

    def operations(self):
        """Name of each operation → function(request, connection)."""
        return {"bash": self._bash, "input": self._input, "interrupt": self._interrupt}

    def _bash(self, request, connection):
        command = str(request["command"])
        if "\0" in command:
            raise RequestError("the command contains a NUL character, which no shell can take")
        limit = int(request.get("max_chars") or DEFAULT_MAX_CHARS)
        try:
            return self._shell.run(command, float(request["timeout"]), limit, connection.fileno())
        except OSError as error:
            raise ServerError("the shell cannot work: %s" % error)  # a full disk, no processes left

    def _input(self, request, connection):
        if not self._shell.send_input(str(request["text"])):
            raise RequestError("no command is running that could take input; send it as a command")
        return {"sent": True}

    def _interrupt(self, request, connection):
        return {"was_running": self._shell.interrupt()}
