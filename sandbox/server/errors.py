"""What an operation may raise; everything else is a fault of ours."""


class RequestError(Exception):
    """The caller's request cannot be carried out; the message says why, to the caller or the model."""


class ServerError(Exception):
    """The sandbox itself cannot do what it is for (bash does not start, the disk is full)."""

    kind = "SandboxError"
    """Its name in `sandbox/errors.py`, under which it travels."""


class Taken(ServerError):
    """Another worker drives the sandbox now."""

    kind = "SandboxTaken"


class Ahead(ServerError):
    """A numbered request that does not follow from what was done here."""

    kind = "SandboxAhead"
