"""Images from Dockerfiles, without Docker and without root rights.

`lines` and `words` read a Dockerfile, `plan` says what it asks for, `context` what it copies, `source` all of
that; `builder` has it done by `steps`, in processes of `inside`, a layer an instruction, each of them an
overlay's upper directory in the node's image cache. docs/images.md says what is supported.
"""

from typing import Any

from sandbox.images.dockerfile.source import dockerfile_of, image_name, load

__all__ = ["build", "dockerfile_of", "image_name", "load"]


def __getattr__(name: str) -> Any:
    """`build`, loaded when it is asked for: `inside` begins for each step, and needs nothing of it."""
    if name != "build":
        raise AttributeError(name)
    from sandbox.images.dockerfile.builder import build

    return build
