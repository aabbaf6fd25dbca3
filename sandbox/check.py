"""Does a sandbox work on this node? `python -m sandbox.check` starts one, runs a command and ends it.

Prints one line (runtime, image, what is isolated and limited and what is not); exits 1 with the reason when
none works.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from sandbox.client import SandboxClient
from sandbox.errors import SandboxError
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec

PROOF = "sandbox works"
ISOLATED = ("files", "processes", "network")


async def check(image: str, runtime: str) -> str:
    """Start, use and end a sandbox; the line to show.

    Raises:
        SandboxError: None works here, or it does not run commands; the message names the remedy.
    """
    host = HostClient()
    spec = SandboxSpec(image=image, runtime=runtime, owner="check", max_lifetime_s=60.0)
    info = await host.start(spec)
    try:
        async with SandboxClient(info.socket) as sandbox:
            result = await sandbox.bash(f"echo {PROOF}")
        if result.output.strip() != PROOF:
            raise SandboxError(f"the sandbox under {info.runtime} answered {result.output!r} to an echo")
    finally:
        await host.release(info.id)
    return f"{info.runtime}, image {image}; {told(info.isolation_missing)}"


def told(missing: list[str]) -> str:
    """What is isolated and limited, and what is not: `SandboxInfo.isolation_missing`."""
    if set(ISOLATED) <= set(missing):
        return f"NOTHING IS ISOLATED: {', '.join(missing)}"
    isolated = ", ".join(name for name in ISOLATED if not any(text.startswith(name) for text in missing))
    lacks = f"; without {', '.join(missing)}" if missing else ""
    return f"isolated: {isolated}; limited: memory, processes, disk{lacks}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default="base")
    parser.add_argument("--runtime", default="auto")
    options = parser.parse_args()
    try:
        print(asyncio.run(check(options.image, options.runtime)))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
