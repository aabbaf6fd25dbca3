"""A whole service for one training run, on this machine, ended with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.client import KEY_VARIABLE
from services.launch.local import Options, Stack


@contextmanager
def own_service(
    backend_url: str | None, sandbox_runtime: str | None, say: Callable[[str], None]
) -> Iterator[str]:
    """Start Redis, gateway, three fleets and an LLM backend on free ports; gives the gateway's address.

    Its key is the one in the environment until it ends: a key that is there already is another service's.

    Args:
        backend_url: An LLM server of yours with the model that is trained; None = the embedded one, with the
            demo model.

    Raises:
        StackError: A part did not start, or no sandbox works here.
    """
    directory = Path(tempfile.mkdtemp(prefix="rollout-train-"))  # short: sockets lie below it
    stack = Stack(directory, say)
    options = Options(
        directory,
        backend_url=backend_url,
        flower=False,
        private_ports=True,
        require_sandbox=True,
        sandbox_runtime=sandbox_runtime,
    )
    keep_logs = False
    try:
        record = stack.up(options)
        before = os.environ.get(KEY_VARIABLE)
        os.environ[KEY_VARIABLE] = stack.api_key
        try:
            yield record.url
        finally:
            if before is None:
                del os.environ[KEY_VARIABLE]
            else:
                os.environ[KEY_VARIABLE] = before
            stack.down()
    except Exception:
        keep_logs = True
        raise
    finally:  # after Ctrl-C too
        if keep_logs:
            say(f"the service's logs are kept in {directory / 'logs'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
