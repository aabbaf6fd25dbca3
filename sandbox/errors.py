"""What can go wrong with a sandbox, layered by who is to blame."""

from __future__ import annotations


class SandboxError(Exception):
    """Base of all that this package raises on purpose; the infrastructure's fault where none else is said."""


class SandboxRequestError(SandboxError):
    """The caller asked for something impossible (bad path, unknown operation, no running command)."""


class NotAllowed(SandboxRequestError):
    """The deployment does not allow it, whoever asks: an image, a runtime, a place to bind."""


class RuntimeUnavailable(SandboxError):
    """No container runtime works on this machine, or the one asked for by name does not."""


class ImageError(SandboxError):
    """The image is absent, damaged or cannot be unpacked."""


class SandboxStartError(SandboxError):
    """The runtime started but the sandbox never became ready; the message ends with the runtime's stderr."""


class NodeShort(SandboxError):
    """The node has too little disk or memory left for another sandbox; later, or elsewhere, there may be."""


class SnapshotError(SandboxError):
    """A snapshot could not be taken, or is not there, or cannot be begun with."""


class SandboxGone(SandboxError):
    """The sandbox (or the host daemon) is not there any more: its socket is dead."""


class SandboxTimeout(SandboxError):
    """The sandbox's server did not answer in time. A command that overruns its limit does *not* raise it."""


class SandboxSpoiled(SandboxError):
    """What ran in the sandbox keeps its server from its work, by closing or replacing its files."""


class SandboxTaken(SandboxError):
    """Another worker has taken the sandbox over; whoever is told so has to leave it alone."""


class SandboxAhead(SandboxError):
    """The sandbox has gone on beyond what its record says, so nobody can go on in it."""


_BY_NAME = {cls.__name__: cls for cls in (SandboxError, NotAllowed, *SandboxError.__subclasses__())}
"""Those of this module, which travel as themselves."""


def to_wire(error: Exception) -> dict[str, str]:
    """The error as it travels in a reply frame."""
    if not isinstance(error, SandboxError):
        return {"type": "SandboxError", "message": f"{type(error).__name__}: {error}"}
    known = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME)
    return {"type": known, "message": str(error)}


def from_wire(error: dict[str, str]) -> SandboxError:
    """The exception a reply frame carries; an unknown type becomes a plain :class:`SandboxError`."""
    return _BY_NAME.get(error.get("type", ""), SandboxError)(error.get("message", "no message"))
