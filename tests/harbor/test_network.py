"""What of a network a task gets: the proxy's rules, and the way to it from a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import pytest

from services.settings import settings
from tests.helpers.harbor_tasks import NO_NETWORK, Play, bash, refused, said
from workers.handlers.harbor import egress, network
from workers.handlers.harbor.egress import Egress, is_public

LOOPBACK = "127.0.0.1"
NAMES = {"allowed.test": [LOOPBACK], "sub.wild.test": [LOOPBACK], "mixed.test": ["93.184.216.34", "10.0.0.1"]}


async def known(host: str, port: int) -> list[str]:
    if host not in NAMES:
        raise OSError("no such name")
    return NAMES[host]


class Outside(BaseHTTPRequestHandler):
    """Answers with what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        names = sorted(name.lower() for name in self.headers if name.lower().startswith(("x-", "proxy-")))
        said = f"{self.command} {self.path} {body.decode()} {names}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def outside() -> Iterator[int]:
    """Port of a server on the loopback, which stands for one on the internet."""
    server = ThreadingHTTPServer((LOOPBACK, 0), Outside)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def asked(hosts: list[str], text: str, **more: object) -> str:
    """The proxy's whole answer to these bytes."""

    async def ask() -> str:
        async with Egress(hosts, known, **more) as proxy:  # type: ignore[arg-type]
            reader, writer = await asyncio.open_connection(LOOPBACK, proxy.port)
            writer.write(text.encode())
            with contextlib.suppress(ConnectionError), contextlib.closing(writer):
                return (await asyncio.wait_for(reader.read(), 10)).decode()
        return ""

    return asyncio.run(ask())


def is_loopback(host: str, address: str) -> bool:
    return address == LOOPBACK


def test_a_list_names_hosts_those_below_a_name_addresses_and_networks():
    proxy = Egress(
        ["Example.org", "*.wild.test", ".dot.test", "192.0.2.7", "198.51.100.0/24", "2001:db8::/32"]
    )
    allowed = (
        "example.org EXAMPLE.ORG. a.wild.test a.b.wild.test x.dot.test 192.0.2.7 198.51.100.9 2001:db8::1"
    )
    assert all(map(proxy.knows, allowed.split()))
    refused = (
        "wild.test notwild.test sub.example.org example.org.evil.test 192.0.2.8 198.51.101.1 evil 2001::1"
    )
    assert not any(map(proxy.knows, refused.split()))
    assert Egress(["*"]).knows("anything") and not Egress([]).knows("anything")


def test_the_server_is_told_the_host_that_was_checked():
    head = (
        "GET http://me@allowed.test:81/ HTTP/1.1\r\nHost: evil.test\r\nhost : evil.test\r\nX-Own: 1\r\n\r\n"
    )
    host, port, first = egress._target(head.encode())
    assert (host, port) == ("allowed.test", 81)
    assert first == b"GET / HTTP/1.1\r\nHost: allowed.test:81\r\nX-Own: 1\r\nConnection: close\r\n\r\n"


def test_connections_that_say_nothing_are_bounded_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(egress, "MOST_OPEN", 4)

    async def ask() -> bytes:
        async with Egress(["*"]) as proxy, contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                reader, writer = await asyncio.open_connection(LOOPBACK, proxy.port)
                stack.callback(writer.close)
            return await asyncio.wait_for(reader.read(), 10)

    assert asyncio.run(ask()) == b""


def test_names_that_are_never_resolved_hold_up_no_thread_of_the_workers(monkeypatch: pytest.MonkeyPatch):
    hold = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hold.wait(10) and [])

    async def ask() -> int:
        async with Egress(["*"]) as proxy:
            writers = [(await asyncio.open_connection(LOOPBACK, proxy.port))[1] for _ in range(80)]
            for number, writer in enumerate(writers):
                writer.write(f"CONNECT {number}.test:443 HTTP/1.1\r\n\r\n".encode())
            await asyncio.sleep(0.2)
            found = await asyncio.wait_for(asyncio.to_thread(threading.active_count), 5)
            hold.set()
            for writer in writers:
                writer.close()
            return found

    before = threading.active_count()
    assert asyncio.run(ask()) - before <= egress.MOST_LOOKUPS + 1, "and the one that was asked for"


