"""What an operation may raise; everything else is a fault of ours."""

from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC

SHORT = (EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC)
"""Of the system's errors those of a machine that has too little: a full disk, no processes left."""


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
    return (ServerError if error.errno in SHORT else Spoiled)("%s: %s" % (what, error))
