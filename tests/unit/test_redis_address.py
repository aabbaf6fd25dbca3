"""Addresses of Redis as our client and Celery's broker understand them, and what is shown of them."""

from __future__ import annotations

import pytest

from services.queues import make_celery
from services.redis_address import AddressError, hide_password, parse
from services.settings import Settings, SettingsError

SENTINEL = "sentinel://a:1,b/mine/3?username=u&password=p%26w%2F&sentinel_password=s"


def test_sentinels_are_taken_apart():
    address = parse(SENTINEL)
    assert address.sentinels == (("a", 1), ("b", 26379))
    assert (address.master, address.db) == ("mine", 3)
    assert address.credentials == {"username": "u", "password": "p&w/"}
    assert address.sentinel_credentials == {"password": "s"}


def test_the_broker_gets_the_same_sentinels():
    app = make_celery(Settings(redis_url=SENTINEL))
    connection = app.connection()
    assert connection.transport_cls == "sentinel"
    assert (connection.hostname, connection.port, connection.virtual_host) == ("a", 1, "3")
    assert (connection.userid, connection.password) == ("u", "p&w/")
    assert len(connection.alt) == 2
    options = app.conf.broker_transport_options
    assert options["master_name"] == "mine"
    assert options["sentinel_kwargs"]["password"] == "s"
    assert options["ack_emulation"] is False, "the other options stay"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:pw@h:7/2", "redis://:pw@h:7/2"),
        ("redis://h", "redis://h/0"),
        ("unix:///run/r.sock?db=4", "redis+socket:///run/r.sock?virtual_host=4"),
        ("unix://:pw@/run/r.sock", "redis+socket://:pw@/run/r.sock?virtual_host=0"),
        # kombu would not look at the certificate otherwise.
        ("rediss://h:7/0", "rediss://h:7/0?ssl_cert_reqs=required"),
        ("rediss://h/1?ssl_cert_reqs=none", "rediss://h/1?ssl_cert_reqs=none"),
    ],
)
def test_the_broker_speaks_to_the_same_server(url, expected):
    assert parse(url).broker() == (expected, {})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h:6379", "must begin with redis://"),
        ("h:6379", "must begin with"),
        ("", "must begin with"),
        ("redis://", "the host is missing"),
        ("redis://h:port/0", "port"),
        ("redis://h/zero", "no number of a database"),
        ("unix://", "path of the socket is missing"),
        ("sentinel://a:1", "name of the master is missing"),
        ("sentinel:///mine", "name of the master is missing"),
        ("sentinel://a,,b/mine", "no host of a Sentinel"),
        ("sentinel://a:x/mine", "Port could not be"),
        ("sentinel://:pw@a/mine", "password goes to the end"),
        ("sentinel://a/mine?passwort=x", "unknown option 'passwort'"),
    ],
)
def test_what_is_no_address_is_refused_with_its_reason(url, why):
    with pytest.raises(AddressError, match=why) as caught:
        parse(url)
    assert "pw" not in str(caught.value)


def test_a_bad_setting_is_named_without_its_password():
    with pytest.raises(SettingsError, match="ROLLOUT_REDIS_URL") as caught:
        Settings.from_env({"ROLLOUT_REDIS_URL": "redis://:hunter2@h/zero"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:pw@h:1/0", "redis://***@h:1/0"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("unix://:pw@/run/r.sock?db=1", "unix://***@/run/r.sock?db=1"),
        ("unix:///run/r.sock?password=pw&db=1", "unix:///run/r.sock?password=***&db=1"),
        (
            "sentinel://a/m/0?password=pw&sentinel_password=px",
            "sentinel://a/m/0?password=***&sentinel_password=***",
        ),
    ],
)
def test_secrets_are_not_shown(url, shown):
    assert hide_password(url) == shown
