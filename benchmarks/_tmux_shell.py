"""Commands through tmux: typed with `send-keys`, read back from the screen with `capture-pane`.

`PolledTmux` works the way OpenHands' BashSession of November 2025 does, written anew from its behaviour: a
prompt that carries the exit code and other facts marks the end of a command, the screen is looked at once and
then every 0.5 s, and after each command it is cleared, with a fixed pause of 0.1 s. OpenHands' own code was
measured (50 repetitions, 623 ms an action): its first look always came before the prompt. So here that look
is made in the same call of tmux as the typing. In a call of its own it is a race with the prompt that either
may win, and an action then takes 0.12 s or 0.62 s. `AwaitedTmux` has neither poll nor pause: the prompt
itself reports to `tmux wait-for`. That is the best one can do with tmux.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.5
CLEAR_S = 0.1
LIMIT_S = 60.0
WIDTH = HEIGHT = 1000  # long lines and long outputs must not be wrapped or scrolled away
HISTORY_LINES = 10_000
LOOK = ("capture-pane", "-t", "s:", "-J", "-p", "-S", "-")
KEYS = ("send-keys", "-t", "s:")

BEGIN, END = "<<<prompt", "prompt>>>"
PROMPT = re.compile(rf"{BEGIN}\s+(-?\d+).*?{END}", re.DOTALL)
# One fact a line, as OpenHands' prompt has them, each found anew for each prompt.
FACTS = ("$?", "$!", r"\u", r"\h", "$(pwd)", "$(which python 2>/dev/null || echo)")
PS1 = "\n" + "\n".join((BEGIN, *FACTS, END)) + "\n"


class TmuxError(RuntimeError):
    """tmux is missing, or a command did not come to its end."""


class PolledTmux:
    """One bash in a private tmux server."""

    def __init__(self, directory: Path, env: dict[str, str]):
        """`directory`: for the socket; short, and used by no other tmux. `env`: all that bash gets."""
        self._socket = directory / "tmux"
        self._env = env
        self.first_looks = 0
        """How often the output was complete at the first look, before any pause."""

    def start(self) -> None:
        """Start tmux and bash. Raises TmuxError when there is no tmux."""
        shell = "bash --noprofile --norc"
        size = ("-x", str(WIDTH), "-y", str(HEIGHT))
        try:
            self._tmux("-f", "/dev/null", "new-session", "-d", "-s", "s", *size, shell, env=self._env)
        except FileNotFoundError as error:
            raise TmuxError("tmux is not installed; run make setup-bench") from error
        self._tmux("set-option", "-g", "history-limit", str(HISTORY_LINES))
        # The limit counts for windows made after it was set.
        self._tmux("new-window", "-t", "s:", shell)
        self._tmux("kill-window", "-t", "s:0")
        self._set_prompt()

    def _set_prompt(self) -> None:
        self._type(f"PS2= PS1='{PS1}'")
        # The typed line itself shows the words of the prompt, but not a prompt with its exit code.
        self._poll(lambda screen: PROMPT.search(screen) is not None, 0.05)
        self._clear()

    def run(self, command: str) -> str:
        """Output of the command."""
        screen = self._type(command, *LOOK)
        if _is_over(screen):
            self.first_looks += 1
        else:
            screen = self._poll(_is_over, POLL_S)
        self._clear()
        return _between_prompts(screen)

    def close(self) -> None:
        """End tmux and all that runs in it."""
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True)

    def _poll(self, is_over: Callable[[str], bool], pause_s: float) -> str:
        """The first screen of which that is true, looked for after each pause."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            time.sleep(pause_s)
            screen = self._tmux(*LOOK)
            if is_over(screen):
                return screen
            if time.monotonic() > deadline:
                raise TmuxError(f"no prompt after {LIMIT_S:g} s; the screen ends with {screen[-300:]!r}")

    def _clear(self) -> None:
        self._tmux(*KEYS, "C-l")
        time.sleep(CLEAR_S)
        self._tmux("clear-history", "-t", "s:")

    def _type(self, line: str, *then: str) -> str:
        """Type a line; what the tmux command `then`, carried out after that, prints."""
        return self._tmux(*KEYS, "-l", line, ";", *KEYS, "Enter", *((";", *then) if then else ()))

    def _tmux(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        argv = ["tmux", "-S", str(self._socket), *arguments]
        done = subprocess.run(argv, capture_output=True, encoding="utf-8", env=env, timeout=LIMIT_S)
        if done.returncode != 0:
            raise TmuxError(f"tmux {arguments[0]} failed: {done.stderr.strip()}")
        return done.stdout


class AwaitedTmux(PolledTmux):
    """The same, but bash says when a command is over, and nothing sleeps."""

    def _set_prompt(self) -> None:
        self._type(f"PROMPT_COMMAND='tmux -S {self._socket} wait-for -S over' PS2= PS1='{PS1}'")
        self._await_prompt()

    def run(self, command: str) -> str:
        """Output of the command."""
        self._type(command, "wait-for", "over")
        return PROMPT.split(self._await_prompt())[0].partition("\n")[2].strip("\n")

    def _await_prompt(self) -> str:
        """The screen up to the prompt, which is gone from it then. It is printed just after the signal."""
        screen = self._poll(lambda screen: PROMPT.search(screen) is not None, 0)
        # Not Ctrl-L, which bash would carry out some time later; this is done when it returns.
        self._tmux(*KEYS, "-R", ";", "clear-history", "-t", "s:")
        return screen


def _is_over(screen: str) -> bool:
    """Whether there is a prompt after that of the beginning."""
    return len(PROMPT.findall(screen)) > 1


def _between_prompts(screen: str) -> str:
    """What lies between the first prompt and the last, without the typed line."""
    prompts = list(PROMPT.finditer(screen))
    return screen[prompts[0].end() : prompts[-1].start()].strip("\n").partition("\n")[2].strip("\n")
