"""Further gateways of a stack, with settings of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.helpers.stack import GUNICORN, Process, Stack, compat_bind, healthy, wait_until


@contextmanager
def started_gateway(
    stack: Stack,
    name: str,
    port: int,
    env: dict[str, str],
    graceful_s: int = 1,
    options: Sequence[str] = ("--threads", "16"),
) -> Iterator[Process]:
    """A gateway of the same service under gunicorn; its address is the attribute `url`."""
    argv = [*GUNICORN, *options]
    argv += [
        "--graceful-timeout",
        str(graceful_s),
        "--bind",
        f"127.0.0.1:{port}",
        *compat_bind(env),
        "services.gateway.app:create_app()",
    ]
    process = Process(name, argv, stack.directory, {**stack.env, **env})
    process.url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: healthy(process.url), 120, "the gateway", process)
        yield process
    finally:
        process.stop()
