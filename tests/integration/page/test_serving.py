"""The page's own files: who gets the page at `/`, and what goes with each file."""

from __future__ import annotations

import gzip
import re
import socket

import pytest

from services.gateway.page import serving

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
EVIL = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.mark.parametrize(
    ("accept", "page"),
    [(BROWSER, True), ("text/html", True), ("*/*", False), (None, False), ("application/json", False)],
)
def test_a_browser_gets_the_page_at_the_root_and_everybody_else_json_as_before(world, accept, page):
    answer = world.get("/", headers={"Accept": accept} if accept else {})
    assert answer.status_code == 200 and "Accept" in answer.vary
    if page:
        assert answer.content_type == "text/html; charset=utf-8" and b"<script" in answer.data
    else:
        assert answer.json["service"] == "rollout"


def test_each_file_goes_out_with_headers_that_keep_the_page_to_itself(world):
    for path in ("/page/index.html", "/"):
        answer = world.get(path, headers={"Accept": BROWSER})
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Set-Cookie" not in answer.headers and "Access-Control-Allow-Origin" not in answer.headers


def test_a_file_comes_packed_to_who_takes_it_and_not_twice_to_who_has_it(world):
    packed = world.get("/page/index.html", headers={"Accept-Encoding": "gzip"})
    plain = world.get("/page/index.html")
    assert packed.headers["Content-Encoding"] == "gzip" and gzip.decompress(packed.data) == plain.data
    assert packed.headers["ETag"] != plain.headers["ETag"] and "Accept-Encoding" in packed.vary
    for first, accept in ((packed, "gzip"), (plain, "identity")):
        headers = {"Accept-Encoding": accept, "If-None-Match": first.headers["ETag"]}
        again = world.get("/page/index.html", headers=headers)
        assert again.status_code == 304 and again.data == b""
        assert again.headers["Content-Security-Policy"] == serving.POLICY
    assert world.call("HEAD", "/page/index.html").status_code == 200


def test_a_changed_file_is_sent_anew(world, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "STATIC", tmp_path)
    (tmp_path / "views").mkdir()
    path = tmp_path / "views" / "a.js"
    path.write_text("export const a = 1;\n")
    first = world.get("/page/views/a.js")
    assert first.content_type == "text/javascript; charset=utf-8"
    path.write_text("export const a = 22;\n")
    answer = world.get("/page/views/a.js", headers={"If-None-Match": first.headers["ETag"]})
    assert answer.status_code == 200 and answer.data == b"export const a = 22;\n"


def test_the_page_names_files_that_never_change_and_others_once_one_of_them_has(world, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "STATIC", tmp_path)
    (tmp_path / "index.html").write_text('<script type="module" src="page/app.js"></script>')
    (tmp_path / "app.js").write_text('import "./other.js";')
    (tmp_path / "other.js").write_text("1")

    def named() -> str:
        page = world.get("/", headers={"Accept": BROWSER})
        assert page.headers["Cache-Control"] == "no-cache"
        return re.search(r'src="(page/v-[0-9a-f]{16}/)app\.js"', page.text)[1]

    first = named()
    assert first == named()
    for name in ("app.js", "other.js"):
        answer = world.get(f"/{first}{name}")
        assert "immutable" in answer.headers["Cache-Control"] and answer.text == (tmp_path / name).read_text()
        assert world.get(f"/page/{name}").headers["Cache-Control"] == "no-cache"
    (tmp_path / "other.js").write_text("22")
    # A page that was loaded before goes on, and keeps nothing under a name that is another release's.
    assert world.get(f"/{first}app.js").headers["Cache-Control"] == "no-cache"
    assert named() != first
    assert "immutable" in world.get(f"/{named()}other.js").headers["Cache-Control"]
    assert world.get(f"/{first}../serving.py").status_code == 404
    assert world.get(f"/{first}{first}app.js").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        *("x.js", "../serving.py", "..%2fserving.py", "%2e%2e/serving.py", "....//serving.py"),
        *("static", "vendor", "", ".hidden.js", "index.html%00.js"),
        *("vendor/../../serving.py", "INDEX.HTML", "index.html%0A", "//etc/passwd"),
    ],
)
def test_what_is_no_file_of_the_page_is_not_there(world, path):
    answer = world.get(f"/page/{path}")
    assert answer.status_code in (404, 308) and b"import" not in answer.data and b"<script" not in answer.data


def test_the_files_say_nothing_and_are_open_while_the_api_stays_closed(world):
    world.key("a")
    assert world.get("/page/index.html", headers=EVIL).status_code == 200, "as /health: it tells nothing"
    assert world.get("/page/index.html", headers={"Host": "evil.example"}).status_code == 421
    assert world.call("POST", "/page/index.html").status_code == 405


def test_the_port_that_needs_no_key_has_no_page(world):
    world.app = world.start(compat_port=8006, compat_tenant="trainer")
    at = {"base_url": "http://127.0.0.1:8006", "headers": {"Accept": BROWSER}}
    assert world.get("/", **at).json["service"] == "rollout"
    assert world.get("/page/index.html", **at).status_code == 404


@pytest.mark.parametrize("name", ["a" * 300, "%00", "..%2f..%2fauth.py", "vendor", "index.html/x"])
def test_a_name_that_is_no_file_is_not_there(world, name):
    assert world.get(f"/page/{name}").status_code == 404


@pytest.mark.parametrize(
    ("url", "heeded"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        (f"https://{socket.gethostname()}", True),
        (f"http://{socket.gethostname()}:8000", False),
        ("http://10.1.2.3", False),
    ],
)
def test_a_header_that_browsers_complain_of_without_tls_is_left_out_there(world, url, heeded):
    answer = world.app.test_client().get("/page/index.html", base_url=url)
    assert answer.status_code == 200
    assert ("Cross-Origin-Opener-Policy" in answer.headers) is heeded
