"""How bash is started on a pseudo terminal.

The first one before anything else, so this makes do with what is imported quickly. `ptyprocess`, which the
session hands it to, is imported while bash starts: to have it fork took a tenth of a cold start.
"""

import fcntl
import os
import struct
import termios

import framing
from confine import confiner
from repair import write_private

WINDOW = (50, 200)  # rows, columns


class Bash:
    """An interactive bash; what it does is seen on `fd`, its terminal."""

    def __init__(self, program, directory, env, cwd, limits=None):
        """`program`: its command line. `directory`: private, for the rc file. `limits`: see `confine.py`.

        Raises OSError. A program that cannot be executed says so on the terminal, and ends.
        """
        self.nonce = os.urandom(8).hex()
        """In every marker that it prints."""
        self.rc_file = os.path.join(directory, "rc")
        write_private(self.rc_file, framing.rc_file(self.nonce))
        argv = [*program, "--noediting", "--noprofile", "--rcfile", self.rc_file, "-i"]
        confine = confiner(limits or {})
        self.pid, self.fd = os.forkpty()
        if self.pid == 0:
            _become(argv, env, cwd, confine)


def _become(argv, env, cwd, confine):
    """Be the program. Does not return."""
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *WINDOW, 0, 0))
        set_terminal(0)  # before bash remembers how the terminal is, for after a program was killed
        os.chdir(cwd)
        confine()
        os.execvpe(argv[0], argv, env)
    except Exception as error:
        os.write(2, ("cannot start %s: %s\n" % (argv[0], error)).encode("utf-8", "replace"))
    finally:
        os._exit(127)


def set_terminal(fd):
    """No echo, no output translation, signals and line input on: whatever the last command left behind."""
    now = termios.tcgetattr(fd)
    local = (now[3] | termios.ISIG | termios.ICANON) & ~(termios.ECHO | termios.ECHONL)
    wanted = [termios.ICRNL, 0, now[2], local, *now[4:]]
    if wanted != now:  # else it would only wake who reads there
        termios.tcsetattr(fd, termios.TCSANOW, wanted)


def find_program(name, path):
    """Where on `path` (None: the system's own) a program of that name is; None where it is not.

    `shutil` does that too, but imports every way to pack an archive.
    """
    for directory in (path or os.defpath).split(os.pathsep):
        place = os.path.join(directory, name)
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return place
    return None
