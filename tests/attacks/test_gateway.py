"""The gateway's door: who gets in without a key, with another's, from a web page, or by not finishing."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection

import httpx
import pytest

from rollout.schema import Backend
from services.gateway.app import create_app
from services.gateway.routes import service as service_routes
from services.settings import Settings
from services.state.api_keys import Access, ApiKey, KeyStore, Scope, _digest
from services.state.backends.store import BackendStore
from services.state.fleet import FleetStore
from services.state.tenants import Tenant
from tests.attacks import attack
from tests.attacks.conftest import CONTROL
from tests.helpers.stack import GUNICORN, Stack, free_port, wait_until
from workers.handlers.noop import Noop

ENGINE = Backend(id="engine", url="http://127.0.0.1:9", model="m", tokenizer="t", max_model_len=100)
EVIL = "http://evil.example"
COMPAT_TENANT, OTHER = "trainer", "other"
PATIENCE_S = 30.0
SOON_S = 3.0
"""An honest caller that waits longer was kept from the gateway, if that is the control's."""
BUSY_S = 6.0
"""The same of the gateway under attack: long on a busy machine, but less than `HEAD_S`, after which it ends
half a head by itself.
"""
CACHE_S = 2.5
"""After so long a key that was revoked must not work."""


class OpenStack(Stack):
    """The same stack with the gateway of `open_gateway`, under gunicorn's own worker."""

    def start_gateway(self):
        argv = [*GUNICORN, "--threads", "64", "--bind", f"127.0.0.1:{self.port}", "--bind"]
        argv += [self.compat_url.removeprefix("http://"), "--worker-class", "gthread"]
        argv += ["tests.attacks.open_gateway:create_app()"]
        process = self.start("gateway", argv)
        wait_until(lambda: answers(self.url), 90, "the gateway", process)
        return process


@dataclass
class Target:
    place: str
    control: bool
    stack: Stack
    keys: dict[str, str] = field(default_factory=dict)
    """Texts of keys that the operator made: of other people."""

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def compat(self) -> str:
        return self.stack.compat_url

    def key(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"}


def answers(url: str, patience_s: float = SOON_S) -> bool:
    """Whether an honest caller gets its answer soon."""
    with suppress(OSError, httpx.HTTPError), closing(HTTPConnection(url[7:], timeout=patience_s)) as caller:
        caller.request("GET", "/")
        return caller.getresponse().status == 200
    return False


def call(method: str, url: str, body: str | None = None, **headers: str) -> httpx.Response:
    """A call without any key but one in `headers`."""
    return httpx.request(
        method,
        url,
        content=body,
        headers={k.replace("_", "-"): v for k, v in headers.items()},
        timeout=PATIENCE_S,
    )


def started(stack: Stack) -> dict[str, str]:
    """What an operator has there: a handler, a backend, keys of two tenants."""
    FleetStore(stack.redis.client).put_handlers([Noop().info()])
    BackendStore(stack.redis.client).put(ENGINE)
    store = KeyStore(stack.redis.client)
    return {
        "reads": store.create(OTHER, [Scope.READ])[1],
        "submits": store.create(OTHER, [Scope.SUBMIT])[1],
        "both": store.create(OTHER, [Scope.SUBMIT, Scope.READ])[1],
        "metrics": store.create(OTHER, [Scope.METRICS])[1],
    }


@pytest.fixture(scope="module", params=["service", CONTROL])
def attacked(request, tmp_path_factory) -> Iterator[Target]:
    control = request.param == CONTROL
    directory = tmp_path_factory.mktemp("gateway")
    env = {
        "ROLLOUT_HANDLERS": "",
        "ROLLOUT_COMPAT_PORT": str(free_port()),
        "ROLLOUT_COMPAT_TENANT": COMPAT_TENANT,
    }
    with (OpenStack if control else Stack)(directory, directory / "sbx", env) as stack:
        yield Target("service", control, stack, started(stack))


@pytest.fixture
def target(attacked) -> Target:
    return attacked


# -- without a key -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/v1/rollouts", '{"handler": "noop"}'), ("GET", "/metrics", None)],
    ids=["submit", "metrics"],
)
@attack(stopped_by="a key is needed, from loopback too")
def test_use_the_service_as_another_user_of_the_machine(target, method, path, body):
    return call(method, target.url + path, body, Content_Type="application/json").is_success


