"""How clients find this account's service and its key, and whom they do not trust."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import httpx
import pytest

from rollout import account
from rollout.client import KEY_VARIABLE, URL_VARIABLE, AddressError, ApiKeyError, AsyncClient, Client
from services.launch.parts import closed_to_sandboxes

KEY, OTHER = "rlt_mine", "rlt_other"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for name in (URL_VARIABLE, "ROLLOUT_SLURM_RUN", "ROLLOUT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir("/")
    monkeypatch.setattr(account, "CHECKOUT", tmp_path / "no checkout")
    monkeypatch.setattr("rollout.http.DEFAULT_URL", NOBODY)  # port 8080 of this machine may be taken


@pytest.fixture
def listener():
    """A port at which this user listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def announced(name: str, url: str, key: str = KEY, **fields):
    service = account.Service(url, key, fields.pop("boot", account.boot()), time.time(), **fields)
    return account.announce(name, service)


def sent(client: Client | AsyncClient, url: str | None = None) -> str | None:
    """The key that a call to `url`, or to the gateway, would carry."""
    request = httpx.Request("GET", url or f"{client.base_url}/v1/status")
    if client.auth is None:
        return None
    made = next(client.auth.auth_flow(request))
    return made.headers.get("Authorization", "").removeprefix("Bearer ") or None


def test_address_and_key_of_the_running_service_are_found_together(listener):
    url = f"http://127.0.0.1:{listener}"
    path = announced("a", url)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    for client in (Client(), AsyncClient(), Client(url), Client(f"http://localhost:{listener}/")):
        assert client.base_url.endswith(str(listener)) and sent(client) == KEY


def test_what_a_newer_release_adds_to_a_service_hides_it_from_nobody(listener):
    url = f"http://127.0.0.1:{listener}"
    path = announced("a", url)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "green"}))
    assert [service.url for service in account.services()] == [url]


def test_sandboxes_are_shown_nothing_of_the_files_of_services():
    env = {
        "ROLLOUT_SANDBOX_CLOSED": "/mine",
        "ROLLOUT_BUNDLE_CACHE": "/tests",
        "ROLLOUT_ENGINE_KEYS": "/keys",
    }
    closed = closed_to_sandboxes(env, Path("/run"))
    assert closed.split(":") == ["/mine", "/run", "/tests", "/keys", str(account.directory())]


def test_arguments_and_environment_go_first(listener, monkeypatch):
    url = f"http://127.0.0.1:{listener}"
    announced("a", url)
    assert sent(Client(url, api_key=OTHER)) == OTHER
    assert sent(Client(url, api_key="")) is None
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    assert sent(Client(url)) == OTHER
    monkeypatch.setenv(URL_VARIABLE, "http://gateway.example:8080")
    assert Client().base_url == "http://gateway.example:8080"


def test_a_key_that_was_found_is_of_its_address_alone(listener):
    announced("a", f"http://127.0.0.1:{listener}")
    client = Client(f"http://127.0.0.1:{listener}")
    assert sent(client) == KEY
    others = [f"http://{host}:{listener}" for host in ("127.0.0.2", "gateway.example")]
    for elsewhere in (*others, f"https://127.0.0.1:{listener}", f"http://127.0.0.1:{listener - 1}"):
        assert sent(Client(elsewhere)) is None
        assert sent(client, f"{elsewhere}/v1/status") is None


def test_the_latest_that_runs_is_the_default_and_a_demo_is_not(listener):
    with socket.create_server(("127.0.0.1", 0)) as second:
        port = second.getsockname()[1]
        announced("a", f"http://127.0.0.1:{listener}")
        announced("b", f"http://127.0.0.1:{port}")
        announced("demo", f"http://127.0.0.1:{listener}", private=True)
        assert Client().base_url == f"http://127.0.0.1:{port}"
    assert Client().base_url == f"http://127.0.0.1:{listener}", "the other one ended without a word"
    account.withdraw("a")
    assert Client().base_url == NOBODY


