"""Files with the keys of LLM servers: which are read, what calls carry, and what a server lets in by them."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from services import logs
from services.engines.credentials import EngineKeyProblem, headers, refusal
from services.guard import engine_token
from services.guard.engine_token import RequireToken, TokenFile
from services.settings import settings

TOKEN = "tok-3f9a7c51d2e84b06"


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """A directory of keys, which this process uses."""
    directory = tmp_path / "keys"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("ROLLOUT_ENGINE_KEYS", f"{tmp_path / 'absent'}:{directory}")
    settings.cache_clear()
    yield directory
    settings.cache_clear()


def write(path, text, mode=0o600):
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(text if isinstance(text, bytes) else text.encode())
    draft.chmod(mode)
    draft.replace(path)


@pytest.mark.parametrize(
    ("text", "carried"),
    [
        (f"{TOKEN}\n", {"Authorization": f"Bearer {TOKEN}"}),
        (TOKEN, {"Authorization": f"Bearer {TOKEN}"}),
        ("user:with:colons", {"Authorization": "Bearer user:with:colons"}),
        (f"X-Api-Key: {TOKEN}\r\n", {"X-Api-Key": TOKEN}),
        ("Authorization: Basic dXNlcjpwYXNz", {"Authorization": "Basic dXNlcjpwYXNz"}),
    ],
)
def test_a_file_holds_a_token_or_a_header(keys, text, carried):
    write(keys / "gpu", text)
    assert headers("gpu") == carried


def test_without_a_key_calls_carry_none():
    assert headers(None) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no line"),
        ("short", "less than 8"),
        (f"{TOKEN} {TOKEN}", "neither a token"),
        (f"{TOKEN}\nX-Other: {TOKEN}", "or several"),
        (f"X-Api-Key: {TOKEN}\rX-Other: 1", "printable ASCII"),
        (b"\xff" * 20, "printable ASCII"),
        (f"{TOKEN}\0", "printable ASCII"),
        (f"Host: {TOKEN}", "calls have already"),
        (f"content-length: {TOKEN}", "calls have already"),
        ("a" * 4097, "more than 4096 bytes"),
    ],
)
def test_what_holds_neither_is_refused_and_not_shown(keys, text, why):
    write(keys / "gpu", text)
    with pytest.raises(EngineKeyProblem, match=f"engine key 'gpu' .*{why}") as caught:
        headers("gpu")
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o610])
def test_a_file_that_others_may_read_is_refused_until_they_may_not(keys, mode):
    write(keys / "gpu", TOKEN)
    assert headers("gpu")
    (keys / "gpu").chmod(mode)
    with pytest.raises(EngineKeyProblem, match=f"mode {mode:04o}"):
        headers("gpu")
    (keys / "gpu").chmod(0o600)
    assert headers("gpu")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_somebody_else_s_file_is_refused(keys):
    write(keys / "gpu", TOKEN)
    os.chown(keys / "gpu", 4242, 4242)
    with pytest.raises(EngineKeyProblem, match="belongs to user 4242"):
        headers("gpu")


@pytest.mark.parametrize(
    "key", ["../secret", "/etc/hostname", "a/b", "..", ".hidden", "", "a" * 129, "gpu\n"]
)
def test_no_name_leads_out_of_the_directory(keys, key):
    write(keys.parent / "secret", TOKEN)
    with pytest.raises(EngineKeyProblem, match="no plain name"):
        headers(key)


def test_what_is_no_plain_file_is_refused_and_nobody_waits_for_it(keys):
    write(keys.parent / "secret", TOKEN)
    (keys / "link").symlink_to(keys.parent / "secret")
    (keys / "folder").mkdir(mode=0o700)
    os.mkfifo(keys / "pipe", 0o600)
    for key in ("link", "folder", "pipe"):
        with pytest.raises(EngineKeyProblem, match=f"engine key '{key}'") as caught:
            headers(key)
        assert str(keys) not in str(caught.value)


def test_a_key_that_is_nowhere_says_what_to_do(keys):
    with pytest.raises(EngineKeyProblem, match="ROLLOUT_ENGINE_KEYS") as caught:
        headers("gpu")
    assert isinstance(caught.value, OSError), "as which model calls take it for the backend's trouble"


def test_a_new_token_holds_at_once_and_both_stay_out_of_texts(keys):
    new = "tok-b1946ac92492d234"
    write(keys / "gpu", TOKEN)
    assert headers("gpu")["Authorization"].endswith(TOKEN)
    write(keys / "gpu", new)
    assert headers("gpu")["Authorization"].endswith(new)
    assert logs.masked(f"{TOKEN} or {new}") == "*** or ***"
    assert logs.masked(bytearray(f"Bearer {new}".encode())) == b"Bearer ***"
    assert logs.Redactor().text(f"line of {TOKEN}") == "line of ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Token 5b2d8f0c7e31", "Authorization: Token ***"),
        ("X-Pair: id 12; secret 34", "X-Pair: ***"),
    ],
)
def test_of_a_header_what_is_secret_is_taken_out(keys, text, shown):
    write(keys / "gpu", text)
    headers("gpu")
    assert logs.masked(text) == shown


def test_an_escaped_token_is_taken_out_as_well(keys):
    write(keys / "gpu", 'X-Key: qu"ote\\back/slash')
    headers("gpu")
    shown = json.dumps({"error": 'no qu"ote\\back/slash'})
    assert logs.masked(shown) == '{"error": "no ***"}'


def test_only_what_is_about_the_key_names_it():
    assert refusal(401, "gpu") == " (engine key 'gpu' was sent)"
    assert "register it with `key`" in refusal(403, None)
    assert refusal(500, "gpu") == refusal(200, None) == ""


# ---------------------------------------------------------------------------------- the guard


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    """The middleware before an application that answers everything; asks it and gives the status."""
    write(tmp_path / "token", TOKEN)
    monkeypatch.setenv(engine_token.VARIABLE, str(tmp_path / "token"))
    monkeypatch.setattr(engine_token, "LOOK_S", -1.0)

    async def answers_all(scope, receive, send):
        await send({"type": "answered"})

    app = RequireToken(answers_all)

    def status(path="/pause", kind="http", method="POST", **headers):
        sent = []
        scope = {"type": kind, "path": path, "method": method}
        scope["headers"] = [
            (name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()
        ]

        async def send(message):
            sent.append(message)

        asyncio.run(app(scope, None, send))
        first = sent[0]
        return "answered" if first["type"] == "answered" else first.get("status", first.get("code"))

    return status


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "BREW"])
@pytest.mark.parametrize(
    "path", ["/pause", "/v1/models", "/metrics", "/health/", "/health/../pause", "//health", ""]
)
def test_without_its_token_a_server_answers_nothing_but_health(guarded, path, method):
    assert guarded(path, method=method) == 401
    assert guarded(path, method=method, authorization=f"Bearer {TOKEN}") == "answered"
    assert guarded("/health", method=method) == "answered"


@pytest.mark.parametrize(
    "text",
    [TOKEN, f"bearer{TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer ", "é"],
)
def test_another_token_is_none(guarded, text):
    assert guarded(authorization=text) == 401


def test_web_sockets_are_guarded_and_what_is_no_request_is_not(guarded):
    assert guarded("/v1/realtime", kind="websocket") == 1008
    assert guarded("/health", kind="websocket") == 1008
    assert guarded("/v1/realtime", kind="websocket", authorization=f"Bearer {TOKEN}") == "answered"
    assert guarded("", kind="lifespan") == "answered"


def test_tokens_are_exchanged_while_both_are_accepted(guarded, tmp_path):
    new = "tok-b1946ac92492d234"
    write(tmp_path / "token", f"{TOKEN}\nX-Api-Key: {new}\n")
    assert guarded(x_api_key=new) == guarded(authorization=f"Bearer {TOKEN}") == "answered"
    write(tmp_path / "token", f"X-Api-Key: {new}")
    assert guarded(x_api_key=new) == "answered"
    assert guarded(authorization=f"Bearer {TOKEN}") == 401
    # Whoever spoils the file opens nothing, and ends nothing.
    write(tmp_path / "token", "a token for all", mode=0o644)
    assert guarded(authorization="Bearer a token for all") == 401
    assert guarded(x_api_key=new) == "answered"
    write(tmp_path / "token", "")
    assert guarded(x_api_key=new) == guarded(authorization="Bearer ") == 401


def test_a_server_does_not_start_without_a_token(tmp_path):
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "open").write_text(TOKEN)
    for name, why in (
        ("", "No such file"),
        ("absent", "No such file"),
        ("empty", "empty"),
        ("open", "chmod 600"),
    ):
        with pytest.raises(ValueError, match=why):
            TokenFile(str(tmp_path / name) if name else "")


def test_what_one_file_holds_both_sides_understand(keys):
    for text in (TOKEN, f"X-Api-Key: {TOKEN}", f"Authorization: Basic {TOKEN}"):
        write(keys / "gpu", text)
        carried = [(name.encode(), value.encode()) for name, value in headers("gpu").items()]
        assert TokenFile(str(keys / "gpu")).permits(carried)
        assert not TokenFile(str(keys / "gpu")).permits([])
