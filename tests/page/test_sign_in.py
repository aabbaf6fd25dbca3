"""A key is given once; what the browser keeps of it is worth nothing to another page."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import expect

from tests.helpers.browser import sign_in
from tests.helpers.keys import KEY
from tests.helpers.llm_servers import free_port

PROOF = "X-Rollout-Session"


@pytest.fixture
def session(world) -> Iterator[tuple[httpx.Client, dict]]:
    """A client with the cookie of a session, and what the gateway answered to the key."""
    with httpx.Client(base_url=world.url, timeout=60) as client:
        answer = client.post("/v1/session", json={"key": KEY})
        answer.raise_for_status()
        yield client, answer.json()


def test_who_has_not_signed_in_is_asked_for_a_key_and_comes_back_to_where_they_wanted_to(contexts, world):
    context, _ = contexts(key=None)
    page = context.new_page()
    page.goto(f"{world.url}/#/rollouts/mend-calc.0")
    field = page.get_by_label("key", exact=False).first
    expect(field).to_be_visible()
    field.fill(KEY)
    field.press("Enter")
    expect(page.get_by_text("mend calc.py, in which twice(2) is 5.").first).to_be_visible()
    assert "mend-calc.0" in page.url


def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites(contexts, world):
    context, _ = contexts(key=None)
    page = context.new_page()
    sign_in(page, world.url, KEY)
    (cookie,) = context.cookies()
    assert cookie["name"] == f"rollout_session_{world.stack.port}"
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["path"] == "/"
    assert KEY not in cookie["value"]
    kept = page.evaluate("JSON.stringify(localStorage) + document.cookie + JSON.stringify(sessionStorage)")
    assert KEY not in kept and KEY.rpartition("_")[2] not in kept


def test_a_wrong_key_is_told_and_opens_nothing(contexts, world):
    context, witness = contexts(key=None)
    witness.accept("401")
    page = context.new_page()
    page.goto(f"{world.url}/#/login")
    page.get_by_label("key", exact=False).first.fill("rlt_000000000000_" + "0" * 64)
    page.get_by_label("key", exact=False).first.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not know")
    assert context.cookies() == []


def test_who_signs_out_is_asked_again_and_the_old_cookie_is_worth_nothing(contexts, world):
    context, witness = contexts(key=None)
    witness.accept("401")
    page = context.new_page()
    sign_in(page, world.url, KEY)
    (cookie,) = context.cookies()
    proof = page.evaluate("localStorage.getItem('rollout.proof')")
    old = {"Cookie": f"{cookie['name']}={cookie['value']}", PROOF: proof}
    assert httpx.get(f"{world.url}/v1/status", headers=old).status_code == 200
    # The view does not wait for the answer, with which the cookie goes.
    with page.expect_response(lambda response: response.request.method == "DELETE"):
        page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("key", exact=False).first).to_be_visible()
    assert context.cookies() == []
    assert httpx.get(f"{world.url}/v1/status", headers=old).status_code == 401


def test_a_session_needs_the_cookie_and_the_proof(session):
    client, answer = session
    assert answer["tenant"] == "default" and "admin" in answer["scopes"] and answer["expires_at"]
    assert client.get("/v1/status").status_code == 401
    assert client.get("/v1/status", headers={PROOF: "0" * len(answer["proof"])}).status_code == 401
    good = client.get("/v1/status", headers={PROOF: answer["proof"]})
    assert good.status_code == 200
    client.cookies.clear()
    assert client.get("/v1/status", headers={PROOF: answer["proof"]}).status_code == 401


def test_a_key_by_header_works_as_ever_beside_a_cookie(session):
    client, _ = session
    assert client.get("/v1/status", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_key_in_an_address_is_not_a_key(world):
    assert httpx.get(f"{world.url}/v1/status", params={"key": KEY}).status_code == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_sites_page_may_not_call_in_the_name_of_a_session(session, site):
    client, answer = session
    headers = {"Sec-Fetch-Site": site, "Origin": "http://evil.example", PROOF: answer["proof"]}
    for call in (
        client.get("/v1/rollouts", headers=headers),
        client.get("/v1/live", params={"topics": "overview"}, headers=headers),
        client.post("/v1/rollouts/cancel", json={"tag": "x"}, headers=headers),
        client.post("/v1/session", json={"key": KEY}, headers=headers),
        client.delete("/v1/session", headers=headers),
    ):
        assert call.status_code == 403, call.request.url


@pytest.fixture
def neighbour() -> Iterator[str]:
    """A page that somebody else serves on another port of the same host."""
    port = free_port()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<!doctype html><title>neighbour</title>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{port}"
        server.shutdown()


ASK = """async (url) => {
  const ways = [{}, {credentials: "include"}, {credentials: "include", mode: "no-cors"},
    {method: "POST", credentials: "include", mode: "no-cors", body: '{"tag": "page"}'}];
  const out = [];
  for (const way of ways) {
    try { const a = await fetch(url, way); out.push(a.type + a.status + await a.text()); }
    catch (error) { out.push("refused"); }
  }
  return out;
}"""


def test_a_page_on_another_port_of_the_same_host_reads_nothing_with_the_cookie(browser, world, neighbour):
    context = browser.new_context()
    page = context.new_page()
    sign_in(page, world.url, KEY)
    page.goto(neighbour)
    for path in (
        "/v1/rollouts",
        "/v1/session",
        "/v1/rollouts/mend-calc.0/page",
        "/v1/rollouts/cancel",
    ):
        answers = page.evaluate(ASK, f"{world.url}{path}")
        assert set(answers) <= {"refused", "opaque0"}, answers
    frame = page.evaluate(
        """(url) => new Promise((done) => {
          const frame = document.createElement("iframe");
          frame.src = url; frame.onload = frame.onerror = () => {
            let inside = "closed";
            try { inside = frame.contentDocument.body.textContent; } catch { /* another origin */ }
            done(inside);
          };
          document.body.append(frame);
        })""",
        world.url,
    )
    assert frame == "closed"
    context.close()
