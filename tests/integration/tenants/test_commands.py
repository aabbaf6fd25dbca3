"""`rollout keys` and `rollout tenants`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.key_commands import keys as keys_command
from services.key_commands import tenants as tenants_command
from services.launch.redis import Choice, own_url, prepare
from services.state import keys as names
from tests.helpers.stack import Process, free_port, redis_binary, wait_until
from tests.helpers.tenants import run


def test_an_operator_makes_lists_rotates_and_revokes_keys(world):
    made = run(keys_command, "create", "team-a", "--scope", "submit,read", "--expires", "30d", url=world.url)
    text = made.stdout.strip()
    assert world.get("/v1/status", text).json["tenant"]["name"] == "team-a"
    old = text.split("_")[1]

    rotated = run(keys_command, "rotate", old, "--grace", "1h", url=world.url).stdout.strip()
    new = rotated.split("_")[1]
    assert [world.get("/v1/status", secret).status_code for secret in (text, rotated)] == [200, 200]
    assert "replaced by" not in run(keys_command, "rotate", new, "--grace", "0s", url=world.url).stdout
    refused = world.get("/v1/status", rotated)
    assert refused.status_code == 401 and "is expired and was replaced by" in refused.json["detail"]

    run(keys_command, "revoke", old, url=world.url)
    assert "is revoked" in world.get("/v1/status", text).json["detail"]
    run(keys_command, "revoke", old, url=world.url)
    assert "is revoked" in run(keys_command, "rotate", old, url=world.url, code=1).output

    shown = run(keys_command, "list", "--json", url=world.url).stdout
    by_id = {entry["id"]: entry for entry in json.loads(shown)}
    assert [by_id[id_]["state"] for id_ in (old, new)] == ["revoked", "expired"]
    assert by_id[old]["replaced_by"] == new and by_id[new]["scopes"] == ["read", "submit"]
    kept = shown + json.dumps(world.redis.hgetall(names.API_KEYS))
    assert text.split("_")[2] not in kept and rotated.split("_")[2] not in kept


def test_a_key_made_elsewhere_can_be_given(world):
    text = f"rlt_{'a' * 12}_{'b' * 64}"
    args = ("create", "team-a", "--scope", "admin", "--from-env")
    for _ in range(2):
        assert text not in run(keys_command, *args, url=world.url, env={"ROLLOUT_API_KEY": text}).output
    assert world.get("/v1/status", text).status_code == 200
    second_key = f"rlt_{'a' * 12}_{'c' * 64}"
    run(keys_command, *args, url=world.url, env={"ROLLOUT_API_KEY": second_key}, code=1)
    refused = run(keys_command, *args, url=world.url, env={"ROLLOUT_API_KEY": "secret-stuff"}, code=1)
    assert "secret-stuff" not in refused.output and "is no key" in refused.output


def test_the_commands_find_the_redis_of_a_running_stack(tmp_path):
    assert own_url(tmp_path) is None
    chosen = prepare(Choice("ours", binary=Path(redis_binary())), tmp_path / "redis", free_port())
    assert own_url(tmp_path) is None  # it does not run
    process = Process("redis", chosen.command, tmp_path)
    try:
        wait_until(lambda: own_url(tmp_path) == chosen.url, 30, "Redis to answer", process)
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("create", "Team A"), "a name has 1 to 63"),
        (("create", "a", "--scope", "root"), "scopes are submit, read, metrics, admin"),
        (("create", "a", "--expires", "soon"), "write 90s, 15m, 1h or 30d"),
        (("create", "a", "--quota-live", "-1"), "neither a number"),
        (("revoke", "nobody"), "there is no key 'nobody'"),
        (("rotate", "nobody"), "there is no key 'nobody'"),
    ],
)
def test_what_a_command_cannot_do_it_says_and_makes_nothing(world, args, message):
    result = CliRunner().invoke(keys_command, [*args, "--redis", world.url])
    assert result.exit_code in (1, 2) and message in result.output
    assert world.keys.list() == [] and world.tenants.list() == []


def test_limits_of_a_tenant_are_set_shown_and_taken_away(world):
    run(keys_command, "create", "a", "--quota-live", "5", "--handlers", "math,swe-*", url=world.url)
    run(tenants_command, "set", "a", "--per-minute", "60", "--quota-live", "any", url=world.url)
    shown = json.loads(run(tenants_command, "show", "a", "--json", url=world.url).stdout)
    assert shown == [
        {
            "name": "a",
            "quota_live": None,
            "per_minute": 60,
            "quota_bytes": None,
            "handlers": ["math", "swe-*"],
            "images": None,
            "runtimes": None,
            "mounts": None,
            "weight": 1.0,
            "live": 0,
        }
    ]
    assert "swe-*" in run(tenants_command, "show", url=world.url).stdout
    run(tenants_command, "set", "a", "--weight", "2.5", "--mounts", "/data/a,/data/b*", url=world.url)
    tenant = world.tenants.get("a")
    assert (tenant.weight, tenant.mounts, tenant.per_minute) == (2.5, ("/data/a", "/data/b*"), 60)
    run(tenants_command, "set", "a", "--mounts", "any", url=world.url)
    assert world.tenants.get("a").mounts is None
    refused = CliRunner().invoke(tenants_command, ["set", "a", "--weight", "0", "--redis", world.url])
    assert refused.exit_code == 2 and "0.01" in refused.output
