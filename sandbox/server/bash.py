"""One bash process on a pseudo terminal: how it is started and waited for.

The server starts the first one before anything else, so this makes do with what is imported quickly.
"""

import os
import termios

import ptyprocess

import framing
from confine import confiner
from repair import write_private

WINDOW = (50, 200)  # rows, columns


class Bash:
    """An interactive bash; what it does is seen on `fd`, its terminal."""

    def __init__(self, program, directory, env, cwd, limits=None):
        """`program`: its command line. `directory`: private, for the rc file. `limits`: see `confine.py`.

        Raises OSError when it cannot be started.
        """
        self.nonce = os.urandom(8).hex()
        """In every marker that it prints."""
        self.rc_file = os.path.join(directory, "rc")
        write_private(self.rc_file, framing.rc_file(self.nonce))
        argv = [*program, "--noediting", "--noprofile", "--rcfile", self.rc_file, "-i"]
        confine = confiner(limits or {})

        def prepare():
            set_terminal(0)  # before bash remembers how the terminal is, for after a program was killed
            confine()

        try:
            self._process = ptyprocess.PtyProcess.spawn(
                argv, cwd=cwd, env=env, dimensions=WINDOW, preexec_fn=prepare
            )
        except Exception as error:  # ptyprocess raises whatever exec said, in several types
            raise OSError(str(error)) from error
        self._process.delayafterclose = self._process.delayafterterminate = 0  # else closing sleeps
        self.pid, self.fd = self._process.pid, self._process.fd
        os.set_blocking(self.fd, False)

    def is_alive(self):
        """Whether the process runs; also reaps it."""
        try:
            return self._process.isalive()
        except ptyprocess.PtyProcessError:
            return False  # it was reaped by somebody else

    def close(self):
        """Close the terminal; background jobs get a hang-up."""
        self._process.fileobj.close()

    @property
    def exit_code(self):
        """As a shell tells it: 128 and the number of the signal that ended it; None where it is not known."""
        if self._process.signalstatus is not None:
            return 128 + self._process.signalstatus
        return self._process.exitstatus


def set_terminal(fd):
    """No echo, no output translation, signals and line input on: whatever the last command left behind."""
    attributes = termios.tcgetattr(fd)
    attributes[0] = termios.ICRNL
    attributes[1] = 0
    attributes[3] = (attributes[3] | termios.ISIG | termios.ICANON) & ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(fd, termios.TCSANOW, attributes)