@attack(stopped_by="no header of a proxy is trusted")
def test_pass_for_a_call_of_the_gateway_s_own_machine(target):
    forged = {"X_Forwarded_For": "127.0.0.1", "X_Real_IP": "127.0.0.1", "Forwarded": "for=127.0.0.1"}
    return call("GET", f"{target.url}/v1/status", **forged, Host="localhost").is_success


@attack(stopped_by="keys count in the Authorization header alone")
def test_have_a_key_that_a_link_carries_count(target):
    if target.control:
        return call("GET", f"{target.url}/v1/rollouts", **target.key("both")).is_success
    key = target.keys["both"]
    return any(
        call("GET", f"{target.url}/v1/rollouts?{name}={key}").is_success
        for name in ("api_key", "key", "token", "access_token")
    )


@attack(stopped_by="who is open to all says no addresses")
def test_learn_where_redis_is(target, monkeypatch):
    port = free_port()
    app = create_app(Settings(redis_url=f"redis://127.0.0.1:{port}/0"))
    if target.control:  # as it was

        def ready():
            try:
                service_routes.gateway().start.require()
            except Exception as error:
                return {"missing": [f"Redis does not answer: {error}"]}, 503

        app.view_functions["service.ready"] = ready
        ready.scope = None
    pages = [
        app.test_client().get(path).text for path in ("/ready", "/health", "/v1/status", "/openapi.json")
    ]
    return any(str(port) in text for text in pages)


# -- with a key of less --------------------------------------------------------------------------


@attack(stopped_by="keys are read again every 2 s")
def test_go_on_with_a_key_that_was_revoked(target):
    store = KeyStore(target.stack.redis.client)
    key, text = store.create(OTHER, [Scope.READ])
    bearer = {"Authorization": f"Bearer {text}"}
    deadline = time.monotonic() + PATIENCE_S
    while not call("GET", f"{target.url}/v1/rollouts", **bearer).is_success:  # it is in the cache
        assert time.monotonic() < deadline
    if not target.control:
        store.revoke(key.id)
        time.sleep(CACHE_S)
    return call("GET", f"{target.url}/v1/rollouts", **bearer).is_success


@attack(stopped_by="as long for an unknown id as for a known one")
def test_learn_by_the_time_which_ids_of_keys_exist(target):
    secret = "0" * 64
    key = ApiKey(id="a" * 12, tenant=OTHER, scopes=frozenset(), digest=_digest("1" * 64), created_at=0.0)
    access = Access("1", {key.id: key}, {OTHER: Tenant(name=OTHER)})

    def careless(text: str):
        key = access.keys.get(text[4:16])
        return key if key and _digest(text[17:]) == key.digest else None

    find = careless if target.control else access.find

    def batch_s(key_id: str) -> float:
        began = time.perf_counter()
        for _ in range(500):
            find(f"rlt_{key_id}_{secret}")
        return time.perf_counter() - began

    # By turns: the machine may be faster in one moment than in the next.
    known, unknown = map(min, zip(*((batch_s(key.id), batch_s("b" * 12)) for _ in range(60)), strict=True))
    return known > 1.5 * unknown


# -- from a web page -----------------------------------------------------------------------------


def drained(target: Target) -> bool:
    return any(backend.draining for backend in BackendStore(target.stack.redis.client).list())


@attack(stopped_by="a key, Origin, application/json")
def test_drain_a_backend_from_a_web_page(target):
    call("POST", f"{target.url}/v1/backends/engine/drain", "{}", Origin=EVIL, Content_Type="text/plain")
    call("POST", f"{target.url}/v1/backends/engine/drain", Origin=EVIL, Sec_Fetch_Site="cross-site")
    return drained(target)


