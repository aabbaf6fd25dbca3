"""The HTTP server of tests' own handlers."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """One on a free port of this machine, which is silent about clients that go away before their answer.

    They are what is tested; a traceback on standard error would come into the output of another test.
    """

    daemon_threads = True

    def __init__(self, handler: type) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
