"""What seams share: where the pack has a program, and how a long instruction gets to it."""

from __future__ import annotations

from collections.abc import Sequence

from workers.harnesses.base import PACK

NODE = f"{PACK}/node/bin/node"
PYTHON = f"{PACK}/python/bin/start"
"""`PYTHON SITE NAME ARGUMENTS…` runs a module, or the file of a path; nothing of the environment or of the
working directory is imported."""


def npm_program(harness: str, name: str) -> str:
    """The command `name` that a package of npm has brought."""
    return f"{PACK}/{harness}/node_modules/.bin/{name}"


def site(harness: str) -> str:
    """Where the packages of PyPI of a program lie."""
    return f"{PACK}/{harness}/site"


def fed(argv: Sequence[str], path: str) -> tuple[str, ...]:
    """A command line whose standard input is the file at `path`: an argument has room for 128 KiB alone."""
    return ("sh", "-c", 'exec "$@" <"$0"', path, *argv)


def instruction_file(home: str) -> str:
    """Where a program's instruction lies that it reads from a file or from standard input."""
    return f"{home}/instruction.txt"
