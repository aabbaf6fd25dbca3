"""A terminal for commands that look at whether they have one, and how wide it is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios

from tests.helpers.stack import ROOT, wait_until


class Terminal:
    """A command in a terminal (a pty) of a given size."""

    def __init__(self, command, rows=40, columns=120, env=None, cwd=ROOT):
        master, slave = pty.openpty()
        self.master = master
        self.resize(rows, columns)
        clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**clean, "TERM": "xterm-256color", **(env or {})},
            cwd=cwd,
            start_new_session=True,
            # The terminal's own: it is told of sizes and of Ctrl-C.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self):
        """Everything that was written so far."""
        while select.select([self.master], [], [], 0)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            self.raw += data.decode(errors="replace")
        return self.raw

    def text(self, since=0):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.read()[since:])

    def await_text(self, pattern, since=0):
        try:
            wait_until(lambda: re.search(pattern, self.text(since)), 60, f"{pattern!r} on the screen")
        except TimeoutError as error:
            raise AssertionError(f"{error}; the end of it:\n{self.text()[-3000:]}") from None

    def end(self, number=None):
        """Press Ctrl-C, or send a signal; its exit status."""
        if number is None:
            os.write(self.master, b"\x03")
        else:
            os.kill(self.process.pid, number)
        # A full pty would hold it up.
        wait_until(lambda: [self.read(), self.process.poll()][1] is not None, 120, "it to end")
        self.read()
        return self.process.returncode

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def shown(command, columns=80, **options):
    """What a command that ends by itself writes to a terminal, standard error too, and its exit status."""
    screen = Terminal(command, columns=columns, **options)
    try:
        wait_until(lambda: [screen.read(), screen.process.poll()][1] is not None, 120, "the command to end")
        return screen.text().replace("\r\n", "\n"), screen.process.returncode
    finally:
        screen.close()
