"""What seams share: where the pack has a program, and how an instruction of any length gets to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workers.harnesses.base import PACK, Job, Launch

KEY_VARIABLE = "ROLLOUT_MODEL_KEY"
"""Of the key, where a program's settings name one."""
COMPACTION_SHARE = 0.8
"""Of the context; past it a program shortens its history, where it can be told when."""
ANSWER_SHARE = 4
"""An answer may take one part in so many of the context."""
NODE = f"{PACK}/node/bin/node"
PYTHON = f"{PACK}/python/bin/start"
"""`PYTHON SITE NAME ARGUMENTS…` runs a module, or the file of a path, with the packages in SITE; nothing of
the environment or of the working directory is imported."""


def npm_program(harness: str, name: str) -> str:
    """The command `name` that a package of npm has brought."""
    return f"{PACK}/{harness}/node_modules/.bin/{name}"


def instruction_file(job: Job) -> str:
    """Where the instruction lies of a program that reads it from a file or from standard input."""
    return f"{job.home}/instruction.txt"


def fed(
    job: Job, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, str], transcripts: str
) -> Launch:
    """A program that reads its instruction from standard input: an argument has room for 128 KiB alone.

    `files`: by their paths below the home. `transcripts`: the directory of them below it.
    """
    path = instruction_file(job)
    # What begins with a slash would be a command of the program's own.
    text = f"\n{job.instruction}" if job.instruction.startswith("/") else job.instruction
    below = {f"{job.home}/{name}": text for name, text in files.items()}
    line = ("sh", "-c", 'exec "$@" <"$0"', path, *argv)
    return Launch(line, {**env, **job.env}, {path: text, **below}, (transcripts,))
