"""Everything works for a plain user, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import ptyprocess
import pytest

from tests.sandbox.conftest import why_not

NOBODY = 65534
REPOSITORY = Path(__file__).resolve().parents[2]

SCRIPT = """
import asyncio, os
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec

async def main():
    host = HostClient()
    for runtime in ("apptainer", "bubblewrap", "local-unsafe"):
        info = await host.start(SandboxSpec(runtime=runtime))
        async with SandboxClient(info.socket) as client:
            result = await client.bash("id -u; cd /; pwd")
            assert result.output == f"{os.getuid()}\\n/\\n", result
            assert (await client.bash("sleep 9", timeout=0.2)).timed_out
        assert await host.release(info.id)
    await host.stop()
    print("all well")

asyncio.run(main())
"""


@pytest.mark.apptainer
@pytest.mark.may_skip
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a plain user already")
def test_a_plain_user_starts_uses_and_ends_sandboxes():
    if reason := why_not("bubblewrap"):
        pytest.skip(reason)
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("no /usr/bin/python3 that another user could run")
    home = Path(tempfile.mkdtemp(prefix="sbxn-", dir="/tmp"))
    os.chown(home, NOBODY, NOBODY)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        # ptyprocess of this environment beside the sources: the other user's Python has none.
        "PYTHONPATH": f"{REPOSITORY}:{Path(ptyprocess.__file__).parent.parent}",
        "ROLLOUT_SANDBOX_DIR": str(home / "s"),
        "ROLLOUT_IMAGE_CACHE": str(home / "cache"),
    }
    if "ROLLOUT_HOME" in os.environ:
        environment["ROLLOUT_HOME"] = os.environ["ROLLOUT_HOME"]
    try:
        done = subprocess.run(
            [python, "-c", SCRIPT],
            env=environment,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=90,
        )
        log = home / "s" / "host.log"
        assert done.stdout == "all well\n", done.stderr + (log.read_text() if log.exists() else "")
    finally:
        shutil.rmtree(home, ignore_errors=True)