def accepted_from_page(target: Target, body: str, **headers: str) -> bool:
    """Whether a page's call to the port that needs no key makes a rollout."""

    def made() -> bool:
        return target.stack.redis.client.zcard("rollouts:created") > before

    before = target.stack.redis.client.zcard("rollouts:created")
    try:
        httpx.post(
            f"{target.compat}/process",
            content=body,
            headers={name.replace("_", "-"): text for name, text in headers.items()},
            timeout=1.0 if target.control else PATIENCE_S,
        )
    except httpx.TimeoutException:  # a call that is let in is answered when its rollout has ended
        with suppress(TimeoutError):
            wait_until(made, PATIENCE_S, "a rollout that was let in")
    return made()


PAGES = {
    "another site": {"Origin": EVIL},
    "a sandboxed frame": {"Origin": "null"},
    "another port": {"Sec_Fetch_Site": "same-site"},
}


@pytest.mark.parametrize("page", PAGES)
@attack(stopped_by="Origin, Sec-Fetch-Site")
def test_submit_from_a_web_page(target, page):
    body = json.dumps({"instance": {"data_source": "noop"}, "job_id": f"page-{page}"})
    return accepted_from_page(target, body, Content_Type="application/json", **PAGES[page])


@attack(stopped_by="application/json")
def test_stop_the_jobs_of_a_trainer_by_a_form(target):
    # An old browser sends neither Origin nor Sec-Fetch-Site with a form.
    kinds = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain")
    return any(call("POST", f"{target.compat}/stop", "a=b", Content_Type=kind).is_success for kind in kinds)


@attack(stopped_by="Host")
def test_read_the_jobs_by_a_name_that_was_made_to_point_here(target):
    port = target.compat.rpartition(":")[2]
    return call("GET", f"{target.compat}/status", Host=f"evil.example:{port}").is_success


@attack(stopped_by="no CORS")
def test_be_allowed_by_a_preflight(target):
    asks = {
        "Origin": EVIL,
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "content-type",
    }
    answers = [call("OPTIONS", f"{url}/process", **asks).headers for url in (target.url, target.compat)]
    return any("access-control-allow-origin" in headers for headers in answers)


# -- by not finishing ----------------------------------------------------------------------------

JSON_TO = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALF = {
    "line": b"GET /v1/sta",
    "head": JSON_TO % b"/v1/rollouts" + b"X-A: ",
    "body": JSON_TO % b"/v1/rollouts" + b"Content-Length: 500\r\n\r\n{",
    "large body": JSON_TO % b"/process" + b"Content-Length: 5000000\r\n\r\n{",
}


def stopped(url: str, what: bytes, patience_s: float, count: int = 200) -> bool:
    """Whether so many connections that send this and no more keep honest callers out."""
    host, port = url[7:].split(":")
    with ExitStack() as open_ones:
        for _ in range(count):
            connection = open_ones.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            connection.sendall(what)
        time.sleep(0.5)
        return not all(answers(url, patience_s) for _ in range(3))


@pytest.mark.parametrize("kind", HALF)
@attack(stopped_by="no thread before head and body are in")
def test_stop_the_gateway_with_requests_that_do_not_come_to_their_end(target, kind):
    # Where no key is needed a large body is asked for.
    url = target.compat if kind == "large body" else target.url
    return stopped(url, HALF[kind], SOON_S if target.control else BUSY_S)


# -- one connection for two requests -------------------------------------------------------------


class Naive(threading.Thread):
    """A server that goes by Content-Length, whatever else a head says; what follows is the next request."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.start()

    def run(self) -> None:
        with self.socket, self.socket.accept()[0] as connection:
            data = connection.recv(1 << 16)
            while b"\r\n\r\n" in data:
                head, _, rest = data.partition(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                data = rest[int(length[1]) if length else 0 :]
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


@attack(stopped_by="two lengths are refused")
def test_hide_a_request_behind_two_lengths(target):
    port = Naive().port if target.control else target.stack.port
    smuggled = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
    body = b"0\r\n\r\n"
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
    request = JSON_TO % b"/v1/rollouts" + lengths + body + smuggled
    return _answers_given(port, request + b"\r\n\r\n") > 1


def _answers_given(port: int, *pieces: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.settimeout(3.0)
        received = b""
        with suppress(TimeoutError, ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.5)
            while data := connection.recv(1 << 16):
                received += data
    return received.count(b"HTTP/1.1 ")
