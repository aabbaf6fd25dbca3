"""The page's own files: `GET /` for browsers, and `GET /page/<path>`. Open: they say nothing of the service.

They are what lies below `static/`, as it is: nothing is built, and nothing is asked of another host.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
from functools import lru_cache
from pathlib import Path

from flask import Blueprint, Response, current_app, request
from werkzeug.security import safe_join

from services.gateway.door import is_loopback
from services.gateway.http import JSON, STRING, operation
from services.gateway.problems import ApiProblem

blueprint = Blueprint("page", __name__)

STATIC = Path(__file__).with_name("static")
MOST_NAME = 100
"""Characters; the file system complains of names that it finds too long."""
INDEX = "index.html"
HTML = "text/html"
SCRIPT = "text/javascript"
"""What machines do not agree on; they do on other types."""
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
FOREVER = "max-age=31536000, immutable"
RELEASE = re.compile(r"(v-[0-9a-f]{16})/")
"""How an address begins that means a file as it is in one release."""


@lru_cache(maxsize=256)
def _read(path: Path, changed_ns: int, release: str) -> tuple[bytes, bytes, str]:
    """A file as it was at that time of change: its bytes, the same by gzip, and their tag."""
    body = path.read_bytes()
    if path.name == INDEX:
        body = body.replace(b'"page/', f'"page/{release}/'.encode())
    return body, gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:32]


def _release() -> str:
    """A name of all files as they are, which another release does not have."""
    files = sorted(path for path in STATIC.rglob("*.[cj]s*"))
    tags = [(str(path.relative_to(STATIC)), _read(path, path.stat().st_mtime_ns, "")[2]) for path in files]
    return f"v-{hashlib.sha256(repr(tags).encode()).hexdigest()[:16]}"


def wanted() -> bool:
    """Whether the page is here, and who calls `/` would rather have it than JSON."""
    here = "page.asset" in current_app.view_functions  # not at the port that needs no key
    return here and request.accept_mimetypes.best_match([JSON, HTML]) == HTML


def send(name: str) -> Response:
    """A file as the answer to the request under way, or a 304 to who has it.

    Raises:
        ApiProblem: 404; there is no such file.
    """
    named = RELEASE.match(name)
    path = Path(safe_join(str(STATIC), name[named.end() :] if named else name) or "")
    if len(name) > MOST_NAME or not path.is_file():
        raise ApiProblem(404, "No such file", "the page has no file of that name; it begins at /")
    release = _release() if named or path.name == INDEX else ""
    body, packed, etag = _read(path, path.stat().st_mtime_ns, release if path.name == INDEX else "")
    kind = SCRIPT if path.suffix == ".js" else mimetypes.guess_type(path)[0] or "text/plain"
    response = Response(body, headers=HEADERS, mimetype=kind)
    if request.accept_encodings.quality("gzip") > 0:
        response.set_data(packed)
        response.headers["Content-Encoding"], etag = "gzip", f"{etag}-gzip"
    if named and named[1] == release:
        response.headers["Cache-Control"] = FOREVER
    if not _trustworthy():
        del response.headers["Cross-Origin-Opener-Policy"]
    response.set_etag(etag)
    response.vary.add("Accept-Encoding")
    return response.make_conditional(request)


def _trustworthy() -> bool:
    """Whether browsers heed headers for secure contexts; elsewhere they complain of them in the console."""
    host = request.host.rpartition(":")[0] or request.host
    secure = request.is_secure or request.headers.get("X-Forwarded-Proto") == "https"
    return secure or is_loopback(host.strip("[]"))


@blueprint.get("/page/<path:name>")
@operation(answers={200: STRING}, media=HTML, scope=None)
def asset(name: str) -> Response:
    """A file of the web page."""
    return send(name)