def test_the_service_of_the_checkout_goes_before_the_latest_one(listener, monkeypatch, tmp_path):
    mine = tmp_path / "mine"
    (mine / "docs").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        theirs = f"http://127.0.0.1:{other.getsockname()[1]}"
        announced("mine", f"http://127.0.0.1:{listener}", home=str(mine / ".local"))
        announced("theirs", theirs, KEY, home=str(tmp_path / "theirs/.local"))
        assert account.find() == (theirs, f"the latest service of this account, of {tmp_path / 'theirs'}")
        for place in (mine, mine / "docs"):
            monkeypatch.chdir(place)
            assert account.find() == (f"http://127.0.0.1:{listener}", f"the service of {mine}")
        monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "theirs/.local"))
        assert Client().base_url == theirs
        monkeypatch.delenv("ROLLOUT_HOME")
        monkeypatch.chdir("/")
        monkeypatch.setattr(account, "CHECKOUT", mine)
        assert Client().base_url == f"http://127.0.0.1:{listener}", "where the command is installed"


def test_a_service_of_the_checkout_that_is_away_is_not_left_for_another(listener, monkeypatch, tmp_path):
    announced("mine", "http://127.0.0.1:1", home=str(tmp_path / ".local"))
    announced("theirs", f"http://127.0.0.1:{listener}", home="/elsewhere/.local")
    monkeypatch.chdir(tmp_path)
    url, origin = account.find()
    assert url == "http://127.0.0.1:1" and "does not run now: `rollout up` starts it" in origin
    announced("anew", f"http://127.0.0.1:{listener}", home=str(tmp_path / ".local"))
    announced("mine", "http://127.0.0.1:1", home=str(tmp_path / ".local"))
    assert account.find() == (f"http://127.0.0.1:{listener}", f"the service of {tmp_path}")


