"""What an operation may raise; everything else is a fault of ours."""


class RequestError(Exception):
    """The caller's request cannot be carried out; the message says why, to the caller or the model."""


class ServerError(Exception):
    """The sandbox itself cannot do what it is for (bash does not start, the disk is full)."""
