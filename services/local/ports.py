"""Loopback ports."""

from __future__ import annotations

import socket


def is_free(host: str, port: int) -> bool:
    """Whether one can listen there. REUSEADDR, as servers do: a port in TIME_WAIT is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def pick(preferred: int, taken: set[int], host: str = "127.0.0.1") -> int:
    """`preferred` if it is free, not 0 and not in `taken`; else any free one. Adds it to `taken`."""
    if preferred and preferred not in taken and is_free(host, preferred):
        port = preferred
    else:
        while True:
            with socket.socket() as probe:
                probe.bind((host, 0))
                port = probe.getsockname()[1]
            if port not in taken:
                break
    taken.add(port)
    return port
