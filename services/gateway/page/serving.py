"""The page's own files: `GET /` for browsers, and `GET /page/<path>`. Open: they say nothing of the service.

They are what lies below `static/`, as it is: nothing is built, and nothing is asked of another host.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flask import Blueprint, Response, current_app, request

from services.gateway.http import JSON, STRING, operation
from services.gateway.problems import ApiProblem

blueprint = Blueprint("page", __name__)

STATIC = Path(__file__).with_name("static")
INDEX = "index.html"
HTML = "text/html"
TYPES = {
    ".css": "text/css",
    ".html": HTML,
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
"""Of files that are served; what else lies there is not."""
NAME = re.compile(r"(?:[\w-]+/)*[\w-][\w.-]*(\.\w+)", re.ASCII)
"""A path below `static/`; no part of it begins with a dot."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Kept, and asked for again each time: a page and its modules are of one release.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class File:
    """A file of the page."""

    body: bytes
    packed: bytes
    """By gzip."""
    etag: str


@lru_cache(maxsize=256)
def _read(path: Path, changed_ns: int) -> File:
    """A file as it was at that time of change."""
    body = path.read_bytes()
    return File(body, gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:32])


def file(name: str) -> File | None:
    """The file of that path below `static/`; None = there is none that is served."""
    parts = NAME.fullmatch(name)
    path = STATIC / name
    if parts is None or parts[1] not in TYPES or not path.is_file():
        return None
    return _read(path, path.stat().st_mtime_ns)


def wanted() -> bool:
    """Whether the page is here, and who calls `/` would rather have it than JSON."""
    here = "page.asset" in current_app.view_functions  # not at the port that needs no key
    return here and request.accept_mimetypes.best_match([JSON, HTML]) == HTML


def send(name: str) -> Response:
    """A file as the answer to the request under way, or a 304 to who has it.

    Raises:
        ApiProblem: 404; there is no such file.
    """
    found = file(name)
    if found is None:
        raise ApiProblem(404, "No such file", "the page has no file of that name; it begins at /")
    packs = request.accept_encodings.quality("gzip") > 0
    kind = f"{TYPES[Path(name).suffix]}; charset=utf-8"
    response = Response(found.packed if packs else found.body, headers=HEADERS, content_type=kind)
    if packs:
        response.headers["Content-Encoding"] = "gzip"
    response.set_etag(f"{found.etag}-gzip" if packs else found.etag)
    response.vary.add("Accept-Encoding")
    return response.make_conditional(request)


@blueprint.get("/page/<path:name>")
@operation(answers={200: STRING}, media=HTML, scope=None)
def asset(name: str) -> Response:
    """A file of the web page."""
    return send(name)
