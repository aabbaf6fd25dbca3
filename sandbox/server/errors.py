"""What an operation may raise; everything else is a fault of ours."""

from errno import EACCES, EEXIST, EISDIR, ELOOP, ENOENT, ENOTDIR, ENOTEMPTY, ENXIO, EPERM, ETXTBSY

CHANGED = (EACCES, EEXIST, EISDIR, ELOOP, ENOENT, ENOTDIR, ENOTEMPTY, ENXIO, EPERM, ETXTBSY)
"""Of the system's errors those that files bring about which were closed, removed or replaced.

A disk that is full, fails or is away, or no processes left are the machine's.
"""


class RequestError(Exception):
    """The caller's request cannot be carried out; the message says why, to the caller or the model."""


class ServerError(Exception):
    """The sandbox itself cannot do what it is for (bash does not start, the disk is full)."""

    kind = "SandboxError"
    """Its name in `sandbox/errors.py`, under which it travels."""


class Spoiled(ServerError):
    """What the server works with is closed, gone or another thing, or keeps a shell from starting.

    Once it had a shell that is the agent's doing.
    """

    kind = "SandboxSpoiled"


class Taken(ServerError):
    """Another worker drives the sandbox now."""

    kind = "SandboxTaken"


class Ahead(ServerError):
    """A numbered request that does not follow from what was done here."""

    kind = "SandboxAhead"


def of_system(what, error):
    """The error to raise for one of the system's: `what` cannot be done."""
    return (Spoiled if error.errno in CHANGED else ServerError)("%s: %s" % (what, error))
