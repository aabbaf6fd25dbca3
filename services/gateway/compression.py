"""Large answers go out compressed to those who accept it: trajectories are most of what a trainer reads."""

from __future__ import annotations

import gzip

from flask import Flask, Response, request

LEAST_BYTES = 32 << 10
"""Below it the time saved on the wire is less than that of compressing."""
LEVEL = 1
"""The gateway has one processor for everybody; higher levels take more of it for a few percent."""


def compress_answers(app: Flask) -> None:
    """Compress what is large, unless the reader prefers it as it is."""

    @app.after_request
    def _compress(response: Response) -> Response:
        if response.is_streamed or response.direct_passthrough or "Content-Encoding" in response.headers:
            return response
        if (response.content_length or 0) < LEAST_BYTES:
            return response
        response.vary.add("Accept-Encoding")
        accepted = request.accept_encodings
        wish = accepted.quality("gzip")
        if wish > 0 and wish >= accepted.quality("identity"):
            response.set_data(gzip.compress(response.get_data(), LEVEL, mtime=0))
            response.headers["Content-Encoding"] = "gzip"
        return response
