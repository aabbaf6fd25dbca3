"""What a webhook's signature is worth, and where webhooks may go."""

from __future__ import annotations

import json
import time
from ipaddress import ip_address

import pytest

from rollout import WebhookError, verify_webhook
from rollout.webhooks import signature, signed_headers
from services.settings import Settings, SettingsError
from services.webhook_address import AddressRefused, AllowedAddresses
from tests.helpers.rollouts import ended
from workers.chores.webhooks import message

SECRET = "correct horse battery staple"


def genuine(secrets=(SECRET,), at=None):
    rollout = ended(id="r-1", reward=0.1 + 0.2)
    body = message(rollout)
    return rollout, body, signed_headers(list(secrets), rollout.id, int(at or time.time()), body)


def test_a_genuine_message_gives_the_rollout():
    rollout, body, headers = genuine()
    assert verify_webhook(body, headers, SECRET) == rollout
    assert verify_webhook(body, {name.title(): value for name, value in headers.items()}, SECRET) == rollout


def test_while_secrets_change_over_either_is_good():
    rollout, body, headers = genuine(("new secret", SECRET))
    assert verify_webhook(body, headers, SECRET) == verify_webhook(body, headers, "new secret") == rollout


def test_the_signature_is_that_of_the_published_standard():
    # The example of the specification of Standard Webhooks.
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    made = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("webhook-id", "r-2"),
        ("webhook-timestamp", "1000000001"),
        ("webhook-timestamp", "soon"),
        ("webhook-signature", "v1,é" + "A" * 40),
        ("webhook-signature", " "),
        ("webhook-signature", ""),
    ],
)
def test_whatever_was_changed_on_the_way_is_refused(header, value):
    _, body, headers = genuine(at=10**9)
    verify_webhook(body, headers, SECRET, now=1e9)
    with pytest.raises(WebhookError):
        verify_webhook(body, headers | {header: value}, SECRET, now=1e9)
    with pytest.raises(WebhookError, match="no signature fits"):
        verify_webhook(body + b" ", headers, SECRET, now=1e9)
    with pytest.raises(WebhookError, match="headers are missing"):
        verify_webhook(body, {}, SECRET)


def test_another_secret_and_an_old_message_are_refused():
    _, body, headers = genuine()
    with pytest.raises(WebhookError, match="no signature fits"):
        verify_webhook(body, headers, SECRET + "x")
    _, body, headers = genuine(at=1000)
    with pytest.raises(WebhookError, match="400 s old"):
        verify_webhook(body, headers, SECRET, now=1400.0)
    verify_webhook(body, headers, SECRET, tolerance_s=600, now=1400.0)


@pytest.mark.parametrize("body", [b"[]", b'{"type": "other"}', b'{"type": "rollout.ended"}', b"\xff"])
def test_a_signed_message_of_another_form_is_an_error(body):
    headers = signed_headers([SECRET], "r-1", int(time.time()), body)
    with pytest.raises(WebhookError):
        verify_webhook(body, headers, SECRET)


def test_a_secret_that_only_looks_encoded_is_named():
    with pytest.raises(WebhookError, match="whsec_"):
        verify_webhook(b"{}", genuine()[2], "whsec_!!!")


def test_numbers_keep_their_digits():
    assert json.loads(genuine()[1])["data"]["reward"] == 0.1 + 0.2


PRIVATE = [
    *("127.0.0.1", "127.1.2.3", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0"),
    *("100.64.0.1", "224.0.0.1", "[::1]", "[fe80::1]", "[fe80::1%25eth0]", "[fd00::1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]"),
]


@pytest.mark.parametrize("host", PRIVATE)
def test_addresses_of_the_operators_own_network_are_refused(host):
    with pytest.raises(AddressRefused, match="ROLLOUT_WEBHOOK_ALLOW"):
        AllowedAddresses("public").check_url(f"http://{host}:8080/x")


@pytest.mark.parametrize(
    "url", ["ftp://a.example/", "file:///etc/passwd", "http://", "http://u:p@a.example", "x"]
)
def test_what_is_no_plain_http_address_is_refused(url):
    with pytest.raises(AddressRefused):
        AllowedAddresses("public").check_url(url)


def test_public_addresses_and_names_pass_and_a_name_is_checked_again_by_its_address():
    allowed = AllowedAddresses("public")
    for url in ("https://93.184.215.14/x", "http://trainer.example/x", "http://[2606:2800:21f::1]/"):
        allowed.check_url(url)
    allowed.check_address("trainer.example", ip_address("93.184.215.14"))
    with pytest.raises(AddressRefused):
        allowed.check_address("rebound.example", ip_address("127.0.0.1"))


def test_an_operator_lists_names_domains_and_networks():
    allowed = AllowedAddresses("trainer.internal, .lab.internal, 10.1.0.0/16, 127.0.0.1")
    good = {"trainer.internal": "10.9.9.9", "a.lab.internal": "192.168.0.1", "whoever": "10.1.2.3"}
    for host, address in good.items():
        allowed.check_address(host, ip_address(address))
    allowed.check_url("http://127.0.0.1:9/x")
    bad = {"other.internal": "10.9.9.9", "evil-lab.internal": "10.2.0.1", "public.example": "93.184.215.14"}
    for host, address in bad.items():
        with pytest.raises(AddressRefused):
            allowed.check_address(host, ip_address(address))
    with pytest.raises(AddressRefused):
        AllowedAddresses("trainer.internal").check_url("http://other.example/")


def test_a_list_that_cannot_be_read_is_named_at_the_start():
    with pytest.raises(SettingsError, match="ROLLOUT_WEBHOOK_ALLOW"):
        Settings.from_env({"ROLLOUT_WEBHOOK_ALLOW": "public, 10.0.0.0/33"})


def test_the_secret_is_shown_nowhere():
    settings = Settings.from_env({"ROLLOUT_WEBHOOK_SECRET": SECRET})
    assert SECRET not in repr(settings) + str(settings) + settings.model_dump_json()
