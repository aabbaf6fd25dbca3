"""Keys, tenants and the client's side of both, without any server."""

from __future__ import annotations

import hmac
import json
import re

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout.client import ApiKeyError, AsyncClient, Client
from services.state import api_keys
from services.state.api_keys import FORMAT, Access, ApiKey, Scope, check_scope
from services.state.tenants import QuotaExceeded, Tenant, check_name

ID, SECRET = "0123456789ab", "c0ffee" + "0" * 58
TEXT = f"rlt_{ID}_{SECRET}"


def key(**fields) -> ApiKey:
    given = {"id": ID, "tenant": "a", "scopes": [Scope.READ], "digest": api_keys._digest(SECRET)}
    return ApiKey(**{**given, "created_at": 0.0, **fields})


ACCESS = Access("v", {ID: key()}, {})


def test_a_key_is_found_by_its_whole_text_only():
    assert ACCESS.find(TEXT).id == ID
    for text in (TEXT[:-1] + "1", TEXT[:-1], TEXT + "0", TEXT.upper(), f"rlt_{ID[::-1]}_{SECRET}", ""):
        assert ACCESS.find(text) is None


@given(st.text(max_size=300))
def test_no_text_breaks_the_look_up(text):
    assert ACCESS.find(text) is None
    assert ACCESS.find(TEXT + text) is None or text == ""


@given(st.text(alphabet=list("rlt_0123456789abcdef٣۷é\n "), min_size=70, max_size=90))
def test_only_plain_hex_digits_make_a_key(text):
    if FORMAT.fullmatch(text):
        assert text.isascii() and len(text) == 81


def test_secrets_are_compared_in_constant_time_also_for_an_unknown_id(monkeypatch):
    pairs = []
    compare = hmac.compare_digest
    monkeypatch.setattr(api_keys.hmac, "compare_digest", lambda a, b: pairs.append((a, b)) or compare(a, b))
    ACCESS.find(TEXT)
    ACCESS.find(f"rlt_{'f' * 12}_{SECRET}")
    assert len(pairs) == 2
    assert all(len(a) == len(b) == 64 for a, b in pairs)


def test_admin_may_everything_and_the_others_only_themselves():
    assert all(key(scopes=[Scope.ADMIN]).may(scope) for scope in (*Scope, "train:a"))
    assert [scope for scope in Scope if key(scopes=[Scope.SUBMIT]).may(scope)] == [Scope.SUBMIT]
    assert not any(key(scopes=[]).may(scope) for scope in Scope)
    operator, trainer = key(scopes=[Scope.OPERATE]), key(scopes=["train:a"])
    every = (*Scope, "train:a", "train:b")
    assert [scope for scope in every if operator.may(scope)] == ["metrics", "operate", "train:a", "train:b"]
    assert [scope for scope in every if trainer.may(scope)] == ["train:a"]
    assert trainer.may("read", "train:a") and not trainer.may("read", "train:b") and not trainer.may()


@given(st.text(max_size=20) | st.text(max_size=80).map("train:{}".format))
@example("train:a\n")
@example("train:" + "a" * 64)
@example("train:../a")
@example("train:{name}")
def test_a_scope_is_one_of_the_words_or_names_a_policy_as_policies_are_named(text):
    try:
        assert check_scope(text) == text
    except ValueError:
        assert text not in {*Scope} and not re.fullmatch(r"train:[a-z0-9][a-z0-9._-]{0,62}", text)
    else:
        assert text in {*Scope} or re.fullmatch(r"train:[a-z0-9][a-z0-9._-]{0,62}", text)


def test_keys_with_new_scopes_are_stored_so_that_older_releases_can_read_them():
    given = key(scopes=["read", "operate", "train:a"])
    raw = json.loads(given.stored())
    assert (raw["scopes"], raw["further"]) == (["read"], ["operate", "train:a"])
    assert ApiKey.model_validate_json(given.stored()) == given


def test_a_key_ends_when_it_is_said_to():
    assert key().state(1e12) == "active"
    assert [key(expires_at=10.0).state(now) for now in (9.9, 10.0)] == ["active", "expired"]
    assert key(expires_at=10.0, revoked_at=1.0).state(20.0) == "revoked"
    assert key(expires_at=10.0, replaced_by="x").state(5.0) == "replaced"


@pytest.mark.parametrize("name", ["", "*", "A", "a b", "-a", "a:b", "a/b", "é", "a" * 64, "a\n"])
def test_a_tenant_s_name_fits_into_a_redis_key_and_a_log_line(name):
    with pytest.raises(ValueError, match="a name has 1 to 63"):
        check_name(name)
    with pytest.raises(ValueError, match="a name has 1 to 63"):
        Tenant(name=name)


def test_lists_take_names_and_patterns_and_none_takes_all():
    tenant = Tenant(name="a", handlers=("math", "swe-*"), images=())
    assert [tenant.may_use("handlers", name) for name in ("math", "swe-x", "maths")] == [True, True, False]
    assert not tenant.may_use("images", "base")
    assert tenant.may_use("runtimes", "anything")


def test_a_refusal_for_quota_says_what_is_left_and_what_to_do():
    text = str(QuotaExceeded("a", kind="rate", limit=60, used=3, asked=10, wait_ms=7000))
    assert "60 rollouts a minute" in text and "3 of them left" in text and "holds 10" in text
    assert "smaller calls" in str(QuotaExceeded("a", kind="live", limit=4, used=0, asked=10))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_client_sends_its_key_or_the_environment_s_or_none(kind, monkeypatch):
    def sent(**given):
        client = kind("http://127.0.0.1:9", **given)
        if client.auth is None:
            return None
        request = httpx.Request("GET", "http://127.0.0.1:9/v1/status")
        return next(client.auth.auth_flow(request)).headers["Authorization"]

    monkeypatch.delenv("ROLLOUT_API_KEY", raising=False)
    assert sent() is None
    assert sent(api_key=TEXT) == f"Bearer {TEXT}"
    monkeypatch.setenv("ROLLOUT_API_KEY", f"{TEXT}\n")
    assert sent() == f"Bearer {TEXT}"
    assert sent(api_key="other") == "Bearer other"
    assert sent(api_key="") is None


@pytest.mark.parametrize("bad", ["rlt_\n_evil", "rlt_é", "a b", "x\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(bad):
    with pytest.raises(ApiKeyError, match="ROLLOUT_API_KEY") as caught:
        Client("http://127.0.0.1:9", api_key=bad)
    assert bad not in str(caught.value)
