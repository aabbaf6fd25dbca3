"""Does a sandbox work on this node? `python -m sandbox.check` starts one, runs a command and ends it.

Prints one line (runtime, image, what is not isolated or limited); exits 1 with the reason when none works.
"""

from __future__ import annotations

import argparse
import sys

from sandbox.errors import SandboxError
from sandbox.host_client import SyncHostClient
from sandbox.spec import SandboxSpec
from sandbox.sync_client import SyncSandboxClient

PROOF = "sandbox works"


def check(image: str, runtime: str) -> str:
    """Start, use and end a sandbox; the line to show.

    Raises:
        SandboxError: None works here, or it does not run commands; the message names the remedy.
    """
    host = SyncHostClient()
    info = host.start(SandboxSpec(image=image, runtime=runtime, owner="check", max_lifetime_s=60.0))
    try:
        with SyncSandboxClient(info.socket) as sandbox:
            result = sandbox.bash(f"echo {PROOF}")
        if result.output.strip() != PROOF:
            raise SandboxError(f"the sandbox under {info.runtime} answered {result.output!r} to an echo")
    finally:
        host.release(info.id)
    lacking = f"; NOT isolated or limited here: {', '.join(info.isolation_missing)}"
    return f"{info.runtime}, image {image}{lacking if info.isolation_missing else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default="base")
    parser.add_argument("--runtime", default="auto")
    options = parser.parse_args()
    try:
        print(check(options.image, options.runtime))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