def test_whoever_s_key_it_is_it_goes_to_no_other_user_where_no_address_was_named(
    listener, monkeypatch, tmp_path
):
    """The listener is ours, so the client is somebody else's."""
    stranger = f"http://127.0.0.1:{listener}"
    announced("mine", stranger, home=str(tmp_path / ".local"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    monkeypatch.setattr(account, "other_owners", lambda place: {65534} if place[2] == listener else set())
    for client in (Client(), Client(api_key=OTHER)):
        with pytest.raises(ApiKeyError, match=rf"user 65534 listens at 127.0.0.1:{listener}.*no key is sent"):
            sent(client)
    assert sent(Client(stranger)) == OTHER, "the caller named it"
    account.withdraw("mine")
    monkeypatch.setattr("rollout.http.DEFAULT_URL", stranger)
    with pytest.raises(AddressError, match=f"user 65534 listens at {stranger}"):
        Client()


def slurm_run(path, state: str = "up", key: str = KEY):
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    head = {"url": "http://10.9.8.7:8080", "state": state, "job": "12"}
    account.write_private(path / "head.json", json.dumps(head))
    account.write_private(path / "api.key", key + "\n")


def test_the_service_of_a_slurm_run_is_found_with_its_key(monkeypatch, tmp_path):
    slurm_run(tmp_path / ".local/slurm-run")
    assert Client().base_url == NOBODY
    monkeypatch.chdir(tmp_path)
    assert "the Slurm service of" in account.find()[1]
    client = Client()
    assert (client.base_url, sent(client)) == ("http://10.9.8.7:8080", KEY)
    slurm_run(tmp_path / ".local/slurm-run", "down")
    assert account.find() is None
    slurm_run(tmp_path / "run")
    monkeypatch.setenv("ROLLOUT_SLURM_RUN", str(tmp_path / "run"))
    assert sent(Client()) == KEY
    killed = time.time() - 200
    os.utime(tmp_path / "run/head.json", (killed, killed))
    with pytest.raises(AddressError, match="no head that is up"):
        Client()
    assert sent(Client("http://10.9.8.7:8080")) is None, "anybody may have its address now"
    slurm_run(tmp_path / "run", "down")
    with pytest.raises(AddressError, match="no head that is up, as `rollout slurm status` shows"):
        Client()
    monkeypatch.delenv("ROLLOUT_SLURM_RUN")
    slurm_run(tmp_path / ".local/slurm-run")
    (tmp_path / ".local/slurm-run/api.key").chmod(0o644)
    with pytest.raises(ApiKeyError, match="others may know the key"):
        Client()


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_clock_of_its_file_system_says_whether_a_slurm_head_lives(monkeypatch, tmp_path, hours):
    slurm_run(tmp_path)
    monkeypatch.setenv("ROLLOUT_SLURM_RUN", str(tmp_path))
    now = time.time
    monkeypatch.setattr("rollout.account.time.time", lambda: now() + 3600 * hours)
    assert sent(Client()) == KEY, "only our own clock is wrong"
    os.utime(tmp_path / "head.json", (now() - 200, now() - 200))
    with pytest.raises(AddressError, match="no head that is up"):
        Client()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api.key", "head.json"]


def test_a_slurm_service_that_runs_goes_before_a_local_one_that_ended(monkeypatch, tmp_path):
    announced("mine", "http://127.0.0.1:1", home=str(tmp_path / ".local"))
    slurm_run(tmp_path / ".local/slurm-run")
    monkeypatch.chdir(tmp_path)
    assert account.find()[0] == "http://10.9.8.7:8080"


@pytest.mark.parametrize("text", ["[]", "{", '{"state": "up"}', '{"state": "up", "url": 5}', '"up"'])
def test_a_slurm_file_that_says_nothing_is_no_service(monkeypatch, tmp_path, text):
    slurm_run(tmp_path / ".local/slurm-run")
    (tmp_path / ".local/slurm-run/head.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert account.find() is None and sent(Client("http://gateway.example")) is None


def test_only_the_key_of_a_slurm_run_is_secret_and_only_where_it_is_needed(monkeypatch, tmp_path):
    run = tmp_path / ".local/slurm-run"
    slurm_run(run)
    monkeypatch.chdir(tmp_path)
    (run / "head.json").chmod(0o644)
    assert sent(Client()) == KEY
    (run / "api.key").chmod(0o644)
    assert sent(Client("http://gateway.example")) is None, "that key is not of this address"
    (run / "head.json").chmod(0o666)
    assert account.find() is None, "anybody may have written it"


def test_an_account_without_a_home_has_no_services(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert account.find() is None and sent(Client()) is None


def test_what_was_announced_before_the_machine_started_is_forgotten(listener):
    announced("a", f"http://127.0.0.1:{listener}", boot="an earlier life, or another machine")
    assert account.services() == []


def test_a_file_that_others_could_read_is_refused():
    path = announced("a", "http://127.0.0.1:1")
    for mode in (0o640, 0o604, 0o666):
        path.chmod(mode)
        with pytest.raises(ApiKeyError, match=rf"{path} has mode {mode:04o}.*make a new one"):
            Client()


def test_a_file_of_somebody_else_is_refused(monkeypatch):
    path = announced("a", "http://127.0.0.1:1")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        says = "belongs to user 65534"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65533)
        says = "belongs to"
    with pytest.raises(ApiKeyError, match=says):
        Client()


def test_links_and_directories_that_others_write_are_refused(tmp_path):
    path = announced("a", "http://127.0.0.1:1")
    path.rename(tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    with pytest.raises(ApiKeyError, match="is not read for a key"):
        Client()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ApiKeyError, match="no plain file"):
        Client()
    path.unlink()
    path.parent.chmod(0o777)
    with pytest.raises(ApiKeyError, match="written by, somebody else"):
        Client()


def test_half_a_file_is_passed_over(listener):
    announced("a", f"http://127.0.0.1:{listener}")
    account.write_private(account.directory() / "b.json", '{"url": "http://127')
    account.write_private(account.directory() / "c.json", '{"url": "http://127.0.0.1:1", "more": 1}')
    assert sent(Client()) == KEY


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path):
    with pytest.raises(UnicodeEncodeError):  # as a full disk does, between the draft's making and its end
        account.write_private(tmp_path / "stack.json", "\ud800")
    assert list(tmp_path.iterdir()) == []


def test_who_listens_is_told_by_user(listener):
    assert account.owners(("http", "127.0.0.1", listener)) == {os.geteuid()}
    assert account.owners(("http", "localhost", listener)) == {os.geteuid()}
    assert account.owners(("http", "127.0.0.2", listener)) == set()
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert account.owners(("http", "127.0.0.2", everywhere.getsockname()[1])) == {os.geteuid()}
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        port = six.getsockname()[1]
        assert account.owners(("http", "::1", port)) == account.owners(("http", "localhost", port)) != set()


def test_a_service_that_does_not_say_whose_it_is_is_still_the_latest(listener, monkeypatch, tmp_path):
    """As one that a release before started."""
    announced("older", f"http://127.0.0.1:{listener}")
    monkeypatch.chdir(tmp_path)
    assert account.find() == (f"http://127.0.0.1:{listener}", "the latest service of this account")