def test_what_this_machine_serves_is_not_reached_by_its_public_address():
    assert egress._is_ours(ip_address(LOOPBACK)) and not egress._is_ours(ip_address("93.184.216.34"))


CLOSED = """127.0.0.1 10.1.2.3 192.168.1.1 172.16.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1
255.255.255.255 ::1 fe80::1%eth0 fc00::1 ::ffff:127.0.0.1 ::127.0.0.1 64:ff9b:1::7f00:1 fec0::1
64:ff9b::7f00:1 2002:7f00:1:: ff02::1 nonsense"""


def test_an_address_that_is_not_public_is_never_reached():
    assert [address for address in CLOSED.split() if is_public("any", address)] == []
    answer = asked(["*"], "CONNECT mixed.test:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith("HTTP/1.1 403") and "not public" in answer


def test_public_addresses_are_allowed():
    assert all(is_public("any", address) for address in ("93.184.216.34", "2606:2800:220:1::1"))


def test_a_request_is_led_to_the_address_that_was_checked(outside: int):
    request = f"POST http://allowed.test:{outside}/a/b?c=1#d HTTP/1.1\r\nHost: allowed.test\r\n"
    request += "Proxy-Authorization: x\r\nX-Rollout-Call: 1\r\nX-Own: 2\r\nContent-Length: 5\r\n\r\nhello"
    answer = asked(["allowed.test"], request, is_allowed=is_loopback)
    assert answer.startswith("HTTP/1.1 200") and answer.endswith("POST /a/b?c=1 hello ['x-own']")
    connect = f"CONNECT sub.wild.test:{outside} HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = asked(["*.wild.test"], f"{connect}GET /c HTTP/1.0\r\n\r\n", is_allowed=is_loopback)
    assert answer.startswith("HTTP/1.1 200 Connection established") and answer.endswith("GET /c  []")


@pytest.mark.parametrize(
    ("request_", "status", "why"),
    [
        ("CONNECT other.test:443 HTTP/1.1\r\n\r\n", 403, "other.test is not among the hosts"),
        ("CONNECT allowed.test:443 HTTP/1.1\r\n\r\n", 403, "not public"),
        ("CONNECT absent.test:443 HTTP/1.1\r\n\r\n", 502, "no such name"),
        ("CONNECT allowed.test HTTP/1.1\r\n\r\n", 400, "port"),
        ("GET /path HTTP/1.1\r\nHost: allowed.test\r\n\r\n", 400, "none for it"),
        ("GET https://allowed.test/ HTTP/1.1\r\n\r\n", 400, "another scheme"),
        ("GET http://allowed.test:99999/ HTTP/1.1\r\n\r\n", 400, "Port out of range"),
        ("nonsense\r\n\r\n", 400, "none for it"),
        ("CONNECT allowed.test:25 HTTP/1.1\r\n\r\n", 403, "port 25"),
        ("GET http://allowed.test/ HTTP/1.1\r\nX: 1\nHost: evil.test\r\n\r\n", 400, "several lines"),
        ("GET http://allowed.test/ HTTP/1.1\r\nX: 1\r\n Host: evil.test\r\n\r\n", 400, "several lines"),
    ],
)
def test_all_else_is_refused_with_a_reason(request_: str, status: int, why: str):
    answer = asked(["allowed.test", "absent.test"], request_)
    assert answer.startswith(f"HTTP/1.1 {status} ") and why in answer


def test_a_head_that_has_no_end_and_too_many_connections_cost_nothing(monkeypatch: pytest.MonkeyPatch):
    assert asked(["*"], "GET http://a/" + 300_000 * "x") == ""
    monkeypatch.setattr(egress, "MOST_CONNECTIONS", 0)
    assert asked(["*"], "GET http://a/ HTTP/1.1\r\n\r\n").startswith("HTTP/1.1 503")
    monkeypatch.undo()
    monkeypatch.setattr(egress, "HEAD_S", 0.05)
    assert asked(["*"], "GET http://a/") == ""


FETCH = """
python3 - <<'X'
import http.client, os, urllib.request
print(urllib.request.urlopen("http://allowed.test:%d/plain", timeout=20).read().decode())
proxy = os.environ["https_proxy"].removeprefix("http://")
line = http.client.HTTPConnection(proxy, timeout=20)
line.set_tunnel("sub.wild.test", %d)
for number in range(2):  # both through one tunnel
    line.request("POST", "/through", body="x" * 200000 if number else "short")
    print(line.getresponse().read().decode()[:20])
try:
    urllib.request.urlopen("http://other.test/", timeout=20)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode().strip())
X"""


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of these tests resolve, to a loopback that may be reached."""
    monkeypatch.setattr(network, "Egress", functools.partial(Egress, resolver=known, is_allowed=is_loopback))


def test_an_agent_reaches_the_hosts_of_its_list_and_no_other(
    play: Play, outside: int, loopback_is_public: None
):
    toml = "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['allowed.test', '*.wild.test']\n"
    done = play(bash(FETCH % (outside, outside)), bash("touch done.txt"), toml=toml)
    lines = said(done)[0].splitlines()
    assert lines[0] == "GET /plain  []"
    assert lines[1:3] == ["POST /through short ", "POST /through xxxxxx"]
    assert lines[3] == "403 other.test is not among the hosts that this task may reach"
    assert done.reward == 1.0 and done.metrics["refused_hosts"] == 1


@pytest.mark.usefixtures("loopback_is_public")
def test_a_step_has_the_network_that_it_names_and_not_that_of_the_step_before(play: Play, outside: int):
    toml = NO_NETWORK + "[[steps]]\nname = 'with'\n[[steps]]\nname = 'without'\n[steps.agent]\n"
    toml = toml.replace(
        "'with'", "'with'\nagent = { network_mode = 'allowlist', allowed_hosts = ['allowed.test'] }"
    )
    files = {f"steps/{name}/instruction.md": "Ask." for name in ("with", "without")}
    fetch = (
        f"import urllib.request as r; print(r.urlopen('http://allowed.test:{outside}/', timeout=9).status)"
    )
    ask = bash(f'python3 -c "{fetch}" 2>&1 | tail -1')
    done = play(ask, "Done.", ask, toml=toml, files=files)
    assert said(done)[0] == "200" and "URLError" in said(done)[1]


@pytest.mark.usefixtures("loopback_is_public")
def test_an_agent_without_a_network_has_none_even_where_the_verifier_has_one(play: Play, outside: int):
    fetch = f"import urllib.request as r; r.urlopen('http://allowed.test:{outside}/', timeout=5)"
    toml = NO_NETWORK + "[verifier]\nnetwork_mode = 'public'\n"
    test = f'python3 -c "{fetch}" && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt'
    done = play(bash(f'env | grep -ci proxy; python3 -c "{fetch}" 2>&1 | tail -1'), toml=toml, test=test)
    first, last = said(done)[0].splitlines()[:2]
    assert first == "0" and "URLError" in last
    assert done.reward == 1.0


def test_a_deployment_that_gives_no_network_refuses_lists_and_tells_of_the_rest(
    play: Play, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ROLLOUT_TASK_EGRESS")
    settings.cache_clear()
    try:
        listed = "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['allowed.test']\n"
        why = refused(play(toml=listed))
        assert "allowed.test" in why and "ROLLOUT_TASK_EGRESS" in why
        done = play(bash("env | grep -ci proxy"), toml="[environment]\nnetwork_mode = 'public'\n")
        assert said(done)[0].startswith("0")
        assert any("gives tasks no network" in warning for warning in done.trajectory.warnings)
    finally:
        settings.cache_clear()
